"""The thread behind a CPU stream, and what it is given to do."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from aengine.device.future import DeviceFuture
from aengine.device.launching import as_device_error, name_of, unwrap
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.device.completions import HostCompletion, Reactor
    from aengine.device.trace import Trace

MAX_OS_NAME = 15
"""Linux keeps at most this many bytes of a thread's name."""
EXIT_PATIENCE = 1.0
"""Seconds that the interpreter's exit waits for the job that a thread is doing."""
FOREIGN_LOOK = 0.2
"""Seconds between looks at whether this device closes, while waiting for another device."""


class Jobs:
    """What one thread is to do, and what it waits for just now."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = threading.Event()
        self._submitting = threading.Lock()

    def put(self, job: Job) -> None:
        """Queue a job.

        Raises:
            DeviceError: the device is closed.
        """
        # The lock only orders a job before the end marker; SimpleQueue.put never blocks.
        with self._submitting:
            if self._closed.is_set():
                raise DeviceError("the device is closed")
            self._queue.put(job)

    def end(self) -> None:
        """No job comes after those that are queued."""
        with self._submitting:
            if not self._closed.is_set():
                self._closed.set()
                self._queue.put(None)

    def next(self) -> Job | None:
        """The next job, waited for; None at the end."""
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


class Workers:
    """The threads of a device. Holds no reference to it, so that it can be collected."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._all: list[tuple[Jobs, threading.Thread]] = []
        self._closed = False

    def start(self, name: str, initializer: Callable[[], object] | None) -> Jobs:
        """A new thread; what to give it.

        Raises:
            DeviceError: the device is closed.
        """
        if self._closed:
            raise DeviceError("the device is closed")
        jobs = Jobs(self._reactor)
        thread = threading.Thread(target=_work, args=(jobs, name, initializer), daemon=True)
        thread.name = name
        self._all.append((jobs, thread))
        thread.start()
        return jobs

    def end(self) -> None:
        """Let the threads end after their last job."""
        self._closed = True
        for jobs, _ in self._all:
            jobs.end()

    def stop(self) -> None:
        """Let the threads end, and wait for that."""
        self.end()
        for _, thread in self._all:
            if thread is not threading.current_thread():
                thread.join()

    def stop_at_exit(self) -> None:
        """The same at the interpreter's exit, which a job that never ends must not hold up.

        A thread that comes back from a kernel when the interpreter has gone takes the process down
        (its stack is unwound through C++). So a job is interrupted: at its next line of Python.
        """
        self.end()
        until = time.monotonic() + EXIT_PATIENCE
        for _, thread in self._all:
            thread.join(0.05)
            if thread.is_alive() and thread.ident is not None:
                ident = ctypes.c_ulong(thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
            thread.join(max(0.0, until - time.monotonic()))


def forget(workers: Workers) -> None:
    """The device was dropped without `close`: end its threads without waiting."""
    atexit.unregister(workers.stop_at_exit)
    workers.end()


def _work(jobs: Jobs, name: str, initializer: Callable[[], object] | None) -> None:
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


class Job(Protocol):
    """One thing for a stream's thread to do. Never raises."""

    def run(self, jobs: Jobs, failure: DeviceError | None) -> None: ...


class Launch:
    """Run a function and settle its future."""

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

    def run(self, jobs: Jobs, failure: DeviceError | None) -> None:
        fn, args, future = self._fn, self._args, self._future
        self._fn, self._args, self._future = None, (), None
        assert future is not None
        completion = future.completion
        value: Any = None
        start = time.perf_counter_ns()
        try:
            if failure is not None:
                raise failure
            # No name for an argument here: it would live until this function returns.
            for point in [arg.completion for arg in args if isinstance(arg, DeviceFuture)]:
                jobs.wait_for(point)
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


class Point:
    """Fire a completion: the stream has come this far."""

    __slots__ = ("_completion",)

    def __init__(self, completion: HostCompletion) -> None:
        self._completion = completion

    def run(self, jobs: Jobs, failure: DeviceError | None) -> None:
        self._completion.fire()


class Edge:
    """Wait for another stream."""

    __slots__ = ("_completion",)

    def __init__(self, completion: HostCompletion) -> None:
        self._completion = completion

    def run(self, jobs: Jobs, failure: DeviceError | None) -> None:
        try:
            jobs.wait_for(self._completion)
        except DeviceError:
            # Closing: what comes after the edge runs on its own; its inputs say if they failed.
            return
