"""How long a stream's work takes, learnt from device time, so that a wait can end just in time.

A prediction must not be fed by the waiter's own wake-ups: those are late, so the next prediction
would be later still, and so on. Durations come from the device's event clock. An `Anchor` ties that
clock to the host's: an event, and the host time at which a spinning thread saw it pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

E = TypeVar("E")
MEMORY = 4
MAX_KEYS = 64
ANCHOR_LIFE_NS = 2_000_000_000
"""The two clocks drift apart by some 10 µs a second."""
MICROSECOND = 1_000
MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitPolicy:
    """When a wait sleeps, spins and gives up spinning. All times in ns.

    Args:
        spin_whole: on an adopted loop, work expected to take at most this long is spun for from the
            start.
        block_limit: on an adopted loop, the longest that a wait blocks the loop's thread asleep in
            the extension instead of suspending into the loop (one release of the GIL, not three).
        turn_interval: an adopted loop gets a turn at least this often, whatever is awaited.
        turn_interval_contended: the same while other threads keep the GIL busy: each turn may cost
            a whole switch interval.
        polite_spin: the longest a wait may block a loop that is not the device's own.
        margin_least, margin_share: spin from max(least, share of the expected time) before the end.
        overtime_least, overtime_share: spin on for max(...) after the predicted end, then sleep.
        look_again: on an adopted loop, how long after a spin that missed the end to look again;
            doubled each time.
        spin_most: neither of them is longer than this, however long the work.
        hold_spin: the longest that a wait spins with the GIL held, after it has asked for the GIL
            early because other threads keep it busy; 0: never ask early.
    """

    spin_whole: int = 1_300 * MICROSECOND
    block_limit: int = 10 * MILLISECOND
    turn_interval: int = 2 * MILLISECOND
    turn_interval_contended: int = 50 * MILLISECOND
    polite_spin: int = 60 * MICROSECOND
    margin_least: int = 200 * MICROSECOND
    margin_share: float = 0.03
    overtime_least: int = 150 * MICROSECOND
    overtime_share: float = 0.05
    spin_most: int = 1 * MILLISECOND
    look_again: int = 250 * MICROSECOND
    hold_spin: int = 400 * MICROSECOND

    def margin(self, expected: int, *, own: bool) -> int:
        """How long before the predicted end to start spinning."""
        if not own:
            return self.polite_spin // 2
        return min(max(self.margin_least, int(expected * self.margin_share)), self.spin_most)

    def overtime(self, expected: int, *, own: bool) -> int:
        """How long after the predicted end to go on spinning."""
        if not own:
            return self.polite_spin // 2
        return min(max(self.overtime_least, int(expected * self.overtime_share)), self.spin_most)


class Pace:
    """Expected durations by kind of work (a key such as the launched function), in ns."""

    def __init__(self) -> None:
        # Tuples, replaced whole: a reader in another thread never sees one change.
        self._seen: dict[Hashable, tuple[int, ...]] = {}

    def learn(self, key: Hashable, nanoseconds: int) -> None:
        """One more duration, from device time."""
        before = self._seen.get(key, ())
        if not before and len(self._seen) >= MAX_KEYS:
            self._seen.pop(next(iter(self._seen)), None)
        self._seen[key] = (*before, nanoseconds)[-MEMORY:]

    def expect(self, key: Hashable) -> int | None:
        """The shortest of the last few: waking early costs a spin, waking late costs latency."""
        return min(self._seen.get(key, ()), default=None)


class DeviceClock(Generic[E]):
    """Host times of device events.

    Args:
        elapsed: device time in ns from one event to another; None if either is open.
    """

    def __init__(self, elapsed: Callable[[E, E], int | None]) -> None:
        self._elapsed = elapsed
        self._anchor: tuple[E, int] | None = None
        self.contention_ns = 0
        """How long getting the GIL back took lately (a decaying maximum)."""

    def anchor(self, event: E, host_ns: int) -> None:
        """The device was seen to pass `event` at `host_ns`."""
        self._anchor = (event, host_ns)

    def host_time(self, event: E, now_ns: int) -> int | None:
        """When the device passed `event`; None without a recent anchor."""
        if self._anchor is None:
            return None
        anchor, host_ns = self._anchor
        if now_ns - host_ns > ANCHOR_LIFE_NS:
            return None
        elapsed = self._elapsed(anchor, event)
        return None if elapsed is None else host_ns + elapsed

    def regained(self, delay_ns: int) -> None:
        """The GIL came back this long after it was asked for."""
        self.contention_ns = max(delay_ns, self.contention_ns * 7 // 8)
