"""How a coroutine waits for a CUDA stream: the hybrid.

No single way wins (the figures are in `docs/design/awaitables.md`). A wait here combines three:

- the stream's pace predicts the end; shortly before it, the thread spins without the GIL on the
  stream's word: no wake-up latency at all;
- until then it sleeps: on the device's own loop inside the extension (one release of the GIL), or
  suspended in the loop with a timer that is finer than the loop's;
- whenever it suspends, a host function on a side stream stands behind it. It comes some 120 µs
  late, costs next to nothing, and makes a wrong prediction harmless. It never runs on a compute
  stream, so it stalls none, and each compute stream has side streams of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from aengine.device.completions import LoopPort
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

    from aengine.device.cuda import CudaDevice
    from aengine.device.cuda_point import CudaCompletion
    from aengine.device.cuda_stream import CudaStream


CONTENDED = 1_000_000
"""Other threads keep the GIL busy when getting it back takes longer than this (ns)."""
LET_GO = 200_000
"""How long (ns) the GIL has to be free for another thread to take it."""
TURNS_FOR_NEWS = 8
"""Turns of the loop from what a thread brings to what comes of it, a launch for example: callback,
future, task, the next future ... A turn costs some 20 µs."""
SEEN_AT_ONCE = 3_000
"""A spin that sees its word this soon (ns) came too late to say when it was written."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A point that a host function on a side stream stands behind."""

    point: CudaCompletion
    lane: int | None


class Spin(NamedTuple):
    """A wait in the extension, as its stream learns of it."""

    point: CudaCompletion
    began_ns: int
    """When it began to spin."""
    seen_ns: int
    """When the word was seen, or the wait given up."""
    back_ns: int
    """When the thread had the GIL again."""
    reached: bool = True

    @property
    def exact(self) -> bool:
        """Whether the word was seen while it was written, and not found written."""
        return self.reached and self.seen_ns > self.began_ns + SEEN_AT_ONCE


class CudaPort(LoopPort):
    """A loop's port that also has a fine timer and the side streams for this loop's waits."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device: CudaDevice,
        native: ModuleType | None,
    ) -> None:
        super().__init__(loop, device.reactor.counters, native)
        self._device = device
        self.own = False
        self.turn_ns = time.perf_counter_ns()
        self._due: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._watched: dict[int, _Watched] = {}
        self.awaited: dict[object, CudaCompletion] = {}
        """What coroutines of this loop wait for, one entry for each of them."""
        self._nudges = ctypes.c_uint32(0)
        self._nudges_heeded = 0
        self._turns_due = 0
        self._timer = None if native is None else native.Timer()
        if self._timer is not None:
            loop.add_reader(self._timer.fileno(), self._time_passed)

    def adopt(self) -> None:
        """Let waits block the loop's thread; what other threads bring it ends such a wait."""
        self.own = True
        loop, nudges = self._loop(), self._nudges
        assert loop is not None
        bring = loop.call_soon_threadsafe

        def call_soon_threadsafe(
            callback: Callable[..., object], *args: Any, context: Any = None
        ) -> asyncio.Handle:
            handle = bring(callback, *args, context=context)
            # Two threads may lose one of two counts, which ends the wait all the same.
            nudges.value += 1
            return handle

        # There is no other place that executors, futures and inboxes all come by.
        vars(loop)["call_soon_threadsafe"] = call_soon_threadsafe

    def wants_turn(self) -> bool:
        """Whether another thread brought something that the loop still needs turns to handle."""
        if (nudges := self._nudges.value) != self._nudges_heeded:
            self._nudges_heeded = nudges
            self._turns_due = TURNS_FOR_NEWS
        self._turns_due -= 1
        return self._turns_due >= 0

    def others(self, stream: CudaStream) -> tuple[int, ...]:
        """What ends a wait for `stream` early: words and targets, for the extension."""
        found = [ctypes.addressof(self._nudges), (self._nudges_heeded + 1) % (1 << 32)]
        if len(self.awaited) > 1:
            for point in self.awaited.values():
                if point.stream is not stream and point.stream.word is not None:
                    found += [point.stream.word, point.sequence]
        return tuple(found)

    def overtaken(self, stream: CudaStream) -> bool:
        """Whether coroutines of this loop can go on that wait for other streams; sees to it."""
        if len(self.awaited) < 2:
            return False
        done = {p.stream for p in self.awaited.values() if p.stream is not stream and p.done()}
        for other in done:
            other.settle_soon()
        return bool(done)

    def wake_at(self, deadline_ns: int, waiter: asyncio.Future[None]) -> None:
        """Resolve `waiter` at that time, if nothing else does before."""
        if self._timer is None:
            return  # the device is closing; the side stream's function comes all the same
        self._count += 1
        heapq.heappush(self._due, (deadline_ns, self._count, waiter))
        if self._due[0][2] is waiter:
            self._timer.arm(deadline_ns)

    def _time_passed(self) -> None:
        assert self._timer is not None
        self._timer.drain()
        now = time.perf_counter_ns()
        while self._due and (self._due[0][0] <= now or self._due[0][2].done()):
            waiter = heapq.heappop(self._due)[2]
            if not waiter.done():
                waiter.set_result(None)
        if self._due:
            self._timer.arm(self._due[0][0])

    def watch(self, point: CudaCompletion) -> None:
        """See to it that this loop looks at the stream once `point` was passed."""
        if self._bell is None:
            return  # the notifier threads of the pure-Python way look after every point
        stream, device = point.stream, self._device
        for watched in self._watched.values():
            if watched.point.stream is stream and not _later(watched.point, point):
                return  # will come no later, and then looks for who else waits
        with device.current():
            try:
                lane = stream.take_lane()
            except DeviceError:
                return  # no side stream to be had: the watchdog will see the point, or the loss
            self._count += 1
            ticket = self._bell.ticket(self._count)
            code = device.driver.calls["stream_wait"](lane, point.event.handle, 0)
            post = device.reactor.native.post_address if device.reactor.native else 0
            code = code or device.driver.calls["launch_host"](lane, post, ticket)
        if code:
            self._bell.discard(ticket)
            stream.return_lane(lane)
            device.note_error(code)
        else:
            self._watched[self._count] = _Watched(point, lane)

    def detach(self) -> None:
        timer, self._timer = self._timer, None
        loop = self._loop()
        if self.own and loop is not None:
            vars(loop).pop("call_soon_threadsafe", None)
        if timer is not None and loop is not None and not loop.is_closed():
            loop.remove_reader(timer.fileno())
        super().detach()

    def _ticket_came(self, number: int) -> None:
        watched = self._watched.pop(number)
        stream = watched.point.stream
        if watched.lane is not None:
            stream.return_lane(watched.lane)
        stream.settle()
        for point in stream.pending:
            if any(port is self for port in list(point._waiters.values())):
                self.watch(point)
                return

    def forget(self, stream: CudaStream) -> None:
        """The stream ends: its side streams go back to it, whatever they still have to say."""
        for number, watched in list(self._watched.items()):
            if watched.point.stream is stream and watched.lane is not None:
                stream.return_lane(watched.lane)
                self._watched[number] = _Watched(watched.point, None)


def wait_for(point: CudaCompletion, port: CudaPort) -> Generator[Any, None, None]:
    """Wait until `point` is done, by the policy of its device."""
    me = object()
    port.awaited[me] = point
    try:
        yield from _wait_for(point, port)
    finally:
        del port.awaited[me]


def _wait_for(point: CudaCompletion, port: CudaPort) -> Generator[Any, None, None]:
    stream, device = point.stream, point.stream.device
    policy = device.policy
    may_spin = device.reactor.native is not None and stream.word is not None
    again, missed = policy.look_again, False
    while not point.done():
        now = time.perf_counter_ns()
        end = point.predicted_end() if may_spin else None
        if end is None:
            # After a wrong prediction the device's own loop looks again by itself, ever later: the
            # host function can be stuck in a hardware queue behind another stream's work.
            yield from _sleep(point, port, now + again if port.own and missed else None)
            again *= 2
            continue
        expected = stream.pace.expect(point.key) or 0
        if port.own and (port.wants_turn() or port.overtaken(stream)):
            port.turn_ns = now
            yield None
            continue
        begin = end - policy.margin(expected, own=port.own)
        whole = port.own and expected <= policy.spin_whole
        if port.own and now - port.turn_ns > _turn_interval(device):
            port.turn_ns = now
            yield None
        elif now >= begin or whole or (port.own and begin - now <= policy.block_limit):
            limit = max(end, now) + policy.overtime(expected, own=port.own)
            others = port.others(stream) if port.own else ()
            seen = _block(point, now if whole else begin, limit, others)
            if seen:
                return
            # One spin a wait: if it did not see the end, the prediction is no good.
            may_spin = seen is not None
            missed = not may_spin
        else:
            yield from _sleep(point, port, begin)


def _turn_interval(device: CudaDevice) -> int:
    contended = device.clock.contention_ns > CONTENDED
    return device.policy.turn_interval_contended if contended else device.policy.turn_interval


def _block(
    point: CudaCompletion, spin_from: int, limit: int, others: tuple[int, ...]
) -> int | None:
    """Wait in the extension, without the GIL; near the end perhaps with it, if it is contended.

    When the point was seen to be passed; 0: one of `others` came first; None: neither.

    What runs after the word was seen is what the wait costs, and it runs with cold caches: so it
    only leaves a note (`Spin`) for the stream to work through later.
    """
    stream, device = point.stream, point.stream.device
    native, word, clock = device.reactor.native, stream.word, device.clock
    assert native is not None
    asked = began = time.perf_counter_ns()
    hold_spin = device.policy.hold_spin
    if hold_spin and clock.contention_ns > CONTENDED:
        # Getting the GIL back takes a while: ask for it that much earlier, and then keep it.
        # Not at once, though: a thread that waits for it needs a moment to notice that it is free,
        # and would otherwise take it just when the device is done.
        asked = max(spin_from - clock.contention_ns, began + LET_GO)
        seen = native.wait_flag(word, point.sequence, asked, asked, False, others)
        back = time.perf_counter_ns()
        if seen == 0:
            return 0
        clock.regained(back - (seen or asked))
        if seen is None and spin_from - back < hold_spin:
            began = back
            most = min(limit, back + hold_spin)
            seen = native.wait_flag(word, point.sequence, 0, most, True, others)
        if seen:
            stream.spins.append(Spin(point, max(spin_from, began), seen, seen))
        if seen is not None:
            return int(seen)
        began = time.perf_counter_ns()
    seen = native.wait_flag(word, point.sequence, spin_from, limit, False, others)
    if seen != 0:
        back = time.perf_counter_ns()
        stream.spins.append(
            Spin(point, max(spin_from, began), seen or limit, back, seen is not None)
        )
    return None if seen is None else int(seen)


def _sleep(
    point: CudaCompletion, port: CudaPort, deadline_ns: int | None
) -> Generator[Any, None, None]:
    """Suspend until the point fires, or until `deadline_ns`."""
    waiter = asyncio.get_running_loop().create_future()
    point._waiters[waiter] = port
    try:
        port.watch(point)
        if deadline_ns is not None:
            port.wake_at(deadline_ns, waiter)
        if not point.done():
            yield from waiter
    except BaseException:
        point._reactor.counters.add("waits_abandoned")
        raise
    finally:
        point._waiters.pop(waiter, None)
    port.turn_ns = time.perf_counter_ns()


def _later(one: CudaCompletion, other: CudaCompletion) -> bool:
    """Whether `one` comes after `other` on their stream."""
    return 0 < (one.sequence - other.sequence) % (1 << 32) < 1 << 31
