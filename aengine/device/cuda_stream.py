"""A CUDA stream and the points on it.

A record is one event (for edges and device time) and one write of the stream's next sequence number
to a word of pinned host memory. The word only grows, so "has point n been passed" is a comparison
with it: no driver call, no event that could be re-armed. Whatever a launch uses is held by its
completion until then.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.device.completions import HostCompletion, lost
from aengine.device.cpu import as_device_error, name_of, unwrap
from aengine.device.cuda_wait import CudaPort, wait_for
from aengine.device.driver import Event
from aengine.device.future import DeviceFuture
from aengine.device.pace import Pace
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Sequence

    from aengine.device.cuda import CudaDevice
    from aengine.device.protocols import Completion

T = TypeVar("T")
WRAP = 1 << 32


class CudaCompletion(HostCompletion):
    """A point on a CUDA stream: passed when the stream's word has reached `sequence`."""

    __slots__ = (
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

    def done(self) -> bool:
        """Whether the stream has passed the point; reads a word of memory."""
        return self._state or self.stream.reached(self)

    def check(self) -> None:
        if not self._state:
            # Passed, but nobody has looked at the stream since.
            self.stream.settle()
        super().check()

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

    def _suspend(self, port: Any) -> Generator[Any, None, None]:
        assert isinstance(port, CudaPort)
        yield from wait_for(self, port)

    def release(self, now_ns: int) -> None:
        """The device has passed the point: learn its time, let go of what it used."""
        stream, previous = self.stream, self._previous
        first = self._start_event if previous is None else previous.event
        self._holds = self._previous = self._start_event = None
        if self.ended_ns is None:
            self.ended_ns = stream.device.clock.host_time(self.event, now_ns) or now_ns
        if first is not None:
            duration = first.elapsed_ns(self.event)
            if duration is not None:
                stream.pace.learn(self.key, duration)
        trace = stream.device.reactor.trace
        if trace is not None:
            args = {} if self.step_id is None else {"step": self.step_id}
            start = self._start_ns
            if previous is not None and previous.ended_ns is not None:
                start = max(start, previous.ended_ns)
            track = f"stream {stream.name}"
            trace.span(str(self.key), start, self.ended_ns, track=track, args=args)

    def predicted_end(self) -> int | None:
        """Host time at which the point should be passed; None without experience."""
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
            end = max(end, link._start_ns) + expected
        return end


BOUT_NS = 20_000_000
MAX_CHAIN = 64
"""Launches ahead of which no end is predicted any more."""


class PreparedLaunch:
    """A list of driver calls that ends in a record, made in one go with the GIL held (law 11).

    Made by `CudaStream.prepare`. One list must not run while it runs.
    """

    def __init__(
        self, stream: CudaStream, calls: Sequence[tuple[int, tuple[int, ...]]], key: Hashable
    ) -> None:
        driver = stream.device.driver
        native = stream.device.reactor.native
        if native is None or not stream.writes_flags:
            raise DeviceError("launch lists need the extension and stream memory operations")
        self._stream = stream
        self._key = key
        record = (driver.address("cuEventRecord"), (0, stream.handle))
        write = (driver.address("cuStreamWriteValue32_v2"), (stream.handle, stream.word_on_device))
        count = len(calls)
        self._list = native.LaunchList((*calls, record, write), ((count, 0), (count + 1, 2)))

    def launch(self, *holds: object) -> HostCompletion:
        """Make the calls and record.

        Args:
            holds: kept alive until the device has passed the record.

        Returns:
            The record. It has failed already if a call did (what was called before that stays
            enqueued) or the device is lost.
        """
        stream, start = self._stream, time.perf_counter_ns()
        start_event = stream.mark_start()
        return stream.record_after(self._run, self._key, holds, start, start_event)

    def _run(self, event: Event, sequence: int) -> None:
        code = self._list.run(event.handle, sequence)
        if code:
            device = self._stream.device
            device.note_error(code)
            device.driver.check(code, f"call {self._list.failed_call} of a launch list")


class CudaStream:
    """An ordered queue of a CUDA device. Made by `CudaDevice.stream` or `wrap_stream`."""

    def __init__(
        self, device: CudaDevice, name: str, handle: int, *, owned: bool, word: int | None
    ) -> None:
        self.device = device
        self.handle = handle
        self.owned = owned
        self.pace = Pace()
        self._name = name
        self._word = word
        self._flag = None if word is None else ctypes.c_uint32.from_address(word)
        self.word_on_device = 0 if word is None else device.driver.device_pointer(word)
        self._sequence = 0
        self._inflight: deque[CudaCompletion] = deque()
        self._last: CudaCompletion | None = None
        # Reentrant: a finaliser may launch or settle while this thread does.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<CudaStream {self._name!r} {self.handle:#x}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def word(self) -> int | None:
        """Host address of the sequence word; None where the device cannot write one."""
        return self._word

    @property
    def writes_flags(self) -> bool:
        return self._word is not None

    @property
    def pending(self) -> Sequence[CudaCompletion]:
        """Points not yet seen as passed, oldest first."""
        return tuple(self._inflight)

    def launch(self, fn: Callable[..., T], /, *args: Any) -> DeviceFuture[T]:
        """Run `fn(*args)` now with this stream current, and record.

        Args:
            fn: enqueues kernels and returns what they will have written. It must not wait for the
                device. If it raises, the future fails with `DeviceError`.
            args: a `DeviceFuture` of this device arrives as its value, with a wait edge from its
                stream; one of another device must be done.

        Raises:
            DeviceError: the device is closed.
        """
        device = self.device
        device.check_open()
        device.reactor.counters.add("launches")
        start, start_event = time.perf_counter_ns(), None
        value: Any = None
        failure: DeviceError | None = device.loss()
        values: list[Any] = []
        if failure is None:
            try:
                values = [self._import(arg) for arg in args]
                start_event = self.mark_start()
                with device.guard(self.handle):
                    value = fn(*values)
            except BaseException as error:
                failure = as_device_error(error, fn)
                device.look_for_loss()
        key = name_of(fn)
        if failure is not None:
            # Kernels that fn enqueued before it raised may still read what it was given.
            if device.loss() is None:
                self._record(f"{key} (failed)", (fn, args, values), start, start_event)
            return DeviceFuture(self._failed(failure))
        point = self._record(key, (fn, args, values, value), start, start_event)
        if device.reactor.trace is not None:
            end = time.perf_counter_ns()
            device.reactor.trace.span(f"launch {key}", start, end, track="launches")
        return DeviceFuture(point, value)

    def record(self) -> HostCompletion:
        """The point after all work given to the stream so far.

        Raises:
            DeviceError: the device is closed.
        """
        self.device.check_open()
        return self._record("record", None, time.perf_counter_ns())

    def wait(self, completion: Completion, /) -> None:
        """Later work starts after `completion`: an edge on the device.

        Raises:
            DeviceError: the device is closed, or `completion` is another device's and still open
                (await it first: a CUDA stream cannot wait for the host).
        """
        self.device.check_open()
        if completion.done():
            return
        if not (
            isinstance(completion, CudaCompletion) and completion.belongs_to(self.device.reactor)
        ):
            raise DeviceError(f"{completion!r} is another device's; await it before the launch")
        if completion.stream is not self:
            with self.device.current():
                self.device.driver.do("stream_wait", self.handle, completion.event.handle, 0)

    def prepare(
        self, calls: Sequence[tuple[str | int, tuple[int, ...]]], *, key: Hashable = "prepared"
    ) -> PreparedLaunch:
        """A launch list for this stream: law 11's steady step.

        Args:
            calls: driver functions (symbol or address) with integer and pointer arguments.
            key: the kind of work, by which its duration is learnt.

        Raises:
            DeviceError: the extension is not there, or the driver lacks a function.
        """
        driver = self.device.driver
        resolved = [(driver.address(f) if isinstance(f, str) else f, args) for f, args in calls]
        return PreparedLaunch(self, resolved, key)

    # -- the device room's side --------------------------------------------------------------------

    def reached(self, completion: CudaCompletion) -> bool:
        """Whether the device is past the point."""
        if self._flag is not None:
            return (self._flag.value - completion.sequence) % WRAP < WRAP // 2
        return completion.event.reached()

    def settle(self) -> None:
        """Fire every point that was passed, oldest first."""
        with self._lock:
            while self._inflight:
                point = self._inflight.popleft()
                if not self.reached(point):
                    self._inflight.appendleft(point)
                    return
                point.release(time.perf_counter_ns())
                point.fire()

    def fail_pending(self, make_error: Callable[[int | None], DeviceError]) -> None:
        """Fire what was passed; fail the rest."""
        self.settle()
        with self._lock:
            while self._inflight:
                point = self._inflight.popleft()
                point.fire(make_error(point.step_id))
                point._previous = None
            self._last = None

    def record_after(
        self,
        call: Callable[[Event, int], None],
        key: Hashable,
        holds: object,
        start_ns: int,
        start_event: Event | None,
    ) -> HostCompletion:
        """Let `call` enqueue work that ends in a record of the event and the sequence number."""
        device = self.device
        with self._lock, device.current():
            if (failure := device.loss()) is not None:
                return self._failed(failure)
            self.settle()
            sequence = (self._sequence + 1) % WRAP
            try:
                event = Event(device.driver)
                call(event, sequence)
            except DeviceError as error:
                device.look_for_loss()
                return self._failed(device.loss() or error)
            self._sequence = sequence
            point = CudaCompletion(self, sequence, event, key, holds)
            point._start_ns, point._start_event = start_ns, start_event
            point._previous = self._last if self._inflight else None
            self._inflight.append(point)
            self._last = point
        device.woke_up(self, point)
        return point

    def _failed(self, error: DeviceError) -> HostCompletion:
        point = HostCompletion(self.device.reactor, self.device.step_id)
        point.fire(error)
        return point

    def mark_start(self) -> Event | None:
        """On an idle stream an event, so that the next work's device time can be told."""
        self.settle()
        device = self.device
        if self._inflight or device.loss() is not None:
            return None
        with device.current():
            event = Event(device.driver)
            code = device.driver.calls["event_record"](event.handle, self.handle)
        return None if code else event

    def _record(
        self, key: Hashable, holds: object, start_ns: int, start_event: Event | None = None
    ) -> HostCompletion:
        return self.record_after(self._enqueue_record, key, holds, start_ns, start_event)

    def _enqueue_record(self, event: Event, sequence: int) -> None:
        driver = self.device.driver
        code = driver.calls["event_record"](event.handle, self.handle)
        if not code and self._word is not None:
            write = driver.calls["stream_write"]
            code = write(self.handle, self.word_on_device, sequence, 0)
        if code:
            self.device.note_error(code)
            driver.check(code, "recording a point")

    def _import(self, arg: Any) -> Any:
        if not isinstance(arg, DeviceFuture):
            return arg
        point = arg.completion
        if point.done():
            return unwrap(arg)
        self.wait(point)
        return arg.handle()

    def query(self) -> int:
        """The driver's word on the stream: 0, `NOT_READY`, or the error that killed the context."""
        return self.device.driver.calls["stream_query"](self.handle)


def loss_error(reason: str) -> Callable[[int | None], DeviceError]:
    """Maker of the error of points that a lost device will not reach."""
    return lambda step_id: lost(reason, step_id)
