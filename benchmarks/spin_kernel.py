"""A kernel that runs for a given time and one that faults, launched through the driver alone.

PTX, compiled by the driver when loaded: no compiler and no torch operation is needed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aengine.device.cuda import CudaDevice

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
    .reg .u64 %t<4>;
    .reg .pred %early;
    ld.param.u64 %t1, [nanoseconds];
    mov.u64 %t2, %globaltimer;
    add.u64 %t2, %t2, %t1;
again:
    mov.u64 %t3, %globaltimer;
    setp.lt.u64 %early, %t3, %t2;
    @%early bra again;
    ret;
}
.visible .entry fault()
{
    .reg .u64 %a;
    .reg .u32 %v;
    mov.u64 %a, 16;
    mov.u32 %v, 1;
    st.global.u32 [%a], %v;
    ret;
}
"""


class Kernels:
    """Kernels of one device. `simulated` is the path of the test suite's playing driver."""

    def __init__(self, device: CudaDevice, simulated: str | None = None) -> None:
        self._library = ctypes.PyDLL(device.driver.library)
        self._simulated = simulated is not None
        self._keep: list[object] = []
        self._functions: dict[str, int] = {}
        if simulated is None:
            with device.current():
                module = ctypes.c_void_p()
                load = self._library.cuModuleLoadData
                device.driver.check(load(ctypes.byref(module), PTX), "cuModuleLoadData")
                for name in ("spin", "fault"):
                    function = ctypes.c_void_p()
                    get = self._library.cuModuleGetFunction
                    code = get(ctypes.byref(function), module, name.encode())
                    device.driver.check(code, "cuModuleGetFunction")
                    self._functions[name] = function.value or 0

    def call(self, handle: int, nanoseconds: int) -> tuple[int, tuple[int, ...]]:
        """Address and arguments of a launch of the spin kernel, for a launch list."""
        if self._simulated:
            return self._address("fakeKernel"), (handle, nanoseconds)
        value = ctypes.c_uint64(nanoseconds)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        self._keep += [value, parameters]
        function = self._functions["spin"]
        shape = (1, 1, 1, 1, 1, 1, 0)
        arguments = (function, *shape, handle, ctypes.addressof(parameters), 0)
        return self._address("cuLaunchKernel"), arguments

    def fault(self, handle: int) -> int:
        """Launch the kernel that writes to an address that nobody owns."""
        if self._simulated:
            return int(self._library.fakeFault(ctypes.c_void_p(handle)))
        launch = self._library.cuLaunchKernel
        launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        function = self._functions["fault"]
        return int(launch(function, 1, 1, 1, 1, 1, 1, 0, handle, None, None))

    def run(self, call: tuple[int, tuple[int, ...]]) -> int:
        """Make one such call from Python (GIL held)."""
        address, arguments = call
        types = [ctypes.c_uint64] * len(arguments)
        return int(ctypes.PYFUNCTYPE(ctypes.c_int, *types)(address)(*arguments))

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0


class Gate:
    """Holds up a stream until the host opens it: a wait for a word of pinned memory."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current():
            self._word = device.driver.take_page()
            self._on_device = device.driver.device_pointer(self._word)
        self._flag = ctypes.c_uint32.from_address(self._word)
        self._wait = ctypes.PyDLL(device.driver.library).cuStreamWaitValue32_v2
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._round = 0

    def close(self, handle: int) -> None:
        """What the stream is given from now on waits for `open`."""
        self._round += 1
        with self._device.current():
            code = self._wait(handle, self._on_device, self._round, 0)
        self._device.driver.check(code, "cuStreamWaitValue32")

    def open(self) -> None:
        """Let the stream go on."""
        self._flag.value = self._round
