"""Checks of what callers give, whose errors name the value and what would be accepted."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from aengine.errors import InvalidRequestError, shown


def bad(name: str, value: Any, wanted: str) -> InvalidRequestError:
    message = f"{name}={shown(value)} is not valid: {wanted}"
    return InvalidRequestError(message, param=name, value=value)


def check_names(cls: type, options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(cls)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise InvalidRequestError(
                f"unknown sampling parameter {name!r}{hint}", param=name, value=options[name]
            )


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise bad(name, value, "a list")
    return tuple(value)


def check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(name, value, "an integer")
    if value < low or (high is not None and value > high):
        raise bad(name, value, f"at least {low}" if high is None else f"from {low} to {high}")


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise bad(name, value, "a finite number")
    if value > high or value < low or (open_low and value == low):
        raise bad(name, value, f"{'above' if open_low else 'from'} {low:g} to {high:g}")
