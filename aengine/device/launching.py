"""What every device does around a launched function: arguments in, names, errors out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from aengine.device.completions import HostCompletion
from aengine.device.future import DeviceFuture
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.device.protocols import Completion


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


def as_host(completion: Completion) -> HostCompletion:
    """`completion` as this package's own.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(completion, HostCompletion):
        raise TypeError(f"{completion!r} is no completion of an aengine device")
    return completion
