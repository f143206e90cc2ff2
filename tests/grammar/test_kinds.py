"""Regular expressions, choices, grammars, structural tags: what they allow, and their errors."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest

from aengine.errors import GrammarError
from aengine.grammar import GrammarLimits
from aengine.grammar.patterns import pattern_problem
from aengine.grammar.translate import translate
from aengine.request import StructuredOutput

from .support import CALL, EOS, allowed, feed, takes, text_of, walk

if TYPE_CHECKING:
    from aengine.grammar import GrammarCompiler, TokenizerInfo


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[a-c]{2,3}", ["ab", "abc"], ["a", "abcd", "xa"]),
        (r"a/b", ["a/b"], ["ab"]),
        (r"a\/b", ["a/b"], ["a\\/b"]),
        (r"[/\\]", ["/", "\\"], ["x"]),
        ("a\nb", ["a\nb"], ["anb"]),
        (r"a\\", ["a\\"], ["a"]),
        (r'"\d+"', ['"12"'], ["12"]),
        (r"^x|y$", ["x", "y"], ["xx", "ay"]),
        (r"(?i)ok", ["OK", "ok"], ["o"]),
        ("é+", ["éé"], ["e"]),
        (r"\$", ["$"], [""]),
    ],
)
def test_regex(
    pattern: str, good: list[str], bad: list[str], compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(StructuredOutput.regex(pattern))
    for text in good:
        assert re.fullmatch(pattern, text)
        assert takes(grammar.matcher(), text, info)
    for text in bad:
        assert not re.fullmatch(pattern, text)
        assert not takes(grammar.matcher(), text, info)


def test_regex_walks_match(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    for pattern in (
        r"[a-z_]{1,4}@[A-Z]{2}\.(com|org)",
        r"([0-9]{1,3},){2}[0-9]",
        r"[^x]{3}",
        "a*?b+",
    ):
        grammar = compiler.compile(StructuredOutput.regex(pattern))
        for seed in range(10):
            tokens = walk(grammar.matcher(), info, random.Random(seed))
            assert tokens is not None
            assert re.fullmatch(pattern, text_of(tokens, info))


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (["yes", "no"], ["maybe", "", "yesno"]),
        (["a", "ab", "abc"], ["b", "abcd"]),
        (['say "hi"', "back\\slash", "new\nline", "tab\t"], ["say hi"]),
        (["\x7f", "\x00", "é", "😀", "\u2028"], ["x"]),
        (["/x/", "{}", "<eos>", "// no comment"], ["x"]),
    ],
)
def test_choice(
    options: list[str], others: list[str], compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(StructuredOutput.choice(options))
    for option in options:
        assert takes(grammar.matcher(), option, info)
    for other in others:
        assert not takes(grammar.matcher(), other, info)
    for seed in range(10):
        tokens = walk(grammar.matcher(), info, random.Random(seed))
        assert tokens is not None
        assert text_of(tokens, info) in options


def test_json_object(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    grammar = compiler.compile(StructuredOutput.json_object())
    assert takes(grammar.matcher(), '{"a": [1, {"b": null}]}', info)
    for other in ("[1]", '"x"', "3", "{1:2}"):
        assert not takes(grammar.matcher(), other, info)


_SUM = 'start: NUM ("+" NUM)*\nNUM: /[0-9]+/\n'
_GBNF_SUM = 'root ::= num ("+" num)*\nnum ::= [0-9]+\n'


@pytest.mark.parametrize("grammar", [_SUM, _GBNF_SUM], ids=["lark", "gbnf"])
def test_grammar(grammar: str, compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    compiled = compiler.compile(StructuredOutput.grammar(grammar))
    assert takes(compiled.matcher(), "1+22+3", info)
    for other in ("", "+1", "1++2", "1 + 2"):
        assert not takes(compiled.matcher(), other, info)


def test_gbnf_escapes(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    compiled = compiler.compile(
        StructuredOutput.grammar(r'root ::= "\u00e9" [\x41-\x43] "\u0041\U0001F600" "\"\\u"')
    )
    assert takes(compiled.matcher(), 'éBA😀"\\u', info)


def test_lark_with_an_inline_schema(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    lark = 'start: "call " body "!"\nbody: %json {"type": "integer", "maximum": 9} // %json {"x"\n'
    compiled = compiler.compile(StructuredOutput.grammar(lark))
    assert takes(compiled.matcher(), "call 7!", info)
    assert not takes(compiled.matcher(), "call 10!", info)
    keys = compiler.compile(
        StructuredOutput.grammar('start: %json {"properties": {"a": {"type": "integer"}}}')
    )
    assert not takes(keys.matcher(), '{"\\u0061":"x"}', info)


def test_lark_strings_may_look_like_directives(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    compiled = compiler.compile(StructuredOutput.grammar('start: "%json {" /%json [}]/'))
    assert takes(compiled.matcher(), "%json {%json }", info)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (StructuredOutput.regex("("), "unclosed group"),
        (StructuredOutput.regex("a(?=b)"), "look-ahead"),
        (StructuredOutput.regex(r"(a)\1"), "backreferences"),
        (StructuredOutput.regex("a\\"), "backslash"),
        (StructuredOutput.regex("x{3,1}"), "repetition"),
        (StructuredOutput.grammar('start: "a'), "lexer error"),
        (StructuredOutput.grammar("start: nope"), "unknown name"),
        (StructuredOutput.grammar('other: "a"'), "neither Lark"),
        (StructuredOutput.grammar("root ::= nope"), "nope"),
        (StructuredOutput.grammar('root ::= "a'), "neither Lark"),
        (StructuredOutput.grammar("root ::= " + "(" * 20_000), "neither Lark"),
        (StructuredOutput.grammar('root ::= "\\UFFFFFFFF"'), "neither Lark"),
        (StructuredOutput.grammar("start: start"), "nothing matches"),
        (StructuredOutput.grammar("start: a\na[temperature=0.5]: /b+/"), "temperature"),
        (StructuredOutput.grammar("start: %json nonsense"), "%json"),
        (StructuredOutput.grammar('start: %json {"uniqueItems": true}'), "uniqueItems"),
        (StructuredOutput.grammar('start: %json {"x-guidance": {"lenient": true}}'), "x-guidance"),
        (StructuredOutput.grammar("start: <no_such_token>"), "no_such_token"),
    ],
)
def test_invalid_specs_are_grammar_errors(
    spec: StructuredOutput, words: str, compiler: GrammarCompiler
) -> None:
    """V#17313, V#17248: an invalid regex, schema or grammar is this request's error."""
    with pytest.raises(GrammarError) as raised:
        compiler.compile(spec)
    assert words in str(raised.value)
    assert raised.value.param == "structured"
    assert raised.value.value == spec.spec
    assert "<state>" not in str(raised.value)
    assert "<backtrace>" not in str(raised.value)


def test_empty_choices_are_refused_when_built() -> None:
    for options in ([], [""], ["a", ""], "ab", [1]):
        with pytest.raises(GrammarError) as raised:
            StructuredOutput.choice(options)  # type: ignore[arg-type]
        assert raised.value.param == "structured"


_TAGS = StructuredOutput.structural_tag(
    [
        {"begin": "<fn=foo>", "schema": {"type": "integer"}, "end": "</fn>"},
        {
            "begin": "<fn=bar>",
            "schema": {"type": "object", "required": ["a"], "additionalProperties": False,
                       "properties": {"a": {"type": "boolean"}}},
            "end": "</fn>",
        },
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", True),
        ("free text, anything: {<fn=", True),
        ("<fn=baz>is not a tag", True),
        ("x <fn=foo>12</fn>", True),
        ('<fn=bar>{"a":true}</fn> and <fn=foo>-1</fn> then more', True),
        ("a <fn=<fn=foo>1</fn>", True),
        ("x <fn=foo>12", False),
        ("x <fn=foo>bad</fn>", False),
        ("x <fn=bar>{}</fn>", False),
        ("x <fn=foo>1</fn", False),
        ("x <fn=foo>1</fn><fn=foo>x", False),
    ],
)
def test_structural_tags(
    text: str, whole: bool, compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    assert takes(compiler.compile(_TAGS).matcher(), text, info) is whole


def test_structural_tag_ends_only_outside(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    matcher = compiler.compile(_TAGS).matcher()
    assert EOS in allowed(matcher, info)
    feed(matcher, "text <fn=foo>")
    assert EOS not in allowed(matcher, info)
    feed(matcher, "1</fn>")
    assert EOS in allowed(matcher, info)


def test_structural_tag_of_special_tokens(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    spec = StructuredOutput.structural_tag(
        [{"begin": "<call>f(", "schema": {"type": "integer"}, "end": ")<call>"}]
    )
    matcher = compiler.compile(spec).matcher()
    feed(matcher, "hello")
    assert {CALL, EOS, ord("x")} <= allowed(matcher, info)
    matcher.advance(CALL)
    feed(matcher, "f(12)")
    assert allowed(matcher, info) == {CALL}
    matcher.advance(CALL)
    assert {CALL, EOS, ord("x")} <= allowed(matcher, info)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ([{"begin": "", "schema": {}, "end": "x"}], "begin must not be empty"),
        ([{"begin": "a", "schema": {}, "end": 3}], "end must be a string"),
        ([{"begin": "a", "schema": {"not": {}}, "end": ""}], "'not'"),
        (
            [
                {"begin": "<t>", "schema": {}, "end": ""},
                {"begin": "<<t>x", "schema": {}, "end": ""},
            ],
            "could never begin",
        ),
        ([{"begin": "a" * 1001, "schema": {}, "end": ""}], "longer than 1000"),
        ([{"begin": f"<{i}>", "schema": {}, "end": ""} for i in range(257)], "more than 256"),
        ([{"begin": "a<call>", "schema": {}, "end": ""}], "must be at the front"),
    ],
)
def test_bad_tags(tags: list[dict[str, object]], words: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=re.escape(words)):
        compiler.compile(StructuredOutput.structural_tag(tags))


@pytest.mark.parametrize(
    "pattern", [r"^[a-z]+$", r"[\]\[]", r"a\++", r"(?:a|b){2,}?", r"\p{L}", r"[a\-z-]", r"(?P<n>a)"]
)
def test_patterns_with_one_meaning(pattern: str) -> None:
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [r"[a&&b]", r"[[a]]", r"[]a]", r"[^]a]", r"a++", r"a{2}+", r"(?x)a", r"(?>a)", r"\Aa", r"\pL",
     r"\x{41}", r"(?<=a)b", r"[a--b]"],
)  # fmt: skip
def test_patterns_with_two_meanings(pattern: str) -> None:
    assert pattern_problem(pattern)


@pytest.mark.parametrize(
    ("spec", "heavy"),
    [
        (StructuredOutput.json({"type": "object", "properties": {"a": {"type": "string"}}}), False),
        (StructuredOutput.choice(["a", "b"]), False),
        (StructuredOutput.json({"properties": {f"p{i}": {} for i in range(100)}}), True),
        (
            StructuredOutput.json(
                {"properties": {f"p{i}": {} for i in range(20)}, "minProperties": 1}
            ),
            True,
        ),
        (
            StructuredOutput.json(
                {"allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(1, 14)]}
            ),
            True,
        ),
        (StructuredOutput.json({"type": "integer", "multipleOf": 7919}), True),
        (StructuredOutput.grammar("start: A\nA: /a+/ & ~/aa/"), True),
        (StructuredOutput.choice([f"option {i}" for i in range(2000)]), True),
        (StructuredOutput.regex("a" * 3000), True),
    ],
)
def test_what_may_be_slow_is_seen_before(
    spec: StructuredOutput, heavy: bool, info: TokenizerInfo
) -> None:
    assert translate(spec, info, GrammarLimits()).heavy is heavy
