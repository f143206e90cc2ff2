"""A CUDA device: distinct streams, one anchor between its clock and the host's, one watchdog."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from aengine.device.completions import LoopPort, Reactor
from aengine.device.cuda_point import CudaCompletion
from aengine.device.cuda_stream import CudaStream, loss_error
from aengine.device.cuda_wait import CONTENDED, CudaPort
from aengine.device.driver import (
    CAPTURING,
    EVENT_BLOCKING_SYNC,
    EVENT_DEFAULT,
    NOT_READY,
    PAGE,
    STICKY,
    Driver,
    Event,
    load_driver,
)
from aengine.device.notifier import Notifier
from aengine.device.pace import DeviceClock, WaitPolicy
from aengine.device.watchdog import Watchdog
from aengine.errors import ConfigError, DeviceError, DeviceLostError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType

    from aengine.device.future import DeviceFuture
    from aengine.device.trace import Trace

    Guard = Callable[[int], AbstractContextManager[Any]]

WORD_STRIDE = 64
"""Bytes between two streams' words: a cache line each."""
MAX_STREAMS = PAGE // WORD_STRIDE


class CudaReactor(Reactor):
    """A reactor whose ports also have a fine timer and side streams."""

    device: CudaDevice

    def _make_port(self, loop: asyncio.AbstractEventLoop) -> LoopPort:
        return CudaPort(loop, self.device, self.native)


class CudaDevice:
    """One GPU.

    Args:
        index: which, as CUDA numbers them.
        native: the extension; None: without it (threads that block in the driver). Default: if
            it is there.
        trace: where launches, completions and wake-ups are drawn.
        policy: when waits sleep and spin.
        driver: the loaded driver; default: this process's.
        guard: makes a stream (by handle) current while a launched function runs; default: torch's.
        close_timeout: seconds that `close` gives to what is still running.

    Raises:
        DeviceError: there is no driver or no such GPU.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        native: ModuleType | str | None = "auto",
        trace: Trace | None = None,
        policy: WaitPolicy | None = None,
        driver: Driver | None = None,
        guard: Guard | None = None,
        close_timeout: float = 30.0,
    ) -> None:
        self.index = index
        self.driver = driver or load_driver()
        self.policy = policy or WaitPolicy()
        self.clock: DeviceClock[Event] = DeviceClock(Event.elapsed_ns)
        self.step_id: int | None = None
        self.guard = guard or torch_guard(index)
        self.reactor = CudaReactor(native=native, trace=trace)
        self.reactor.device = weakref.proxy(self)
        # Without the extension threads block on events; let them sleep there, not spin.
        self.event_flags = EVENT_DEFAULT if self.reactor.native else EVENT_BLOCKING_SYNC
        self._close_timeout = close_timeout
        self.context = self.driver.context(index)
        self._get_context = self.driver.calls["context_get"]
        self._streams: dict[int, CudaStream] = {}
        self._notifiers: dict[CudaStream, Notifier] = {}
        self._loss: str | None = None
        self._closed = False
        self._words = 0
        self._free_words: list[int] = []
        if self.driver.can_write_flags:
            with self.current():
                self._words = self.driver.take_page()
            self._free_words = [self._words + i * WORD_STRIDE for i in range(MAX_STREAMS)]
        self._watchdog = Watchdog(self, self.name)

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def stream(self, name: str, *, priority: int = 0) -> CudaStream:
        """A new stream of the driver's, so no other has its handle (torch's pool shares them).

        Args:
            priority: 0 is the lowest; -5 and the like run first, see cuCtxGetStreamPriorityRange.

        Raises:
            DeviceError: the device is closed or lost, or has no room for another stream.
        """
        self.check_open()
        with self.current():
            handle = self.driver.take_stream(self.context, priority)
        return self._add(name, handle, priority)

    def wrap_stream(self, name: str, handle: int) -> CudaStream:
        """A stream that somebody else made (a green context's, torch's) and owns.

        Whoever destroys it must do so after the last pinned tensor that torch used on it is gone.

        Raises:
            DeviceError: as `stream`.
            ConfigError: the handle is one of this device's streams already.
        """
        self.check_open()
        if handle in self._streams:
            raise ConfigError(f"{self._streams[handle]!r} has that handle already")
        return self._add(name, handle, None)

    def mark_step(self, step_id: int | None) -> None:
        """Work launched from now on belongs to this engine step (for errors and the trace)."""
        self.step_id = step_id

    def adopt_loop(self) -> None:
        """The running loop belongs to this device: a wait may block its thread for some ms, as long
        as no other thread has something for it.

        Other loops are never blocked for longer than `WaitPolicy.polite_spin`.
        """
        port = self.reactor.port()
        assert isinstance(port, CudaPort)
        port.adopt()

    @property
    def contended(self) -> bool:
        """Whether getting the GIL back after a wait takes long."""
        return self.clock.contention_ns > CONTENDED

    def lead(self, future: DeviceFuture[Any], /) -> float:
        """See `Device.lead`: from the stream's pace."""
        point, port = future.completion, self.reactor.port()
        if self.contended or not (isinstance(port, CudaPort) and port.own):
            return 0.0
        end = point.predicted_end() if isinstance(point, CudaCompletion) else None
        return 0.0 if end is None else max(0.0, (end - time.perf_counter_ns()) / 1e9)

    def statistics(self) -> Mapping[str, Any]:
        """Counts of records and wake-ups, the wake-up latency histogram, the share that spun."""
        return self.reactor.counters.snapshot()

    def close(self) -> None:
        """Wait for what was launched, fail what does not finish, give streams back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline, finished = time.monotonic() + self._close_timeout, True
        for stream in list(self._streams.values()):
            for point in stream.pending[-1:]:
                point.wait_sync(max(deadline - time.monotonic(), 0))
            finished = finished and not stream.pending
            stream.fail_pending(lambda _: DeviceError("the device closed before this work ended"))
        self._watchdog.stop()
        for notifier in self._notifiers.values():
            notifier.stop()
        if self._loss is None and finished:
            self._give_back()
        self.reactor.close()

    # -- the device room's side --------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise if the device was closed.

        Raises:
            DeviceError: it was.
        """
        if self._closed:
            raise DeviceError("the device is closed")

    def loss(self) -> DeviceLostError | None:
        """The error that new work meets, if the device is lost."""
        if self._loss is None:
            return None
        error = loss_error(self._loss)(self.step_id)
        return error if isinstance(error, DeviceLostError) else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is the thread's current one inside."""
        pushed = self.enter()
        try:
            yield
        finally:
            if pushed:
                self.leave()

    def enter(self) -> bool:
        """Make the device's context current; whether `leave` has to undo that.

        A thread that has no context at all keeps this one, as with torch.
        """
        current = ctypes.c_void_p()
        self._get_context(ctypes.byref(current))
        if current.value == self.context:
            return False
        if current.value is None:
            self.driver.do("context_set", self.context)
            return False
        self.driver.do("context_push", self.context)
        return True

    def leave(self) -> None:
        """Undo an `enter` that returned True."""
        self.driver.make("context_pop")

    def woke_up(self, stream: CudaStream, point: CudaCompletion) -> None:
        """A point was recorded."""
        self._watchdog.wake()
        notifier = self._notifiers.get(stream)
        if notifier is not None:
            notifier.look_after(point)

    def note_error(self, code: int) -> None:
        """A driver call returned `code`: if that means the context is gone, fail everything."""
        if code in STICKY:
            self.lose(self.driver.name_of(code))

    def look_for_loss(self) -> None:
        """Ask the driver whether the context is still good."""
        for stream in list(self._streams.values()):
            code = stream.query()
            if code not in (0, NOT_READY, *CAPTURING):
                self.lose(self.driver.name_of(code))
                return

    def lose(self, reason: str) -> None:
        """The context is gone: every pending point fails and names its step."""
        if self._loss is None:
            self._loss = f"{self.name} is lost: {reason}"
        make_error = loss_error(self._loss)
        for stream in list(self._streams.values()):
            stream.fail_pending(make_error)

    def patrol(self) -> bool:
        """The watchdog's look: fire what was passed; whether work is left."""
        busy = False
        for stream in list(self._streams.values()):
            stream.settle()
            busy = busy or bool(stream.pending)
        if busy and self._loss is None:
            with self.current():
                self.look_for_loss()
        return busy and self._loss is None

    def _add(self, name: str, handle: int, priority: int | None) -> CudaStream:
        if (loss := self.loss()) is not None:
            raise loss
        if handle in self._streams:
            raise DeviceError(f"the driver gave out stream {handle:#x} twice")
        word: int | None = None
        if self._words:
            if not self._free_words:
                raise DeviceError(f"{self.name} has {MAX_STREAMS} streams; no more are possible")
            word = self._free_words.pop()
        with self.current():
            stream = CudaStream(self, name, handle, priority=priority, word=word)
        self._streams[handle] = stream
        if self.reactor.native is None:
            self._notifiers[stream] = Notifier(stream)
        return stream

    def _give_back(self) -> None:
        with self.current():
            for stream in self._streams.values():
                for port in self.reactor.ports():
                    if isinstance(port, CudaPort):
                        port.forget(stream)
                for lane in stream.take_idle_lanes():
                    self.driver.return_stream(lane, self.context)
                if stream.priority is not None:
                    self.driver.return_stream(stream.handle, self.context, stream.priority)
        # Not before the last waiter is gone: it may be looking at a stream's word right now.
        if self._words:
            weakref.finalize(self, self.driver.return_page, self._words).atexit = False


def torch_guard(index: int) -> Guard:
    """Make a stream current for torch, on its device.

    Raises:
        DeviceError: torch has no CUDA here.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("torch has no CUDA device here")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    device = torch.device("cuda", index)
    streams: dict[int, torch.cuda.ExternalStream] = {}
    lock = threading.Lock()

    def guard(handle: int) -> AbstractContextManager[Any]:
        stream = streams.get(handle)
        if stream is None:
            with lock:
                made = torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]
                stream = streams.setdefault(handle, made)
        return torch.cuda.stream(stream)

    return guard
