"""The devices that the contract runs against, behind one `Rig`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aengine.device import CpuDevice, CudaDevice, FakeDevice, HostCompletion, Reactor, Trace
from aengine.device.driver import Driver, load_driver
from aengine.device.native import load_native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aengine.device import Device, Stream

# A gate holds up its stream's hardware queue. With the default of 8 queues other streams of a test
# may share it and wait too.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

FAKE_CUDA = Path(__file__).with_name("fake_cuda.c")
KINDS = [
    "cpu",
    "cpu-python",
    "fake",
    "sim",
    "sim-python",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cuda-python", marks=pytest.mark.gpu),
]


@dataclass
class Gate:
    """Work that a stream cannot get past until `open` is called."""

    open: Callable[[], None]


@dataclass
class Rig:
    """A device, and how to give it work that lasts."""

    kind: str
    device: Device
    trace: Trace
    make_gate: Callable[[Stream], Gate]
    make_slow: Callable[[Stream, float], Callable[..., int]]
    gates: list[Gate] = field(default_factory=list)

    def gate(self, stream: Stream) -> Gate:
        """Close `stream` for everything launched later."""
        self.gates.append(self.make_gate(stream))
        return self.gates[-1]

    def slow(self, stream: Stream, seconds: float = 0.005) -> Callable[..., int]:
        """A function to launch on `stream` that takes about that long there and returns 7."""
        return self.make_slow(stream, seconds)

    @property
    def values_at_launch(self) -> bool:
        """Whether a launched function runs at the launch (its kernels do not)."""
        return self.kind.startswith(("sim", "cuda"))


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver library that plays a GPU."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = tmp_path_factory.mktemp("fake_cuda") / "libfakecuda.so"
    flags = ["-std=c11", "-O1", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, str(FAKE_CUDA), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="session")
def fake_driver(fake_cuda: Path) -> Driver:
    return Driver(str(fake_cuda))


class Simulated:
    """What the playing driver can do beyond the real one."""

    def __init__(self, driver: Driver) -> None:
        self.library = ctypes.PyDLL(driver.library)
        self.library.fakeKernel.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self.library.fakeFault.argtypes = (ctypes.c_void_p,)

    def kernel(self, stream: Any, seconds: float) -> int:
        return self.library.fakeKernel(stream.handle, int(seconds * 1e9))

    def kernel_address(self) -> int:
        return ctypes.cast(self.library.fakeKernel, ctypes.c_void_p).value or 0

    def fault(self, stream: Any) -> int:
        return self.library.fakeFault(stream.handle)

    def heal(self) -> None:
        self.library.fakeHeal()


@pytest.fixture
def simulated(fake_driver: Driver) -> Iterator[Simulated]:
    made = Simulated(fake_driver)
    yield made
    made.heal()


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    kind: str = request.param
    if not kind.endswith("-python") and kind != "fake" and load_native() is None:
        pytest.skip("the extension is not built")
    native: Any = None if kind.endswith("-python") else "auto"
    with contextlib.ExitStack() as stack:
        base = kind.removesuffix("-python")
        if base == "cpu":
            made = _cpu_rig(kind, native)
        elif base == "fake":
            made = _fake_rig(kind)
            stack.enter_context(made.device.playing(seed=7))
        elif base == "sim":
            driver = request.getfixturevalue("fake_driver")
            made = _cuda_rig(kind, native, driver, Simulated(driver))
        else:
            made = _cuda_rig(kind, native, load_driver(), None)
        yield made
        for gate in made.gates:
            gate.open()
        made.device.close()


def _cpu_rig(kind: str, native: Any) -> Rig:
    trace = Trace()

    def gate(stream: Stream) -> Gate:
        event = threading.Event()
        stream.launch(event.wait)
        return Gate(event.set)

    def slow(stream: Stream, seconds: float) -> Callable[..., int]:
        return lambda *_: (time.sleep(seconds), 7)[1]

    return Rig(kind, CpuDevice(native=native, trace=trace), trace, gate, slow)


def _fake_rig(kind: str) -> Rig:
    trace = Trace()

    def gate(stream: Stream) -> Gate:
        opener = HostCompletion(Reactor())
        stream.wait(opener)
        return Gate(opener.fire)

    return Rig(kind, FakeDevice(trace=trace), trace, gate, lambda *_: lambda *_: 7)


def _cuda_rig(kind: str, native: Any, driver: Driver, simulated: Simulated | None) -> Rig:
    trace = Trace()
    guard = None if simulated is None else lambda _: contextlib.nullcontext()
    device = CudaDevice(driver=driver, native=native, trace=trace, guard=guard)
    words: list[int] = []

    def gate(stream: Any) -> Gate:
        with device.current():
            word = driver.make("host_alloc", 64, 3)
            words.append(word)
            flag = ctypes.c_uint32.from_address(word)
            flag.value = 0
            at = ctypes.c_uint64(driver.device_pointer(word))
            wait = ctypes.PyDLL(driver.library).cuStreamWaitValue32_v2
            wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
            driver.check(wait(stream.handle, at, 1, 0), "gate")
        return Gate(lambda: setattr(flag, "value", 1))

    def slow(stream: Any, seconds: float) -> Callable[..., int]:
        if simulated is not None:
            return lambda *_: (simulated.kernel(stream, seconds), 7)[1]
        import torch

        return lambda *_: (torch.cuda._sleep(int(seconds * 1.9e9)), 7)[1]

    return Rig(kind, device, trace, gate, slow)
