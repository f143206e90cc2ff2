"""The few CUDA driver calls of this room, taken from the driver that the process has loaded.

Nothing links to CUDA. Calls that take microseconds go through `ctypes.PyDLL`, which keeps the GIL:
letting it go beside a busy thread costs up to a switch interval to get it back. Calls that may
block go through `ctypes.CDLL`, which lets it go.

Signatures: CUDA driver API reference, sections Stream, Event, Stream Memory Operations, Execution.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from aengine.errors import DeviceError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aengine.device.green import PairHandles

NOT_READY = 600
STREAM_NON_BLOCKING = 1
EVENT_DEFAULT = 0
EVENT_BLOCKING_SYNC = 1
"""A thread that waits for the event sleeps; without it, it spins."""
HOST_ALLOC_PORTABLE_MAPPED = 3
PAGE = 4096
STICKY = frozenset({4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""Results after which the context is of no more use (illegal address, launch failure, ECC ...)."""
CAPTURING = range(900, 910)
"""Results that speak of a graph being captured, not of the context."""

_HANDLE = ctypes.c_void_p
_INT = ctypes.c_int
_UINT = ctypes.c_uint
_OUT = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "init": ("cuInit", (_UINT,)),
    "device_get": ("cuDeviceGet", (ctypes.POINTER(_INT), _INT)),
    "context_retain": ("cuDevicePrimaryCtxRetain", (_OUT, _INT)),
    "context_get": ("cuCtxGetCurrent", (_OUT,)),
    "context_set": ("cuCtxSetCurrent", (_HANDLE,)),
    "context_push": ("cuCtxPushCurrent_v2", (_HANDLE,)),
    "context_pop": ("cuCtxPopCurrent_v2", (_OUT,)),
    "stream_create": ("cuStreamCreateWithPriority", (_OUT, _UINT, _INT)),
    "stream_query": ("cuStreamQuery", (_HANDLE,)),
    "stream_wait": ("cuStreamWaitEvent", (_HANDLE, _HANDLE, _UINT)),
    "stream_write": ("cuStreamWriteValue32_v2", (_HANDLE, ctypes.c_uint64, ctypes.c_uint32, _UINT)),
    "launch_host": ("cuLaunchHostFunc", (_HANDLE, _HANDLE, _HANDLE)),
    "event_create": ("cuEventCreate", (_OUT, _UINT)),
    "event_destroy": ("cuEventDestroy_v2", (_HANDLE,)),
    "event_record": ("cuEventRecord", (_HANDLE, _HANDLE)),
    "event_query": ("cuEventQuery", (_HANDLE,)),
    "event_elapsed": (
        "cuEventElapsedTime",
        (ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE),
    ),
    "graph_upload": ("cuGraphUpload", (_HANDLE, _HANDLE)),
    "graph_destroy": ("cuGraphExecDestroy", (_HANDLE,)),
    "device_attribute": ("cuDeviceGetAttribute", (ctypes.POINTER(_INT), _INT, _INT)),
    "device_name": ("cuDeviceGetName", (ctypes.c_char_p, _INT, _INT)),
    "device_resource": ("cuDeviceGetDevResource", (_INT, _HANDLE, _INT)),
    "resource_split": (
        "cuDevSmResourceSplitByCount",
        (_HANDLE, ctypes.POINTER(_UINT), _HANDLE, _HANDLE, _UINT, _UINT),
    ),
    "resource_desc": ("cuDevResourceGenerateDesc", (_OUT, _HANDLE, _UINT)),
    "green_create": ("cuGreenCtxCreate", (_OUT, _HANDLE, _INT, _UINT)),
    "green_stream": ("cuGreenCtxStreamCreate", (_OUT, _HANDLE, _UINT, _INT)),
    "host_alloc": ("cuMemHostAlloc", (_OUT, ctypes.c_size_t, _UINT)),
    "host_pointer": (
        "cuMemHostGetDevicePointer_v2",
        (ctypes.POINTER(ctypes.c_uint64), _HANDLE, _UINT),
    ),
}
GREEN = (
    "device_attribute",
    "device_name",
    "device_resource",
    "resource_split",
    "resource_desc",
    "green_create",
    "green_stream",
)
_REPLACEABLE = frozenset({"stream_write", "graph_upload", "graph_destroy", *GREEN})
"""Functions without which there are no flags, graphs or lanes, and all else works."""


class Driver:
    """The loaded driver.

    Args:
        library: name or path of the driver library; a test gives one that plays a GPU.

    Raises:
        DeviceError: there is no driver here, or it lacks a function that nothing can replace.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = library
        try:
            self._quick = ctypes.PyDLL(library)
            blocking = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(f"no CUDA driver here: {error}") from error
        self.calls: dict[str, Callable[..., int]] = {}
        for name, (symbol, types) in _SIGNATURES.items():
            function = getattr(self._quick, symbol, None)
            if function is not None:
                function.argtypes, function.restype = types, _INT
                self.calls[name] = function
            elif name not in _REPLACEABLE:
                raise DeviceError(f"the CUDA driver has no {symbol}; it is too old")
        self.event_synchronize: Callable[[int], int] = blocking.cuEventSynchronize
        blocking.cuEventSynchronize.argtypes = (_HANDLE,)
        self._instantiate = getattr(blocking, "cuGraphInstantiateWithFlags", None)
        self._error_name = self._quick.cuGetErrorName
        self._error_name.argtypes = (_INT, ctypes.POINTER(ctypes.c_char_p))
        self.check(self.calls["init"](0), "cuInit")
        self._contexts: dict[int, int] = {}
        self._pages: list[int] = []
        self._streams: dict[tuple[int, int], list[int]] = {}
        self.idle_lanes: dict[tuple[int, int], list[PairHandles]] = {}
        """(device, decode's SMs) -> pairs of green-context streams that nobody uses now."""

    @property
    def can_write_flags(self) -> bool:
        """Whether a stream can write a word to host memory."""
        return "stream_write" in self.calls

    def address(self, symbol: str) -> int:
        """Address of a driver function, for launch lists.

        Raises:
            DeviceError: the driver has no such function.
        """
        function = getattr(self._quick, symbol, None)
        if function is None:
            raise DeviceError(f"the CUDA driver has no {symbol}")
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Those of these functions that the driver does not have, by the driver's names."""
        return [_SIGNATURES[name][0] for name in names if name not in self.calls]

    def device(self, index: int) -> int:
        """The driver's handle of a device.

        Raises:
            DeviceError: there is no such device.
        """
        device = ctypes.c_int()
        self.do("device_get", ctypes.byref(device), index)
        return device.value

    def name_of(self, code: int) -> str:
        """The driver's name of a result code."""
        text = ctypes.c_char_p()
        if self._error_name(code, ctypes.byref(text)) == 0 and text.value:
            return f"{text.value.decode()} ({code})"
        return f"CUDA error {code}"

    def check(self, code: int, what: str) -> None:
        """Raise if a call did not succeed.

        Raises:
            DeviceLostError: the context is gone.
            DeviceError: any other failure.
        """
        if code:
            kind = DeviceLostError if code in STICKY else DeviceError
            raise kind(f"{what}: {self.name_of(code)}")

    def make(self, name: str, *args: Any) -> int:
        """Call `name` with an out-parameter for a handle first; the handle."""
        handle = ctypes.c_void_p()
        self.check(self.calls[name](ctypes.byref(handle), *args), _SIGNATURES[name][0])
        return handle.value or 0

    def do(self, name: str, *args: Any) -> None:
        """Call `name` and check it."""
        self.check(self.calls[name](*args), _SIGNATURES[name][0])

    def context(self, index: int) -> int:
        """The primary context of a device, which torch and the runtime use too.

        Retained once and kept: the driver would destroy it with the last release, under everybody.

        Raises:
            DeviceError: there is no such device.
        """
        if index not in self._contexts:
            self._contexts[index] = self.make("context_retain", self.device(index))
        return self._contexts[index]

    def take_page(self) -> int:
        """`PAGE` bytes of zeroed pinned memory that any device can write to."""
        page = self._pages.pop() if self._pages else 0
        page = page or self.make("host_alloc", PAGE, HOST_ALLOC_PORTABLE_MAPPED)
        ctypes.memset(page, 0, PAGE)
        return page

    def return_page(self, page: int) -> None:
        """Keep it for the next device: freeing pinned memory waits for the whole GPU (measured)."""
        self._pages.append(page)

    def take_stream(self, context: int, priority: int = 0) -> int:
        """A stream of the current context that nobody else has: a returned one, or a new one."""
        returned = self._streams.get((context, priority))
        if returned:
            return returned.pop()
        return self.make("stream_create", STREAM_NON_BLOCKING, priority)

    def return_stream(self, handle: int, context: int, priority: int = 0) -> None:
        """Keep an idle stream for the next taker; never destroy it.

        torch's host allocator records an event on every stream that used a pinned tensor when that
        tensor is freed, be it long after; on a destroyed stream that ends the process.
        """
        self._streams.setdefault((context, priority), []).append(handle)

    def instantiate(self, graph: int, stream: int) -> int:
        """An executable graph (CUgraphExec) of a captured one, uploaded on `stream`.

        Lets go of the GIL: it takes milliseconds.

        Raises:
            DeviceError: the driver is too old, or refuses the graph.
        """
        if self._instantiate is None:
            raise DeviceError("the CUDA driver has no cuGraphInstantiateWithFlags; it is too old")
        executable = ctypes.c_void_p()
        code = self._instantiate(ctypes.byref(executable), _HANDLE(graph), ctypes.c_ulonglong(0))
        self.check(code, "cuGraphInstantiateWithFlags")
        self.do("graph_upload", executable, stream)
        return executable.value or 0

    def device_pointer(self, host: int) -> int:
        """The address at which the device sees mapped host memory."""
        pointer = ctypes.c_uint64()
        self.do("host_pointer", ctypes.byref(pointer), host, 0)
        return pointer.value


class Event:
    """One driver event, recorded once, destroyed with the last object that uses it.

    Destroying one that the device has yet to reach is allowed (cuEventDestroy).
    """

    __slots__ = ("_driver", "handle")

    def __init__(self, driver: Driver, flags: int = EVENT_DEFAULT) -> None:
        self._driver = driver
        handle = ctypes.c_void_p()
        code = driver.calls["event_create"](ctypes.byref(handle), flags)
        self.handle = handle.value or 0
        if code:
            driver.check(code, "cuEventCreate")

    def __del__(self) -> None:
        handle = getattr(self, "handle", 0)
        if handle:
            self._driver.calls["event_destroy"](handle)

    def reached(self) -> bool:
        """Whether the device has passed it. An error of the device counts as no."""
        return self._driver.calls["event_query"](self.handle) == 0

    def elapsed_ns(self, later: Event) -> int | None:
        """Device time from this event to `later`; None while either is open, or after an error."""
        milliseconds = ctypes.c_float()
        elapsed = self._driver.calls["event_elapsed"]
        if elapsed(ctypes.byref(milliseconds), self.handle, later.handle):
            return None
        return int(milliseconds.value * 1e6)


@functools.cache
def load_driver(library: str = "libcuda.so.1") -> Driver:
    """The process's driver; loaded once.

    Raises:
        DeviceError: there is none.
    """
    return Driver(library)
