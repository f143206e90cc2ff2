"""Whether the alternatives of a `oneOf` exclude each other, so that it means the same as `anyOf`.

The library proves this for types and for string constants in plain objects, not through `$ref`,
which is how pydantic writes a discriminated union. The proof here: all alternatives are constants,
or all are objects that require one property whose constants differ in each.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from urllib.parse import unquote

_LONGEST_CHAIN = 8


def exclude_each_other(alternatives: list[Any], root: Any) -> bool:
    """Whether no document can match two of the alternatives (False: not proven).

    Args:
        alternatives: schemas, as parsed.
        root: the document that their references point into.
    """
    schemas = [_resolved(schema, root) for schema in alternatives]
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    if _disjoint([_constants(schema, root) for schema in schemas]):
        return True
    if any(schema.get("type") != "object" for schema in schemas):
        return False
    shared = set.intersection(*(_names(schema.get("required")) for schema in schemas))
    return any(
        _disjoint([_constants(_property(schema, name), root) for schema in schemas])
        for name in sorted(shared)
    )


def _disjoint(sets: list[frozenset[tuple[str, Any]] | None]) -> bool:
    known = [values for values in sets if values is not None]
    if len(known) < len(sets):
        return False
    return len(frozenset().union(*known)) == sum(map(len, known))


def _names(required: Any) -> set[str]:
    return {name for name in required if isinstance(name, str)} if type(required) is list else set()


def _property(schema: dict[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _constants(schema: Any, root: Any) -> frozenset[tuple[str, Any]] | None:
    """The values that a schema allows if it names them all, as (kind, value); None if not."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        return None
    keys = [_key(value) for value in values]
    return None if None in keys else frozenset(key for key in keys if key is not None)


def _key(value: Any) -> tuple[str, Any] | None:
    if value is None or isinstance(value, (bool, str)):
        return type(value).__name__, value
    if isinstance(value, (int, Decimal)):
        return "number", Decimal(value)
    return None


def _resolved(schema: Any, root: Any) -> Any:
    """The schema behind a chain of local references.

    Words beside a reference only narrow further, so what it leads to is enough for a proof.
    """
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _lookup(root, unquote(schema["$ref"]))
    return None


def _lookup(root: Any, pointer: str) -> Any:
    first, *steps = pointer.split("/")
    if first != "#":
        return None
    for step in steps:
        if not isinstance(root, dict):
            return None
        root = root.get(step.replace("~1", "/").replace("~0", "~"))
    return root
