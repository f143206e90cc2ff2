"""A point on a CUDA stream: when it was passed, how long its work took, what it keeps alive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aengine.device.completions import HostCompletion
from aengine.device.cuda_wait import CudaPort, wait_for

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable

    from aengine.device.cuda_stream import CudaStream
    from aengine.device.driver import Event
    from aengine.errors import DeviceError

BOUT_NS = 20_000_000
"""How long a blocked thread sleeps before it looks whether the device was lost."""
MAX_CHAIN = 64
"""Launches ahead of which no end is predicted any more."""
MAX_EDGES = 2
"""Streams across which a prediction looks."""


class CudaCompletion(HostCompletion):
    """A point on a CUDA stream: passed when the stream's word has reached `sequence`."""

    __slots__ = (
        "_edges",
        "_holds",
        "_previous",
        "_start_event",
        "_start_ns",
        "ended_ns",
        "event",
        "key",
        "sequence",
        "stream",
    )

    def __init__(
        self, stream: CudaStream, sequence: int, event: Event, key: Hashable, holds: object
    ) -> None:
        super().__init__(stream.device.reactor, stream.device.step_id)
        self.stream = stream
        self.sequence = sequence
        self.event = event
        self.key = key
        self.ended_ns: int | None = None
        self._holds: object = holds
        self._start_ns = 0
        self._start_event: Event | None = None
        self._previous: CudaCompletion | None = None
        self._edges: tuple[CudaCompletion, ...] = ()

    def done(self) -> bool:
        """Whether the stream has passed the point; reads a word of memory."""
        return self._state or self.stream.reached(self)

    def check(self) -> None:
        if self._state:
            super().check()
        else:
            # Passed, and nobody has looked at the stream since. That costs some 10 µs, which the
            # coroutine that runs now need not pay.
            self.stream.settle_soon()

    def error(self) -> DeviceError | None:
        if not self._state and self.stream.reached(self):
            self.stream.settle()
        return self._error

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Block this thread (never an event loop's) until the point was passed.

        Args:
            timeout: seconds; None waits without limit.

        Returns:
            Whether the point was passed in time. Errors are `check`'s to raise.
        """
        native, word = self.stream.device.reactor.native, self.stream.word
        if native is None or word is None:
            return super().wait_sync(timeout)
        until = None if timeout is None else time.perf_counter_ns() + int(timeout * 1e9)
        while not self.done():
            now = time.perf_counter_ns()
            if until is not None and now >= until:
                return False
            # In bouts, so that a lost device is seen.
            bout = now + BOUT_NS if until is None else min(now + BOUT_NS, until)
            native.wait_flag(word, self.sequence, bout, bout)
        self.stream.settle()
        return True

    def __await__(self) -> Generator[Any, None, None]:
        """Resume when the point was passed. Cancelling abandons the wait, nothing else.

        Raises:
            DeviceError: the work before the point failed.
        """
        counters = self._reactor.counters
        counters.add("waits")
        if self.done():
            counters.add("waits_done_at_once")
            self.check()
            return
        port = self._reactor.port()
        assert isinstance(port, CudaPort)
        yield from wait_for(self, port)
        # Nothing more than this after a spin: it is what the wait costs. See `Spin`.
        if self._state:
            self._woken()
            super().check()
        elif self._waiters:
            self.stream.settle_soon()

    def _passed_ns(self) -> int:
        return self.ended_ns or super()._passed_ns()

    def release(self, now_ns: int) -> None:
        """The device has passed the point: learn its time, let go of what it used."""
        stream, previous = self.stream, self._previous
        first = self._start_event if previous is None else previous.event
        self._holds = self._previous = self._start_event = None
        self._edges = ()
        if self.ended_ns is None:
            self.ended_ns = stream.device.clock.host_time(self.event, now_ns) or now_ns
        if first is not None:
            duration = first.elapsed_ns(self.event)
            if duration is not None:
                stream.pace.learn(self.key, duration)
                self._reactor.counters.add("device_busy_ns", duration)
        trace = stream.device.reactor.trace
        if trace is not None:
            args = {} if self.step_id is None else {"step": self.step_id}
            start = self._start_ns
            if previous is not None and previous.ended_ns is not None:
                start = max(start, previous.ended_ns)
            track = f"stream {stream.name}"
            trace.span(str(self.key), start, self.ended_ns, track=track, args=args)

    def started(
        self,
        host_ns: int,
        event: Event | None,
        previous: CudaCompletion | None,
        edges: tuple[CudaCompletion, ...],
    ) -> None:
        """When the work was launched, and what it follows: an event, or a point still open, and
        points of other streams."""
        self._start_ns, self._start_event, self._previous = host_ns, event, previous
        self._edges = edges

    def _passes(self, depth: int) -> int:
        """When work behind this point can begin, as far as that is known."""
        if self.ended_ns is not None:
            return self.ended_ns
        return (self._predict(depth - 1) if depth else None) or 0

    def predicted_end(self) -> int | None:
        """Host time at which the point should be passed; None without experience."""
        return self._predict(MAX_EDGES)

    def _predict(self, depth: int) -> int | None:
        """The same, looking across at most `depth` edges."""
        chain: list[CudaCompletion] = []
        point: CudaCompletion | None = self
        while point is not None and point.ended_ns is None:
            chain.append(point)
            if len(chain) > MAX_CHAIN:
                return None
            point = point._previous
        end = 0 if point is None or point.ended_ns is None else point.ended_ns
        for link in reversed(chain):
            expected = self.stream.pace.expect(link.key)
            if expected is None:
                return None
            ends = [edge._passes(depth) for edge in link._edges]
            end = max(end, link._start_ns, *ends) + expected
        return end
