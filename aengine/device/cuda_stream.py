"""A CUDA stream and the points on it.

A record is one write of the stream's next sequence number to a word of pinned host memory, and one
event behind it (for edges and device time). The word only grows, so "has point n been passed" is a
comparison with it: no driver call, no event that could be re-armed. Whatever a launch uses is held
by its completion until then.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.device.completions import HostCompletion, lost
from aengine.device.cuda_launch import PreparedLaunch
from aengine.device.cuda_point import CudaCompletion
from aengine.device.driver import Event
from aengine.device.future import DeviceFuture
from aengine.device.launching import as_device_error, name_of, unwrap
from aengine.device.pace import Pace
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from aengine.device.cuda import CudaDevice
    from aengine.device.cuda_wait import Spin
    from aengine.device.protocols import Completion

T = TypeVar("T")
WRAP = 1 << 32


class CudaStream:
    """An ordered queue of a CUDA device. Made by `CudaDevice.stream` or `wrap_stream`."""

    def __init__(
        self, device: CudaDevice, name: str, handle: int, *, priority: int | None, word: int | None
    ) -> None:
        self.device = device
        self.handle = handle
        self.priority = priority
        """None: the handle is somebody else's."""
        self.pace = Pace()
        self._name = name
        self._word = word
        self._flag = None if word is None else ctypes.c_uint32.from_address(word)
        self.word_on_device = 0 if word is None else device.driver.device_pointer(word)
        self._sequence = 0
        self._inflight: deque[CudaCompletion] = deque()
        self._last: CudaCompletion | None = None
        self._edges: dict[CudaStream, CudaCompletion] = {}
        """Points of other streams that the next work comes after."""
        # Reentrant: a finaliser may launch or settle while this thread does.
        self._lock = threading.RLock()
        self._settling_soon = False
        self._stranded: list[object] = []
        self.spins: deque[Spin] = deque()
        self._idle_lanes: list[int] = []
        if device.reactor.native is not None:
            # Now and not when somebody first waits: making a stream can stall behind running work.
            self._idle_lanes.append(device.driver.take_stream(device.context))

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
                if not isinstance(error, Exception):
                    # It is for this thread (an interrupt), not for who awaits.
                    self._stranded.append((fn, args, values))
                    raise
                device.look_for_loss()
                failure = device.loss()
                if failure is None:
                    failure = as_device_error(error, fn)
                else:
                    failure.__cause__ = error
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
            # A later point of a stream comes after its earlier ones.
            self._edges[completion.stream] = completion

    def prepare(
        self,
        calls: Sequence[tuple[str | int, tuple[int, ...]]],
        *,
        slots: Sequence[tuple[int, int]] = (),
        key: Hashable = "prepared",
        holds: object = None,
    ) -> PreparedLaunch:
        """A launch list for this stream: law 11's steady step.

        Args:
            calls: driver functions (symbol or address) with integer and pointer arguments.
            slots: (call, argument) of the arguments that each launch gives anew.
            key: the kind of work, by which its duration is learnt.
            holds: kept alive as long as the list is (a graph that it launches).

        Raises:
            DeviceError: the extension is not there, or the driver lacks a function.
        """
        driver = self.device.driver
        resolved = [(driver.address(f) if isinstance(f, str) else f, args) for f, args in calls]
        return PreparedLaunch(self, resolved, slots, key, holds)

    # -- the device room's side --------------------------------------------------------------------

    def reached(self, completion: CudaCompletion) -> bool:
        """Whether the device is past the point."""
        if self._flag is not None:
            return (self._flag.value - completion.sequence) % WRAP < WRAP // 2
        return completion.event.reached()

    def settle(self) -> None:
        """Fire every point that was passed, oldest first."""
        with self._lock:
            while self.spins:
                self._learn_from(self.spins.popleft())
            while self._inflight:
                point = self._inflight.popleft()
                if not self.reached(point):
                    self._inflight.appendleft(point)
                    return
                point.release(time.perf_counter_ns())
                point.fire()

    def _learn_from(self, spin: Spin) -> None:
        clock, counters = self.device.clock, self.device.reactor.counters
        counters.add("waits_spun")
        if spin.reached:
            counters.observe_wakeup(spin.back_ns - spin.seen_ns)
            if (trace := self.device.reactor.trace) is not None:
                trace.span("wake-up", spin.seen_ns, spin.back_ns, track="wake-ups")
        clock.regained(spin.back_ns - spin.seen_ns)
        if spin.exact:
            clock.anchor(spin.point.event, spin.seen_ns)
            spin.point.ended_ns = spin.seen_ns

    def settle_soon(self) -> None:
        """Settle in the running loop's next turn; at once where no loop runs."""
        loop = asyncio._get_running_loop()
        if loop is None:
            self.settle()
        elif not self._settling_soon:
            self._settling_soon = True
            loop.call_soon(self._settle_now)

    def _settle_now(self) -> None:
        self._settling_soon = False
        self.settle()

    def take_lane(self) -> int:
        """A side stream that nothing is queued on, for one host function behind one point."""
        try:
            return self._idle_lanes.pop()
        except IndexError:
            return self.device.driver.take_stream(self.device.context)

    def return_lane(self, handle: int) -> None:
        """The host function has run."""
        self._idle_lanes.append(handle)

    def take_idle_lanes(self) -> list[int]:
        """All idle side streams, for the device to give back."""
        lanes, self._idle_lanes = self._idle_lanes, []
        return lanes

    def fail_pending(self, make_error: Callable[[int | None], DeviceError]) -> None:
        """Fire what was passed; fail the rest."""
        self.settle()
        with self._lock:
            while self._inflight:
                point = self._inflight.popleft()
                point.fire(make_error(point.step_id))
                point._previous = None
            self._last = None
            self._edges = {}

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
        pushed = device.enter()
        try:
            with self._lock:
                if (failure := device.loss()) is not None:
                    return self._failed(failure)
                if self._inflight or self.spins:
                    self.settle()
                # Used up even if the call fails: the word may have been written by then.
                sequence = self._sequence = (self._sequence + 1) % WRAP
                event = Event(device.driver, device.event_flags)
                call(event, sequence)
                if self._stranded:
                    holds, self._stranded = (holds, self._stranded), []
                point = CudaCompletion(self, sequence, event, key, holds)
                edges, self._edges = tuple(self._edges.values()), {}
                previous = self._last if self._inflight else None
                point.started(start_ns, start_event, previous, edges)
                self._inflight.append(point)
                self._last = point
        except DeviceError as error:
            # What was enqueued before the failure may use what it was given: until the next point.
            self._stranded.append(holds)
            device.look_for_loss()
            return self._failed(device.loss() or error)
        finally:
            if pushed:
                device.leave()
        device.woke_up(self, point)
        return point

    def _failed(self, error: DeviceError) -> HostCompletion:
        point = HostCompletion(self.device.reactor, self.device.step_id)
        point.fire(error)
        return point

    def mark_start(self) -> Event | None:
        """On an idle stream an event, so that the next work's device time can be told."""
        device = self.device
        if self._inflight or self.spins:
            self.settle()
        if self._inflight or device.loss() is not None:
            return None
        pushed = device.enter()
        try:
            event = Event(device.driver, device.event_flags)
            code = device.driver.calls["event_record"](event.handle, self.handle)
        finally:
            if pushed:
                device.leave()
        return None if code else event

    def _record(
        self, key: Hashable, holds: object, start_ns: int, start_event: Event | None = None
    ) -> HostCompletion:
        return self.record_after(self._enqueue_record, key, holds, start_ns, start_event)

    def _enqueue_record(self, event: Event, sequence: int) -> None:
        driver = self.device.driver
        code = 0
        if self._word is not None:
            # Before the event: what another stream does behind the event must never be seen by the
            # host before this point is.
            write = driver.calls["stream_write"]
            code = write(self.handle, self.word_on_device, sequence, 0)
        code = code or driver.calls["event_record"](event.handle, self.handle)
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
