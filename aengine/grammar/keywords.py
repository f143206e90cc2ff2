"""JSON Schema keywords, sorted by what becomes of them. The tables behind `schema_check`.

The grammar library refuses the standard keywords it does not implement, but it takes any word it
does not know for an annotation. So a typo, or an OpenAPI word, would be ignored silently; these
tables make the rule the other way round: what is not listed is an error.
"""

from __future__ import annotations

from typing import Final

SCHEMA: Final = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords whose value is a schema (`items` may be a list of schemas as well)."""

SCHEMA_LIST: Final = frozenset({"prefixItems", "allOf", "anyOf", "oneOf"})
"""Keywords whose value is a list of schemas."""

SCHEMA_MAP: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value maps names to schemas."""

INSTANCE: Final = frozenset({"const", "enum"})
"""Keywords whose value is data, not a schema."""

NUMBER: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
COUNT: Final = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)

IDENTITY: Final = frozenset({"$schema", "$id", "id", "$anchor"})
"""Keywords that say how references resolve; the library needs them."""

ENFORCED: Final = (
    SCHEMA
    | SCHEMA_LIST
    | SCHEMA_MAP
    | INSTANCE
    | NUMBER
    | COUNT
    | IDENTITY
    | frozenset({"type", "required", "pattern", "format", "$ref"})
)

ANNOTATIONS: Final = frozenset(
    {
        "$comment",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "enumNames",
        "example",
        "examples",
        "externalDocs",
        "markdownDescription",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    }
)
"""Keywords that assert nothing by their own specification: left out of the grammar."""

HARMLESS_WHEN: Final = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}
"""Keywords that assert nothing with this value, and are refused with any other."""

UNSUPPORTED: Final = {
    "not": "negation cannot be enforced token by token",
    "if": "conditions cannot be enforced; use anyOf",
    "then": "conditions cannot be enforced; use anyOf",
    "else": "conditions cannot be enforced; use anyOf",
    "contains": "use prefixItems or items",
    "minContains": "use prefixItems or items",
    "maxContains": "use prefixItems or items",
    "uniqueItems": "unique items cannot be enforced; use enum, or leave it out",
    "propertyNames": "use patternProperties with additionalProperties: false",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items: false",
    "nullable": 'use type: [..., "null"]',
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $anchor",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
}
"""Keywords that assert something which cannot be enforced, with what to write instead."""

FORMATS: Final = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
"""String formats that are enforced."""

INFORMAL_FORMATS: Final = frozenset(
    {
        "binary",
        "byte",
        "color",
        "decimal",
        "directory-path",
        "double",
        "file-path",
        "float",
        "int32",
        "int64",
        "json-string",
        "multi-line",
        "password",
        "path",
        "textarea",
        "uint32",
        "uint64",
    }
)
"""Formats of no specification of JSON Schema (OpenAPI, pydantic): a listed weakening."""
