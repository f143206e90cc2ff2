"""`DeviceFuture`: a value that exists on a stream and not yet on the host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Generator

    from aengine.device.completions import HostCompletion
    from aengine.errors import DeviceError

T = TypeVar("T")


class DeviceFuture(Generic[T]):
    """The result of a launch: awaitable by any number of coroutines, in any loop and thread.

    Handing it to another `launch` on the same device passes its value with the wait edge between
    the streams; nobody has to await it for that. It keeps its value alive, and the device keeps it
    alive until its work is done, so dropping it at once is safe.

    Args:
        completion: the point on the stream at which the value is there.
        value: the value, where the launch knows it at once (CUDA: a handle to memory that the
            device is still writing).
    """

    __slots__ = ("__weakref__", "_completion", "_value")

    def __init__(self, completion: HostCompletion, value: T | None = None) -> None:
        self._completion = completion
        self._value = value

    def __repr__(self) -> str:
        return f"<DeviceFuture of {self._completion!r}>"

    @property
    def completion(self) -> HostCompletion:
        """The point at which the value is there."""
        return self._completion

    def done(self) -> bool:
        """Whether the value is there or the work failed; never blocks."""
        return self._completion.done()

    def __await__(self) -> Generator[Any, None, T]:
        """The value, once the device has made it.

        Raises:
            DeviceError: the launched function raised, or something it depends on did; the
                exception itself is the `__cause__`.
            DeviceLostError: the device is gone.
        """
        yield from self._completion.__await__()
        return cast("T", self._value)

    def result_nowait(self) -> T:
        """The value of a future that is done.

        Raises:
            asyncio.InvalidStateError: it is not done.
            DeviceError: as when awaited.
        """
        if not self._completion.done():
            raise asyncio.InvalidStateError("the device has not finished this work")
        self._completion.check()
        return cast("T", self._value)

    def exception_nowait(self) -> DeviceError | None:
        """Why a future that is done failed; None if it did not.

        Raises:
            asyncio.InvalidStateError: it is not done.
        """
        if not self._completion.done():
            raise asyncio.InvalidStateError("the device has not finished this work")
        return self._completion.error()

    def handle(self) -> T:
        """What the launch returned, done or not: for other launches on the device, not the host."""
        return cast("T", self._value)

    def _put(self, value: T | None) -> None:
        """Store the value; the device calls this before it fires the completion."""
        self._value = value
