"""Completion queue, timer, GIL-free spin and launch lists beneath `aengine.device`."""

from typing import final

post_address: int
"""Address of `void post(void *ticket)`: callable by any thread, without the GIL, once a ticket."""

@final
class Queue:
    """A lock-free queue of ids with an eventfd that is written once for many posts."""

    def __new__(cls) -> Queue: ...
    def fileno(self) -> int:
        """The eventfd: readable when something was posted.

        Raises:
            ValueError: the queue is closed.
        """

    def ticket(self, id: int, /) -> int:
        """An address to hand to `post_address` once. It keeps the queue's descriptor open.

        Raises:
            ValueError: the queue is closed.
        """

    def discard(self, ticket: int, /) -> None:
        """Free a ticket that nobody will post."""

    def post(self, id: int, /) -> None:
        """What `post_address` does with a ticket of that id.

        Raises:
            ValueError: the queue is closed.
        """

    def ring(self) -> None:
        """Make the eventfd readable, if it is not already."""

    def drain(self) -> list[int]:
        """The posted ids, oldest first; resets the eventfd."""

    def close(self) -> None:
        """Take no new tickets; outstanding ones may still be posted. Idempotent."""

@final
class Timer:
    """A timer finer than an event loop's: a timerfd."""

    def __new__(cls) -> Timer: ...
    def fileno(self) -> int:
        """The timerfd: readable when the time has come."""

    def arm(self, deadline_ns: int, /) -> None:
        """Fire at this absolute time of `time.perf_counter_ns()`; the past fires at once."""

    def drain(self) -> bool:
        """Reset the descriptor; whether the timer had fired."""

@final
class LaunchList:
    """Driver calls made in order with the GIL held.

    A call is `(address, (int, ...))` with at most 12 integer or pointer arguments, and returns an
    int, 0 for success. A slot `(call, argument)` names an argument that each run gives anew.
    """

    def __new__(
        cls,
        calls: tuple[tuple[int, tuple[int, ...]], ...],
        slots: tuple[tuple[int, int], ...] = ...,
        /,
    ) -> LaunchList: ...
    def run(self, *slot_values: int) -> int:
        """0, or the code of the first call that did not return 0; later calls are not made.

        Raises:
            TypeError: not one value for each slot.
        """

    @property
    def failed_call(self) -> int | None:
        """Index of the call that failed in the last run."""

def wait_flag(
    address: int,
    target: int,
    spin_from_ns: int,
    limit_ns: int,
    hold_gil: bool = ...,
    others: tuple[int, ...] = ...,
    /,
) -> int | None:
    """Wait until the 32-bit word at `address` has reached `target`: sleep, then spin.

    Args:
        address, target: the word, and the sequence number it is to reach.
        spin_from_ns: absolute `time.perf_counter_ns()` time until which the thread sleeps (looking
            every 0.5 ms); then it spins.
        limit_ns: absolute time at which it gives up.
        hold_gil: spin only, and keep the GIL meanwhile.
        others: more words and targets, in pairs; the first of any ends the wait. At most 31 pairs
            are looked at.

    Returns:
        When the word was seen to have reached `target`; 0 if another did before it; None at the
        limit.
    """

def flag_reached(address: int, target: int, /) -> bool:
    """Whether the 32-bit word at `address` has reached `target` (sequence numbers that wrap)."""

def symbol(library: str, name: str, /) -> int:
    """Address of a function of a library that this process has loaded.

    Raises:
        LookupError: the library is not loaded, or has no such symbol.
    """
