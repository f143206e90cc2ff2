"""The awaitables: streams and completions of a device as things a coroutine can await.

Importing this imports neither torch nor a driver; each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aengine.device.completions import HostCompletion, Reactor
    from aengine.device.cpu import CpuDevice
    from aengine.device.cuda import CudaDevice
    from aengine.device.fake import FakeDevice, FakeFaults
    from aengine.device.fake_memory import FakeBuffer
    from aengine.device.future import DeviceFuture
    from aengine.device.pace import WaitPolicy
    from aengine.device.protocols import Completion, Device, Stream
    from aengine.device.trace import Trace

__all__ = [
    "Completion",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceFuture",
    "FakeBuffer",
    "FakeDevice",
    "FakeFaults",
    "HostCompletion",
    "Reactor",
    "Stream",
    "Trace",
    "WaitPolicy",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    homes = {
        "Completion": "protocols",
        "CpuDevice": "cpu",
        "CudaDevice": "cuda",
        "Device": "protocols",
        "DeviceFuture": "future",
        "FakeBuffer": "fake_memory",
        "FakeDevice": "fake",
        "FakeFaults": "fake",
        "HostCompletion": "completions",
        "Reactor": "completions",
        "Stream": "protocols",
        "Trace": "trace",
        "WaitPolicy": "pace",
    }
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
