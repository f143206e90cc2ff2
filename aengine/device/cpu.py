"""The CPU as a device: each stream is one thread that runs what was launched, in order.

All work of a stream, and so the OpenMP pool that its kernels start, stays on that one thread.
Closures, arguments and results are dropped before the completion fires: a coroutine that resumes
finds nothing of its step kept alive by the worker.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aengine.device.completions import HostCompletion, Reactor
from aengine.device.future import DeviceFuture
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from aengine.device.protocols import Completion
    from aengine.device.trace import Trace

T = TypeVar("T")
MAX_OS_NAME = 15
"""Linux keeps at most this many bytes of a thread's name."""
FOREIGN_LOOK = 0.2
"""Seconds between looks at whether this device closes, while waiting for another device."""


class CpuDevice:
    """Streams of this machine's CPU.

    Args:
        name: in thread names and error messages.
        initializer: called once on each stream's thread before its first work, for settings that
            belong to a thread (`torch.set_num_threads`).
        native: the extension; None: without it. Default: if it is there.
        trace: where launches, completions and wake-ups are drawn.
    """

    def __init__(
        self,
        *,
        name: str = "cpu",
        initializer: Callable[[], object] | None = None,
        native: ModuleType | str | None = "auto",
        trace: Trace | None = None,
    ) -> None:
        self._name = name
        self._initializer = initializer
        self._reactor = Reactor(native=native, trace=trace)
        self._workers = _Workers(self._reactor)
        self._step_id: int | None = None
        # Dropped without close(): the threads end after their last job, nobody waits for them.
        # At interpreter exit somebody must: a thread that is inside a kernel then would take the
        # process down.
        atexit.register(self._workers.stop)
        weakref.finalize(self, _forget, self._workers).atexit = False

    @property
    def name(self) -> str:
        return self._name

    def stream(self, name: str, *, priority: int = 0) -> CpuStream:
        """A new stream with a thread of its own. `priority` has no meaning here.

        Raises:
            DeviceError: the device is closed.
        """
        jobs = self._workers.start(f"{self._name}-{name}", self._initializer)
        return CpuStream(name, self, jobs)

    def mark_step(self, step_id: int | None) -> None:
        """Work launched from now on belongs to this engine step (for errors and the trace)."""
        self._step_id = step_id

    def adopt_loop(self) -> None:
        """Nothing to adopt: a CPU stream's thread wakes any loop in the same way."""

    def statistics(self) -> Mapping[str, Any]:
        """Counts of records and wake-ups, the wake-up latency histogram, the share that spun."""
        return self._reactor.counters.snapshot()

    def close(self) -> None:
        """Finish everything launched, then stop the threads. Idempotent.

        Work that waits for another device's completion does not wait any longer: it fails.
        """
        self._workers.stop()
        atexit.unregister(self._workers.stop)
        self._reactor.close()


class CpuStream:
    """An ordered queue of closures and the thread that runs them."""

    def __init__(self, name: str, device: CpuDevice, jobs: _Jobs) -> None:
        self._name = name
        self._device = device
        self._reactor = device._reactor
        self._jobs = jobs

    def __repr__(self) -> str:
        return f"<CpuStream {self._name!r}>"

    @property
    def name(self) -> str:
        return self._name

    def launch(self, fn: Callable[..., T], /, *args: Any) -> DeviceFuture[T]:
        """Queue `fn(*args)` and go on at once.

        Args:
            fn: runs on the stream's thread. If it raises, the future fails with `DeviceError` and
                so does what depends on it; later independent work of the stream goes on.
            args: a `DeviceFuture` among them arrives as its value.

        Raises:
            DeviceError: the device is closed.
        """
        self._reactor.counters.add("launches")
        future: DeviceFuture[T] = DeviceFuture(self._completion())
        self._jobs.put(_Launch(fn, args, future, self._name, self._reactor.trace))
        return future

    def record(self) -> HostCompletion:
        """The point after all work launched so far, failed work included.

        Raises:
            DeviceError: the device is closed.
        """
        completion = self._completion()
        self._jobs.put(_Point(completion))
        return completion

    def wait(self, completion: Completion, /) -> None:
        """Later work starts after `completion`, whether that succeeds or fails.

        Raises:
            TypeError: `completion` is none of this package's.
            DeviceError: the device is closed.
        """
        self._jobs.put(_Edge(_as_host(completion)))

    def _completion(self) -> HostCompletion:
        return HostCompletion(self._reactor, self._device._step_id)


class _Jobs:
    """What one thread is to do, and what it waits for just now."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = threading.Event()
        self._submitting = threading.Lock()

    def put(self, job: _Job) -> None:
        # The lock only orders a job before the end marker; SimpleQueue.put never blocks.
        with self._submitting:
            if self._closed.is_set():
                raise DeviceError("the device is closed")
            self._queue.put(job)

    def end(self) -> None:
        with self._submitting:
            if not self._closed.is_set():
                self._closed.set()
                self._queue.put(None)

    def next(self) -> _Job | None:
        return self._queue.get()

    def wait_for(self, completion: HostCompletion) -> None:
        """Block the thread until `completion`.

        Our own device finishes all its work before it closes, so our own completions come for
        certain; another device's may not.

        Raises:
            DeviceError: this device closes and another device's completion is still open.
        """
        ours = completion.belongs_to(self._reactor)
        while not completion.wait_sync(None if ours else FOREIGN_LOOK):
            if self._closed.is_set():
                raise DeviceError("the device closed while work waited for another device")


class _Workers:
    """The threads of a device. Holds no reference to it, so that it can be collected."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._all: list[tuple[_Jobs, threading.Thread]] = []
        self._closed = False

    def start(self, name: str, initializer: Callable[[], object] | None) -> _Jobs:
        if self._closed:
            raise DeviceError("the device is closed")
        jobs = _Jobs(self._reactor)
        thread = threading.Thread(target=_work, args=(jobs, name, initializer), daemon=True)
        thread.name = name
        self._all.append((jobs, thread))
        thread.start()
        return jobs

    def end(self) -> None:
        self._closed = True
        for jobs, _ in self._all:
            jobs.end()

    def stop(self) -> None:
        self.end()
        for _, thread in self._all:
            if thread is not threading.current_thread():
                thread.join()


def _forget(workers: _Workers) -> None:
    atexit.unregister(workers.stop)
    workers.end()


def _work(jobs: _Jobs, name: str, initializer: Callable[[], object] | None) -> None:
    _set_os_name(name)
    failure: DeviceError | None = None
    if initializer is not None:
        try:
            initializer()
        except BaseException as error:
            failure = DeviceError(f"the thread of stream {name!r} could not start: {error!r}")
            failure.__cause__ = error
    del initializer
    while (job := jobs.next()) is not None:
        job.run(jobs, failure)
        # Not until the next job comes: that may be a long time.
        del job


def _set_os_name(name: str) -> None:
    """Name the thread for top, htop and py-spy; Python itself does so from 3.14 on."""
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    try:
        comm.write_bytes(name.encode()[:MAX_OS_NAME])
    except OSError:  # not Linux, or /proc is hidden: a name is a convenience
        return


class _Job(Protocol):
    """One thing for a stream's thread to do. Never raises."""

    def run(self, jobs: _Jobs, failure: DeviceError | None) -> None: ...


class _Launch:
    __slots__ = ("_args", "_fn", "_future", "_queued_ns", "_stream", "_trace")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        future: DeviceFuture[Any],
        stream: str,
        trace: Trace | None,
    ) -> None:
        self._fn: Callable[..., Any] | None = fn
        self._args: tuple[Any, ...] = args
        self._future: DeviceFuture[Any] | None = future
        self._stream = stream
        self._trace = trace
        self._queued_ns = time.perf_counter_ns()

    def run(self, jobs: _Jobs, failure: DeviceError | None) -> None:
        fn, args, future = self._fn, self._args, self._future
        self._fn, self._args, self._future = None, (), None
        assert future is not None
        completion = future.completion
        value: Any = None
        start = time.perf_counter_ns()
        try:
            if failure is not None:
                raise failure
            for arg in args:
                if isinstance(arg, DeviceFuture):
                    jobs.wait_for(arg.completion)
            assert fn is not None
            value = fn(*(unwrap(arg) for arg in args))
        except BaseException as error:
            failure = as_device_error(error, fn)
        if self._trace is not None:
            self._draw(fn, completion.step_id, start)
        future._put(value)
        # Before the completion fires: whoever resumes finds the step's objects in no other hands.
        # And `failure` too: its traceback would otherwise hold this frame, and this frame it.
        del fn, args, value, future
        completion.fire(failure)
        del failure

    def _draw(self, fn: Callable[..., Any] | None, step: int | None, start: int) -> None:
        assert self._trace is not None
        name = name_of(fn)
        args = {} if step is None else {"step": step}
        end = time.perf_counter_ns()
        self._trace.span(name, start, end, track=f"stream {self._stream}", args=args)
        queue = f"stream {self._stream} queue"
        self._trace.span(f"{name} (queued)", self._queued_ns, start, track=queue, args=args)


class _Point:
    __slots__ = ("_completion",)

    def __init__(self, completion: HostCompletion) -> None:
        self._completion = completion

    def run(self, jobs: _Jobs, failure: DeviceError | None) -> None:
        self._completion.fire()


class _Edge:
    __slots__ = ("_completion",)

    def __init__(self, completion: HostCompletion) -> None:
        self._completion = completion

    def run(self, jobs: _Jobs, failure: DeviceError | None) -> None:
        try:
            jobs.wait_for(self._completion)
        except DeviceError:
            # Closing: what comes after the edge runs on its own; its inputs say if they failed.
            return


def unwrap(arg: Any) -> Any:
    """The value of a finished `DeviceFuture`, anything else as it is.

    Raises:
        DeviceError: the work that makes the value failed.
    """
    return arg.result_nowait() if isinstance(arg, DeviceFuture) else arg


def as_device_error(error: BaseException, fn: Callable[..., Any] | None) -> DeviceError:
    """What a failed launch fails with: `error` as the cause, without the frames of this room."""
    if isinstance(error, DeviceError):
        error.__traceback__ = None
        return error
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    failure = DeviceError(f"{name_of(fn)} failed on the device: {error!r}")
    failure.__cause__ = error
    return failure


def name_of(fn: Callable[..., Any] | None) -> str:
    """A short name of a launched function."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _as_host(completion: Completion) -> HostCompletion:
    if not isinstance(completion, HostCompletion):
        raise TypeError(f"{completion!r} is no completion of an aengine device")
    return completion
