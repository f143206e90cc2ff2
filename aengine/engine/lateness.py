"""`Lateness`: how late the next step may be decided, learnt from how late past ones were launched.

What is launched behind a running step cannot be changed any more, and a request that arrives
meanwhile waits for both. So a step is decided when the running one is about to end. How long that
takes, launching and the wake-up included, is measured: beside many consumers in the host's loop a
thread waits milliseconds for its turn, and the device must not.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_LEAD = 0.001
"""Seconds before the end of a step at which the next one is launched at the latest."""
UNKNOWN = 0.001
"""Seconds that deciding and launching are taken to need before any was measured."""
SHORTEST_WAIT = 0.001
"""Seconds; waiting for less than this is not worth a turn of the loop."""
REMEMBERED = 16


class Lateness:
    """Of one step loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._needed: deque[float] = deque(maxlen=REMEMBERED)
        self._planned: float | None = None

    @property
    def lead(self) -> float:
        """Seconds before the end of the running step at which the next one has to be decided."""
        return LEAST_LEAD + 1.5 * max(self._needed, default=UNKNOWN)

    def wait(self, left: float) -> float:
        """Seconds to wait before the next step is decided; 0.0: not at all.

        Args:
            left: seconds until the running step ends; 0.0 if that is not known.
        """
        spare = left - self.lead
        if spare <= SHORTEST_WAIT:
            self._planned = None
            return 0.0
        self._planned = self._clock() + spare
        return spare

    def launched(self) -> None:
        """The next step is launched: learn how long that took from when it was to be decided."""
        planned, self._planned = self._planned, None
        if planned is not None and (needed := self._clock() - planned) >= 0.0:
            self._needed.append(needed)
