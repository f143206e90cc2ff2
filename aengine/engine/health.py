"""`Health`: what `Engine.health` tells; `EngineState`: where in its life an engine is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EngineState(enum.Enum):
    """The life of an engine."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether an engine can serve.

    `state`: "new", "starting", "running", "closing", "closed" or "dead". `alive`: it takes
    requests; while it is `paused` they wait, while it is `asleep` it refuses them.
    `heartbeat_age`: seconds since the step loop came round. An idle engine comes round every
    second, a busy one with every step: an old heartbeat means a device or a loop that hangs.
    """

    state: str
    alive: bool
    paused: bool = False
    asleep: bool = False
    heartbeat_age: float | None = None
    error: str | None = None
