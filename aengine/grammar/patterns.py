"""Regular expressions of JSON schemas: refuse what means different things in different dialects.

JSON Schema asks for ECMA-262 patterns, most validators use their language's own, and the grammar
library has a third dialect. Where they agree nothing needs saying. Where one text has two meanings
the output could match the wrong one, so such a pattern is an error that names the spot.
"""

from __future__ import annotations

import re

_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>|[is]+(?::|\)))")
_ESCAPES = {"A": "\\A", "Z": "\\Z", "z": "\\z", "a": "\\a", "G": "\\G", "Q": "\\Q", "E": "\\E"}


def pattern_problem(pattern: str) -> str | None:
    """Why the pattern is ambiguous between dialects, or None when it is not."""
    in_class = False
    at = 0
    while at < len(pattern):
        rest = pattern[at:]
        char = pattern[at]
        if char == "\\":
            follow = rest[1:2]
            if follow in _ESCAPES and not in_class:
                return f"the escape {_ESCAPES[follow]} differs between regex dialects"
            if rest.startswith(("\\x{", "\\b{")) or (follow in ("p", "P") and rest[2:3] != "{"):
                return f"the escape {rest[:3]} differs between regex dialects"
            at += 2
            continue
        if in_class:
            if rest.startswith(("&&", "--", "~~", "||")):
                return f"{rest[:2]} inside [...] is a set operation in some regex dialects"
            if char == "[":
                return "an unescaped [ inside [...] differs between regex dialects"
            in_class = char != "]"
        elif char == "[":
            if rest.startswith(("[]", "[^]")):
                return "a class that begins with ] differs between regex dialects"
            in_class = True
        elif rest.startswith("(?") and not _GROUP.match(rest):
            return f"the group {rest[:4]} is not supported"
        elif char == "+" and at and pattern[at - 1] in "*+?}" and not _escaped(pattern, at - 1):
            return "a possessive quantifier differs between regex dialects"
        at += 2 if rest.startswith("[^") else 1
    return None


def _escaped(pattern: str, at: int) -> bool:
    before = pattern[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
