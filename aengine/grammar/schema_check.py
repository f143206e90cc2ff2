"""Check a JSON schema before the grammar library sees it: nothing in it may be ignored silently.

Output that ends by itself must validate against the schema. The library keeps that promise for what
it implements; this walk catches the rest: unknown words, numbers that a double cannot hold, counts
that repeated keys could fake, references into places that are no schemas, patterns that mean
different things in different dialects. The result is a cleaned schema (annotations left out) and
an estimate of whether compiling it could be slow.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from aengine.errors import GrammarError
from aengine.grammar import keywords as kw
from aengine.grammar.exclusive import exclude_each_other
from aengine.grammar.patterns import pattern_problem
from aengine.grammar.schema_place import QUOTED, Place, leads_to_schema

if TYPE_CHECKING:
    from aengine.config import GrammarLimits

_LIGHT_BYTES = 8 * 1024
_LIGHT_PROPERTIES = 64
_LIGHT_COUNTED_PROPERTIES = 12
_LIGHT_MERGES = 8
_LIGHT_MULTIPLE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSchema:
    """A schema that the library enforces entirely, but for `weakenings`.

    `heavy` says that compiling it could take long, so it must be tried where it can be stopped.
    """

    text: str
    weakenings: tuple[str, ...]
    heavy: bool


def check_schema(text: str, limits: GrammarLimits) -> CheckedSchema:
    """Parse and check a JSON schema.

    Raises:
        GrammarError: not JSON, too large, too deep, or something in it cannot be enforced; the
            message names the place.
    """
    check_size(text, limits)
    if _depth(text) > limits.max_depth:
        raise _error(f"the schema is nested deeper than {limits.max_depth}", text)
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _error(f"the schema is not valid JSON: {error}", text) from error
    walk = _Walk(spec=text, root=schema)
    cleaned = walk.schema(schema, Place())
    walk.check_references()
    if cleaned is False:
        raise _error("the schema is false: no document validates", text)
    cleaned_text = json.dumps({} if cleaned is True else cleaned, ensure_ascii=False)
    return CheckedSchema(
        text=cleaned_text,
        weakenings=walk.weakenings(),
        heavy=walk.heavy or len(cleaned_text) > _LIGHT_BYTES,
    )


def check_size(text: str, limits: GrammarLimits) -> None:
    """Refuse a spec longer than the limit, or one that is not encodable as UTF-8.

    Raises:
        GrammarError: it is.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _error(f"the text holds an unpaired surrogate: {error}", text) from error
    if size > limits.max_spec_bytes:
        raise _error(f"{size} bytes are more than the limit of {limits.max_spec_bytes}", text)


def _error(message: str, value: Any) -> GrammarError:
    return GrammarError(message, param="structured", value=value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _depth(text: str) -> int:
    """Deepest bracket nesting outside strings, without building the document."""
    deepest = depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


@dataclass(slots=True)
class _Walk:
    spec: str
    root: Any
    informal: dict[str, tuple[Place, int]] = field(default_factory=dict)
    anchors: set[str] = field(default_factory=set)
    references: list[tuple[str, Place]] = field(default_factory=list)
    merges: int = 0
    heavy: bool = False

    def fail(self, place: Place, message: str) -> NoReturn:
        raise _error(f"{message} (at {place.pointer()})", self.spec)

    def schema(self, node: Any, place: Place) -> Any:
        """The cleaned form of one schema."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            self.fail(place, f"a schema must be an object or a boolean, not {_kind(node)}")
        cleaned: dict[str, Any] = {}
        for word, value in node.items():
            if word in kw.ENFORCED:
                kept = self.keyword(word, value, place.below(word))
                if kept is not None:
                    cleaned[word] = kept
            else:
                self.other_word(word, value, place)
        if place.parent is None and isinstance(node.get("x-guidance"), dict):
            cleaned["x-guidance"] = node["x-guidance"]
        self.combinations(cleaned, place)
        if "oneOf" in cleaned and "anyOf" not in cleaned:
            if exclude_each_other(node["oneOf"], self.root):
                return {"anyOf" if word == "oneOf" else word: cleaned[word] for word in cleaned}
            if len(cleaned["oneOf"]) > _LIGHT_MERGES:
                self.heavy = True
        return cleaned

    def other_word(self, word: str, value: Any, place: Place) -> None:
        """A word that the grammar does not carry: allowed only when it asserts nothing."""
        if word in kw.ANNOTATIONS:
            return
        if word == "x-guidance":
            options = value if isinstance(value, dict) else {"": None}
            if place.parent is not None or any(
                k != "whitespace_flexible" or not isinstance(v, bool) for k, v in options.items()
            ):
                self.fail(place, "x-guidance may only set whitespace_flexible, at the top")
            return
        if word.startswith("x-"):
            return
        if word in kw.HARMLESS_WHEN and value is kw.HARMLESS_WHEN[word]:
            return
        if word in kw.UNSUPPORTED:
            self.fail(place, f"{word!r} is not supported: {kw.UNSUPPORTED[word]}")
        known = [*kw.ENFORCED, *kw.ANNOTATIONS, *kw.UNSUPPORTED]
        near = difflib.get_close_matches(word[:QUOTED], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; name your own words x-..."
        self.fail(place, f"{word[:QUOTED]!r} is not a JSON Schema keyword{hint}")

    def keyword(self, word: str, value: Any, place: Place) -> Any:
        """The cleaned value of an enforced keyword; None leaves it out."""
        if word in kw.SCHEMA_MAP:
            return self.mapping(word, value, place)
        if word in kw.SCHEMA_LIST or (word == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                self.fail(place, f"{word} must be a list of schemas, not {_kind(value)}")
            return [self.schema(item, place.below(str(i))) for i, item in enumerate(value)]
        if word in kw.SCHEMA:
            return self.schema(value, place)
        if word in kw.INSTANCE:
            return self.instance(value, place)
        if word in kw.NUMBER or word in kw.COUNT:
            return value if isinstance(value, bool) else self.number(value, place)
        if word == "pattern":
            self.pattern(value, place)
        elif word == "format":
            return self.format(value, place)
        elif word == "$ref":
            if not isinstance(value, str):
                self.fail(place, "$ref must be a string")
            self.references.append((value, place))
        elif word == "$anchor":
            self.anchors.add(f"#{value}")
        elif word in ("$id", "id") and place.depth > 1:
            if not str(value).startswith("#"):
                self.fail(place, f"{word} is only supported at the top of the schema")
            return None
        return value

    def mapping(self, word: str, value: Any, place: Place) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(place, f"{word} must map names to schemas, not {_kind(value)}")
        if word == "patternProperties":
            for pattern in value:
                self.pattern(pattern, place)
            self.merges += len(value)
        if len(value) > _LIGHT_PROPERTIES:
            self.heavy = True
        return {name: self.schema(item, place.below(name)) for name, item in value.items()}

    def pattern(self, value: Any, place: Place) -> None:
        if isinstance(value, str):
            problem = pattern_problem(value)
            if problem:
                self.fail(place, f"pattern {value[:QUOTED]!r}: {problem}")

    def format(self, value: Any, place: Place) -> Any:
        if isinstance(value, str) and value in kw.FORMATS:
            return value
        if isinstance(value, str) and value in kw.INFORMAL_FORMATS:
            first, count = self.informal.get(value, (place, 0))
            self.informal[value] = first, count + 1
            return None
        self.fail(place, f"format {str(value)[:QUOTED]!r} cannot be enforced")

    def instance(self, value: Any, place: Place) -> Any:
        """A `const` or `enum` value, with its numbers checked."""
        if isinstance(value, list):
            return [self.instance(item, place) for item in value]
        if isinstance(value, dict):
            return {name: self.instance(item, place) for name, item in value.items()}
        if isinstance(value, (int, Decimal)) and not isinstance(value, bool):
            return self.number(value, place)
        return value

    def number(self, value: Any, place: Place) -> Any:
        """The number as the library will read it: exactly, or not at all."""
        if isinstance(value, Decimal):
            near = float(value)
            if Decimal(repr(near)) != value:
                self.fail(place, f"{value} has more digits than a double can hold")
            return int(near) if near.is_integer() and abs(near) < 2**53 else near
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
            self.fail(place, f"{value} is beyond 2**53, where a double is no longer exact")
        return value

    def combinations(self, node: dict[str, Any], place: Place) -> None:
        """Rules over several keywords of one schema, and what they may cost to compile."""
        items = node.get("items")
        if "additionalItems" in node and not isinstance(items, list):
            self.fail(place, "additionalItems has no effect here: use items with prefixItems")
        least = node.get("minProperties")
        required = node.get("required")
        names = len(set(map(str, required))) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(1, names):
            # Keys that `properties` does not list may repeat, and a repeated key counts once.
            self.fail(place, f"minProperties {least} can only be enforced through required")
        counted = "minProperties" in node or "maxProperties" in node
        if counted and len(node.get("properties") or ()) > _LIGHT_COUNTED_PROPERTIES:
            self.heavy = True
        applied = sum(w in node for w in ("allOf", "anyOf", "oneOf", "$ref"))
        beside = [w for w in node if w not in ("$defs", "definitions") and w not in kw.IDENTITY]
        if "allOf" in node or (applied and len(beside) > 1):
            self.merges += sum(
                len(node[w]) for w in ("allOf", "anyOf", "oneOf") if isinstance(node.get(w), list)
            )
            self.merges += 1
        multiple = node.get("multipleOf")
        if isinstance(multiple, (int, float)) and not 1e-3 <= abs(multiple) <= _LIGHT_MULTIPLE:
            self.heavy = True
        if self.merges > _LIGHT_MERGES or ("allOf" in node and '"pattern"' in self.spec):
            self.heavy = True

    def weakenings(self) -> tuple[str, ...]:
        """A sentence for each format that is not enforced, with the first place it stands at."""
        return tuple(
            f"format {name!r} is not enforced (at {place.pointer()}"
            + (f" and {count - 1} more places)" if count > 1 else ")")
            for name, (place, count) in self.informal.items()
        )

    def check_references(self) -> None:
        """A reference must lead to a place that was walked as a schema."""
        for target, place in self.references:
            if target not in self.anchors and not leads_to_schema(self.root, unquote(target)):
                shown = target[:QUOTED]
                self.fail(place, f"$ref {shown!r} does not lead to a schema of this document")


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(
        type(value), "a number"
    )
