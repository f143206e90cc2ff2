"""`Intake`: refuses requests while as many wait as may, those being tokenized counted in."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aengine.errors import EngineOverloadedError

if TYPE_CHECKING:
    from aengine.config import SchedulerConfig

SHORTEST_RETRY, LONGEST_RETRY = 0.05, 60.0
"""Seconds."""


class Intake:
    """Bounds what waits, whatever it waits for. On the engine's loop.

    The scheduler bounds its own queue; but a prompt is tokenized, and a grammar compiled, before
    it gets there, and a flood would pile up on the way.

    Args:
        config: bound of the queue, and slots.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._bound = config.max_num_queued_requests
        self._slots = config.max_num_seqs
        self._passed: deque[float] = deque(maxlen=64)

    def check(self, *, preparing: int, waiting: int, running: int, now: float) -> None:
        """Whether one more may come in.

        Raises:
            EngineOverloadedError: no.
        """
        if self._bound is None:
            return
        ahead = preparing + waiting - max(0, self._slots - running)
        if ahead >= self._bound:
            raise EngineOverloadedError(
                f"{preparing + waiting} requests wait and at most {self._bound} may",
                retry_after=self._retry_after(now),
            )

    def passed(self, now: float) -> None:
        """A request is prepared."""
        self._passed.append(now)

    def _retry_after(self, now: float) -> float:
        """Seconds until an eighth of those who wait will have gone on, at the recent rate."""
        if len(self._passed) < 2 or self._bound is None:
            return 1.0
        each = max(0.0, now - self._passed[0]) / len(self._passed)
        return min(LONGEST_RETRY, max(SHORTEST_RETRY, each * -(-self._bound // 8)))
