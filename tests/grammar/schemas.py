"""Tricky JSON schemas: those that are enforced, with documents to reject, and those refused."""

from __future__ import annotations

from typing import Any, NamedTuple


class Enforced(NamedTuple):
    """A schema; texts that must be possible, and texts that must not."""

    schema: Any
    good: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


_INT = {"type": "integer"}
_STR = {"type": "string"}
_DRAFT7 = "http://json-schema.org/draft-07/schema#"

ENFORCED: dict[str, Enforced] = {
    "empty": Enforced({}, ("1", "[]", '"x"'), ("x",)),
    "true": Enforced(True, ("null",)),
    "integer": Enforced(_INT, ("0", "-7"), ("1.5", "01", "1e3")),
    "number": Enforced({"type": "number"}, ("1.5", "1e3"), (".5", "+1")),
    "boolean": Enforced({"type": "boolean"}, ("true",), ("1",)),
    "null": Enforced({"type": "null"}, ("null",), ("0",)),
    "types": Enforced({"type": ["integer", "null"]}, ("3", "null"), ('"3"',)),
    "bounds": Enforced(
        {"type": "integer", "minimum": -3, "maximum": 12}, ("-3", "12"), ("-4", "13")
    ),
    "exclusive": Enforced(
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        ("0.5",),
        ("0", "0.0", "1", "-0", "1.0"),
    ),
    "draft-4 exclusive": Enforced(
        {"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ("2",), ("1",)
    ),
    "fraction bounds": Enforced(
        {"type": "integer", "minimum": 0.5, "maximum": 1.5}, ("1",), ("0",)
    ),
    "multiple": Enforced({"type": "integer", "multipleOf": 3}, ("6", "-9"), ("7",)),
    "multiple of a half": Enforced({"type": "number", "multipleOf": 0.5}, ("1.5",), ("0.25",)),
    "untyped minimum": Enforced({"minimum": 5}, ('"x"', "5"), ("4",)),
    "untyped required": Enforced({"required": ["a"]}, ("[]", '{"a":1}'), ("{}",)),
    "untyped maxLength": Enforced({"maxLength": 2}, ('"ab"', "123"), ('"abc"',)),
    "length": Enforced({**_STR, "minLength": 2, "maxLength": 3}, ('"ab"',), ('"a"', '"abcd"')),
    "length counts characters": Enforced({**_STR, "maxLength": 1}, ('"é"', '"😀"'), ('"é😀"',)),
    "length counts an escape once": Enforced({**_STR, "maxLength": 1}, ('"\\n"',), ('"\\n\\n"',)),
    "length as a float": Enforced({**_STR, "maxLength": 2.0}, ('"ab"',), ('"abc"',)),
    "pattern": Enforced({**_STR, "pattern": "^[a-c]+$"}, ('"abc"',), ('"abd"', '""')),
    "pattern not anchored": Enforced({**_STR, "pattern": "b"}, ('"abc"',), ('"ac"',)),
    "pattern alternatives": Enforced({**_STR, "pattern": "^a|b$"}, ('"ax"', '"xb"'), ('"xay"',)),
    "pattern two anchors": Enforced({**_STR, "pattern": "^a$|^b$"}, ('"a"',), ('"a$"', '"ab"')),
    "pattern escaped dollar": Enforced({**_STR, "pattern": "^c\\$$"}, ('"c$"',), ('"c"',)),
    "pattern quote": Enforced({**_STR, "pattern": '^"$'}, ('"\\""',), ('"""',)),
    "pattern backslash": Enforced({**_STR, "pattern": "^\\\\$"}, ('"\\\\"',), ('"\\"',)),
    "pattern digits are ASCII": Enforced({**_STR, "pattern": "^\\d$"}, ('"7"',), ('"٣"',)),
    "pattern with length": Enforced(
        {**_STR, "pattern": "^a+$", "maxLength": 3}, ('"aaa"',), ('"aaaa"',)
    ),
    "date": Enforced({**_STR, "format": "date"}, ('"2024-02-29"',), ('"2024-13-01"', '"x"')),
    "date-time": Enforced(
        {**_STR, "format": "date-time"}, ('"2024-01-02T03:04:05Z"',), ('"2024-01-02"',)
    ),
    "ipv4": Enforced({**_STR, "format": "ipv4"}, ('"10.0.0.1"',), ('"256.0.0.1"',)),
    "uuid": Enforced({**_STR, "format": "uuid"}, (), ('"x"',)),
    "ipv6": Enforced({**_STR, "format": "ipv6"}, ('"::1"', '"fe80::1"'), ('":::"', '"1::2::3"')),
    "email": Enforced({**_STR, "format": "email"}, ('"a@b.org"',), ('"a"', '"@b"')),
    "hostname": Enforced({**_STR, "format": "hostname"}, ('"a.b-c.org"',), ('"-a"', '"a..b"')),
    "time": Enforced({**_STR, "format": "time"}, ('"23:59:59Z"',), ('"24:00:00Z"', '"1:2:3"')),
    "duration": Enforced({**_STR, "format": "duration"}, ('"P1DT2H"',), ('"P"', '"1D"')),
    "uri": Enforced({**_STR, "format": "uri"}, ('"http://a.b/c?d=e"',), ('"a"', '"//a"')),
    "enum": Enforced({"enum": ["a", 1, None, [2], {"k": True}]}, ('"a"', "[2]"), ("2", '"b"')),
    "enum with quotes": Enforced({"enum": ['a"b', "c\\d", "e\nf"]}, ('"a\\"b"',), ('"ab"',)),
    "enum one prefix of another": Enforced({"enum": ["ab", "abc"]}, ('"ab"', '"abc"'), ('"a"',)),
    "const object": Enforced({"const": {"a": [1, "x"]}}, ('{"a":[1,"x"]}',), ('{"a":[1]}',)),
    "const float": Enforced({"const": 1.0}, ("1",), ("2",)),
    "array": Enforced({"type": "array", "items": _INT}, ("[]", "[1, 2]"), ('["x"]', "[1,]")),
    "array size": Enforced(
        {"type": "array", "items": _INT, "minItems": 1, "maxItems": 2}, ("[1]",), ("[]", "[1,2,3]")
    ),
    "tuple": Enforced(
        {"type": "array", "prefixItems": [_INT, _STR], "items": False}, ('[1,"x"]',), ('[1,"x",2]',)
    ),
    "tuple with a rest": Enforced(
        {"type": "array", "prefixItems": [_INT], "items": _STR, "minItems": 2},
        ('[1,"x"]',),
        ("[1]", "[1,2]"),
    ),
    "draft-7 tuple": Enforced(
        {"$schema": _DRAFT7, "type": "array", "items": [_INT], "additionalItems": False},
        ("[1]",),
        ("[1,2]", '["x"]'),
    ),
    "uniqueItems false": Enforced(
        {"type": "array", "items": _INT, "uniqueItems": False}, ("[1,1]",)
    ),
    "object": Enforced(
        _object({"a": _INT, "b": _STR}, required=["a"]), ('{"a":1}', '{"a":1,"b":"x"}'), ("{}",)
    ),
    "closed object": Enforced(
        _object({"a": _INT}, additionalProperties=False), ("{}",), ('{"b":1}', '{"a":1,"a":2}')
    ),
    "a key spelled with an escape": Enforced(
        _object({"a": _INT}, required=["a"]),
        ('{"a":1,"b":"x"}',),
        ('{"a":1,"\\u0061":"x"}', '{"a":1,"a":"x"}'),
    ),
    "a control character in a key": Enforced(
        _object({"a\n": _INT}, required=["a\n"]), ('{"a\\n":1}',), ('{"a\\u000a":"x"}',)
    ),
    "a quote in a key": Enforced(_object({'a"b': _INT}), ('{"a\\"b":1}',), ('{"a\\"b":"x"}',)),
    "a slash in a key": Enforced(_object({"a/b": _INT}), ('{"a/b":1}',), ('{"a\\/b":"x"}',)),
    "map": Enforced({"type": "object", "additionalProperties": _INT}, ('{"x":1}',), ('{"x":"y"}',)),
    "map of limited size": Enforced(
        {"type": "object", "additionalProperties": _INT, "maxProperties": 1},
        ('{"x":1}',),
        ('{"x":1,"y":2}',),
    ),
    "at least one": Enforced(
        _object({"a": _INT, "b": _INT}, additionalProperties=False, minProperties=1),
        ('{"b":1}',),
        ("{}",),
    ),
    "minProperties within required": Enforced(
        {"type": "object", "required": ["a", "b"], "minProperties": 2}, ('{"a":1,"b":1}',), ("{}",)
    ),
    "required but not listed": Enforced(
        {"type": "object", "required": ["k"], "additionalProperties": _INT},
        ('{"k":1}',),
        ('{"k":"x"}', "{}"),
    ),
    "pattern properties": Enforced(
        {"type": "object", "patternProperties": {"^a": _INT}, "additionalProperties": False},
        ('{"ab":1}',),
        ('{"b":1}', '{"ab":"x"}'),
    ),
    "pattern property meets property": Enforced(
        _object({"ab": {"type": "number"}}, patternProperties={"^a": _INT}),
        ('{"ab":1}',),
        ('{"ab":1.5}',),
    ),
    "a property that never is": Enforced(_object({"a": False}), ("{}",), ('{"a":1}',)),
    "anyOf": Enforced({"anyOf": [_INT, _STR]}, ("1", '"x"'), ("null",)),
    "anyOf beside properties": Enforced(
        _object({"k": _INT}, required=["k"], anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ('{"k":1,"a":2}',),
        ('{"k":1}',),
    ),
    "oneOf of different types": Enforced({"oneOf": [_INT, _STR]}, ("1",), ("null",)),
    "oneOf by a tag": Enforced(
        {
            "oneOf": [
                _object({"k": {"const": "x"}, "v": _INT}, required=["k", "v"]),
                _object({"k": {"const": "y"}, "v": _STR}, required=["k", "v"]),
            ]
        },
        ('{"k":"x","v":1}', '{"k":"y","v":"s"}'),
        ('{"k":"x","v":"s"}',),
    ),
    "oneOf of constants": Enforced(
        {"oneOf": [{"const": 1}, {"enum": [2, "1"]}]}, ("1", '"1"'), ("3",)
    ),
    "oneOf by a tag behind references": Enforced(
        {
            "$defs": {
                "cat": _object({"k": {"const": "cat"}, "n": _INT}, required=["k", "n"]),
                "dog": _object({"k": {"$ref": "#/$defs/tag"}, "n": _STR}, required=["n", "k"]),
                "tag": {"enum": ["dog", "wolf"]},
            },
            "discriminator": {"propertyName": "k"},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        },
        ('{"k":"cat","n":1}', '{"k":"wolf","n":"x"}'),
        ('{"k":"cat","n":"x"}', '{"k":"dog","n":1}'),
    ),
    "allOf": Enforced(
        {"allOf": [_object({"a": _INT}, required=["a"]), _object({"b": _STR}, required=["b"])]},
        ('{"a":1,"b":"x"}',),
        ('{"a":1}',),
    ),
    "allOf with a closed part": Enforced(
        {"allOf": [_object({"a": _INT}, additionalProperties=False), _object({"b": _INT})]},
        ('{"a":1}',),
        ('{"a":1,"b":1}',),
    ),
    "allOf of bounds": Enforced(
        {"allOf": [{**_INT, "minimum": 3}, {"maximum": 5}]}, ("4",), ("6",)
    ),
    "ref": Enforced(
        {"$defs": {"n": _INT}, "type": "array", "items": {"$ref": "#/$defs/n"}}, ("[1]",)
    ),
    "ref with escapes": Enforced(
        {"$defs": {"a/b~c d": _INT}, "$ref": "#/$defs/a~1b~0c%20d"}, ("1",), ('"x"',)
    ),
    "ref with a sibling": Enforced(
        {"$defs": {"n": _INT}, "$ref": "#/$defs/n", "minimum": 5}, ("5",), ("4",)
    ),
    "ref into a list": Enforced(
        {"anyOf": [_INT, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}, ("[1]",), ('["x"]',)
    ),
    "anchor": Enforced({"$defs": {"n": {"$anchor": "n", **_INT}}, "$ref": "#n"}, ("1",), ('"x"',)),
    "recursion": Enforced(
        _object({"v": _INT, "next": {"$ref": "#"}}, required=["v"], additionalProperties=False),
        ('{"v":1,"next":{"v":2}}',),
        ('{"v":1,"next":{}}',),
    ),
    "annotations": Enforced(
        {
            "title": "T",
            "description": "d",
            "default": 3,
            "examples": [1],
            "deprecated": True,
            "$comment": "c",
            "x-mine": {"anything": 1},
            **_INT,
        },
        ("1",),
        ('"x"',),
    ),
    "no whitespace": Enforced(
        {"x-guidance": {"whitespace_flexible": False}, **_object({"a": _INT}, required=["a"])},
        ('{"a":1}',),
        ('{"a": 1}',),
    ),
    "limited whitespace": Enforced(
        _object({"a": _INT}, required=["a"]),
        ("{\n    " + '"a" : 1\n}',),
        ("{" + " " * 41 + '"a":1}',),
    ),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "false": (False, "false"),
    "a typo": ({**_STR, "maxLenght": 3}, "maxLength"),
    "a word of nobody": ({**_STR, "colour": 3}, "'colour'"),
    "OpenAPI nullable": ({**_STR, "nullable": True}, "null"),
    "not": ({"not": _STR}, "'not'"),
    "if": ({"if": _STR, "then": False}, "'if'"),
    "contains": ({"type": "array", "contains": _INT}, "'contains'"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    "propertyNames": ({"propertyNames": {"pattern": "^a"}}, "'propertyNames'"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
    "dynamicRef": ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
    "overlapping oneOf": ({"oneOf": [_INT, {"type": "number"}]}, "oneOf"),
    "oneOf of equal numbers": ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
    "oneOf by a tag that may be missing": (
        {"oneOf": [_object({"k": {"const": 1}}), _object({"k": {"const": 2}})]},
        "oneOf",
    ),
    "oneOf by a tag of anything but objects": (
        {"oneOf": [{"required": ["k"], "properties": {"k": {"const": i}}} for i in (1, 2)]},
        "oneOf",
    ),
    "oneOf of shared constants": ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]}, "oneOf"),
    "overlapping pattern properties": (
        {"type": "object", "patternProperties": {"^a": _INT, "b$": _STR}},
        "disjoint",
    ),
    "minProperties that repeats could fake": (
        {"type": "object", "additionalProperties": _INT, "minProperties": 2},
        "minProperties 2",
    ),
    "additionalItems without effect": (
        {"type": "array", "prefixItems": [_INT], "additionalItems": False},
        "additionalItems",
    ),
    "an integer beyond 2**53": ({"const": 9007199254740993}, "2**53"),
    "a bound beyond 2**53": ({**_INT, "minimum": 9007199254740993}, "2**53"),
    "unknown format": ({**_STR, "format": "regex"}, "'regex'"),
    "format unknown": ({**_STR, "format": "unknown"}, "'unknown'"),
    "lookahead": ({**_STR, "pattern": "(?!a)"}, "(?!a"),
    "word boundary": ({**_STR, "pattern": "\\bfoo"}, "lookarounds"),
    "class intersection": ({**_STR, "pattern": "^[a&&b]$"}, "set operation"),
    "nested class": ({**_STR, "pattern": "^[[a]b]$"}, "unescaped ["),
    "possessive": ({**_STR, "pattern": "^a++$"}, "possessive"),
    "verbose flag": ({**_STR, "pattern": "(?x)a b"}, "(?x)"),
    "dialect anchor": ({**_STR, "pattern": "\\Aa\\z"}, "\\A"),
    "lenient": ({"x-guidance": {"lenient": True}, **_STR}, "x-guidance"),
    "x-guidance inside": (_object({"a": {"x-guidance": {"whitespace_flexible": False}}}), "top"),
    "dangling ref": ({"$ref": "#/$defs/nope"}, "nope"),
    "remote ref": ({"$ref": "http://example.com/x"}, "example.com"),
    "ref into data": ({"enum": [{"colour": 1}], "$defs": {"a": {"$ref": "#/enum/0"}}}, "#/enum/0"),
    "ref into an annotation": ({"default": {"colour": 1}, "$ref": "#/default"}, "#/default"),
    "ref beyond a list": ({"anyOf": [_INT], "items": {"$ref": "#/anyOf/00000000009"}}, "#/anyOf/"),
    "ref to a keyword": ({"properties": {"a": _INT}, "items": {"$ref": "#/properties"}}, "#/prop"),
    "endless ref": ({"$ref": "#"}, "nothing matches"),
    "contradictory bounds": ({**_INT, "minimum": 3, "maximum": 2}, "Unsatisfiable"),
    "contradictory types": ({"$defs": {"n": _INT}, "$ref": "#/$defs/n", **_STR}, "Unsatisfiable"),
    "empty enum": ({"enum": []}, "Unsatisfiable"),
    "unknown type": ({"type": "any"}, "any"),
    "negative length": ({**_STR, "maxLength": -1}, "maxLength"),
    "a list": ([], "must be an object"),
    "properties as a list": ({"properties": []}, "must map names"),
    "a number for a schema": (_object({"a": 3}), "must be an object"),
    "nested id": (_object({"a": {"$id": "http://x/y"}}), "$id"),
}
