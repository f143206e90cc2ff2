"""A stream of the fake device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aengine.device.future import DeviceFuture
from aengine.device.launching import as_host, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.device.completions import HostCompletion
    from aengine.device.fake import FakeDevice
    from aengine.device.protocols import Completion

T = TypeVar("T")


class FakeStream:
    """A stream of the fake device."""

    def __init__(self, name: str, device: FakeDevice) -> None:
        self._name = name
        self._device = device

    def __repr__(self) -> str:
        return f"<FakeStream {self._name!r}>"

    @property
    def name(self) -> str:
        return self._name

    def launch(self, fn: Callable[..., T], /, *args: Any) -> DeviceFuture[T]:
        """Queue `fn(*args)`; a `DeviceFuture` among the arguments arrives as its value.

        Raises:
            DeviceError: the device is closed.
        """
        device = self._device
        device._reactor.counters.add("launches")
        after = tuple(arg.completion for arg in args if isinstance(arg, DeviceFuture))
        with device._changed:
            op = device._enqueue(self._name, name_of(fn), after, fn, args)
            op.future = DeviceFuture(op.completion)
            return op.future

    def record(self) -> HostCompletion:
        """The point after all work launched so far.

        Raises:
            DeviceError: the device is closed.
        """
        return self._device._enqueue(self._name, "record", ()).completion

    def wait(self, completion: Completion, /) -> None:
        """Later work starts after `completion`.

        Raises:
            TypeError: `completion` is none of this package's.
            DeviceError: the device is closed.
        """
        self._device._enqueue(self._name, "wait", (as_host(completion),))
