"""The CPU as a device: each stream is one thread that runs what was launched, in order.

All work of a stream, and so the OpenMP pool that its kernels start, stays on that one thread.
Closures, arguments and results are dropped before the completion fires: a coroutine that resumes
finds nothing of its step kept alive by the worker.
"""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.device.completions import HostCompletion, Reactor
from aengine.device.cpu_worker import Edge, Jobs, Launch, Point, Workers, forget
from aengine.device.future import DeviceFuture
from aengine.device.launching import as_host

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from aengine.device.protocols import Completion
    from aengine.device.trace import Trace

T = TypeVar("T")


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
        self._workers = Workers(self._reactor)
        self._step_id: int | None = None
        # Dropped without close(): the threads end after their last job, nobody waits for them.
        # At interpreter exit somebody must: a thread that is inside a kernel then would take the
        # process down.
        atexit.register(self._workers.stop_at_exit)
        weakref.finalize(self, forget, self._workers).atexit = False

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

    @property
    def contended(self) -> bool:
        """Not measured here."""
        return False

    def lead(self, future: DeviceFuture[Any], /) -> float:
        """Nothing is predicted here."""
        return 0.0

    def statistics(self) -> Mapping[str, Any]:
        """Counts of records and wake-ups, the wake-up latency histogram, the share that spun."""
        return self._reactor.counters.snapshot()

    def close(self) -> None:
        """Finish everything launched, then stop the threads. Idempotent.

        Work that waits for another device's completion does not wait any longer: it fails.
        """
        self._workers.stop()
        atexit.unregister(self._workers.stop_at_exit)
        self._reactor.close()


class CpuStream:
    """An ordered queue of closures and the thread that runs them."""

    def __init__(self, name: str, device: CpuDevice, jobs: Jobs) -> None:
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
        self._jobs.put(Launch(fn, args, future, self._name, self._reactor.trace))
        return future

    def record(self) -> HostCompletion:
        """The point after all work launched so far, failed work included.

        Raises:
            DeviceError: the device is closed.
        """
        completion = self._completion()
        self._jobs.put(Point(completion))
        return completion

    def wait(self, completion: Completion, /) -> None:
        """Later work starts after `completion`, whether that succeeds or fails.

        Raises:
            TypeError: `completion` is none of this package's.
            DeviceError: the device is closed.
        """
        self._jobs.put(Edge(as_host(completion)))

    def _completion(self) -> HostCompletion:
        return HostCompletion(self._reactor, self._device._step_id)
