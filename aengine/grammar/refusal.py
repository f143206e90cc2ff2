"""The library's error messages, without its inner state and without text the caller never wrote."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from aengine.errors import GrammarError

if TYPE_CHECKING:
    from aengine.grammar.translate import GrammarSource

_DUMPS = re.compile(r"<(?:state|non-verbose/|backtrace|grammar)>.*", re.DOTALL)
_FRAME = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")
_MOST = 2000


def shorten(message: str) -> str:
    """The message without state dumps, backtraces and quoted source."""
    return _FRAME.sub("", _DUMPS.sub("", message)).strip()[:_MOST]


def refused(message: str, source: GrammarSource) -> GrammarError:
    """A GrammarError with the library's message; places are named if they are the caller's own."""
    message = shorten(message)
    if not source.is_lark:
        message = _PLACE.sub("", message)
    return GrammarError(
        f"the grammar cannot be used: {message}", param="structured", value=source.spec
    )
