"""Places in a JSON schema: how the walk names them, and whether a reference leads to one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aengine.grammar import keywords as kw

QUOTED = 60
"""Longest piece of a caller's text in a message."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the schema the walk is: a link to the place above, so that long names cost once."""

    parent: Place | None = None
    name: str = "#"
    depth: int = 0

    def below(self, name: str) -> Place:
        return Place(self, name, self.depth + 1)

    def pointer(self) -> str:
        """The place as a JSON pointer, long names cut."""
        names: list[str] = []
        place: Place | None = self
        while place is not None:
            names.append(place.name[:QUOTED].replace("~", "~0").replace("/", "~1"))
            place = place.parent
        return "/".join(reversed(names))


def leads_to_schema(root: Any, pointer: str) -> bool:
    """Whether a JSON pointer passes through schema keywords only and ends at a schema."""
    first, *steps = pointer.split("/")
    node, expects = root, "schema"
    if first != "#":
        return False
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            if not name.isdecimal() or len(name) > 9 or int(name) >= len(node):
                return False
            node, expects = node[int(name)], "schema"
            continue
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
        if expects == "names":
            expects = "schema"
        elif name in kw.SCHEMA_MAP:
            expects = "names"
        elif name in kw.SCHEMA_LIST or (name == "items" and isinstance(node, list)):
            expects = "index"
        elif name not in kw.SCHEMA:
            return False
    return expects == "schema" and isinstance(node, (dict, bool))
