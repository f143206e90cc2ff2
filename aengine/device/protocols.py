"""The contract of the device room: what a coroutine can await, whatever the device.

Three interfaces of a few methods each. `CpuDevice`, `CudaDevice` and `FakeDevice` implement them;
one test suite runs against all three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from aengine.device.future import DeviceFuture

T = TypeVar("T")


@runtime_checkable
class Completion(Protocol):
    """A point on a stream. Single use: it belongs to one record and is never re-armed.

    Awaiting it suspends the coroutine until the stream has passed the point; any number of
    coroutines, in any loop, may await the same one. Cancelling an awaiter abandons the wait, never
    the work.
    """

    def done(self) -> bool:
        """Whether the stream has passed the point (or the device failed); never blocks."""
        ...

    def __await__(self) -> Generator[Any, None, None]:
        """Resume after the point.

        Raises:
            DeviceError: the work before the point failed (`DeviceLostError`: the device is gone).
        """
        ...


class Stream(Protocol):
    """An ordered queue of device work."""

    @property
    def name(self) -> str: ...

    def launch(self, fn: Callable[..., T], /, *args: Any) -> DeviceFuture[T]:
        """Start `fn(*args)` on this stream and go on at once.

        CUDA runs `fn` now with this stream current (its kernels are asynchronous); the CPU queues
        it on the stream's worker. A `DeviceFuture` among the arguments arrives as its value, with
        the wait edge between the streams and the hold on its lifetime put in place. What `fn` uses
        is kept alive until the work is done.
        """
        ...

    def record(self) -> Completion:
        """The point that the stream has now been given work up to."""
        ...

    def wait(self, completion: Completion, /) -> None:
        """Later work of this stream starts after `completion`. A device-side edge: no host wait."""
        ...


class Device(Protocol):
    """A device and the streams an engine uses on it."""

    @property
    def name(self) -> str: ...

    def stream(self, name: str, *, priority: int = 0) -> Stream:
        """A new stream, distinct from every other; a lower `priority` runs first if supported."""
        ...

    def mark_step(self, step_id: int | None) -> None:
        """Work launched from now on belongs to this engine step (for errors and the trace)."""
        ...

    def adopt_loop(self) -> None:
        """The running loop belongs to this device: a wait may block it while it spins, briefly."""
        ...

    @property
    def contended(self) -> bool:
        """Whether other threads keep the interpreter so busy that this one waits for it."""
        ...

    def lead(self, future: DeviceFuture[Any], /) -> float:
        """Seconds from now until the work behind `future` should be done; 0.0: nobody knows.

        A guess from what such work took before, given only where this thread can rely on being on
        time (its own loop, no other thread that keeps the interpreter busy).
        """
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Counts of records and wake-ups, the wake-up latency histogram, the share that spun."""
        ...

    def close(self) -> None:
        """Finish what was launched, fail what cannot finish, stop the threads. Idempotent."""
        ...
