"""CUDA graphs of one lane: captured once, launched by the driver with the GIL held.

A graph keeps the partition of the stream that it was captured on, and what it needs while it runs
(its intermediate tensors, the workspace of cuBLAS) is shared with the other graphs of its pool: so
a pool belongs to one lane, and its graphs run on that lane's stream only (law 6). Capturing happens
on a stream of the pool's own and enqueues nothing: another thread may do it while the lane works.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.device.cuda import CudaDevice


class Graph:
    """A captured graph, ready to launch.

    Args:
        device: whose.
        captured: torch's graph; it keeps the pool's memory alive.
        executable: the driver's handle (CUgraphExec), destroyed with this object.
        value: what the captured function returned: tensors that each launch writes anew.
    """

    def __init__(self, device: CudaDevice, captured: Any, executable: int, value: Any) -> None:
        self.handle = executable
        self.value = value
        self._captured = captured
        self._destroy = device.driver.calls["graph_destroy"]

    def __del__(self) -> None:
        # The driver keeps what still runs until it has run.
        self._destroy(self.handle)


class GraphPool:
    """Captures the graphs of one lane.

    Args:
        device: whose lane.
        capture_stream: a stream of the lane's partition on which nothing else is ever launched;
            None: a new one of the whole device.

    Raises:
        DeviceError: this driver or build of torch has no graphs.
    """

    def __init__(self, device: CudaDevice, capture_stream: int | None = None) -> None:
        import torch

        if "graph_destroy" not in device.driver.calls:
            raise DeviceError("the CUDA driver is too old for graphs")
        if torch.cuda.get_allocator_backend() != "native":
            raise DeviceError(
                "torch's cudaMallocAsync allocator cannot capture a graph beside running work"
            )
        self._device = device
        if capture_stream is None:
            with device.current():
                capture_stream = device.driver.take_stream(device.context)
        self._handle = capture_stream
        self._guard = device.guard
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Any]) -> Graph:
        """Record the device work of `function`, which must not wait for the device.

        Its kernels should have run once before: what they set up at their first call (compilation,
        handles) is no part of a graph.

        Raises:
            DeviceError: the function raised (its exception is the cause) or did what cannot be
                captured.
        """
        import torch

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with self._device.current(), self._guard(self._handle), torch.inference_mode():
            # This thread's cuBLAS handle: making one cannot be captured.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            # Other threads go on allocating and launching meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                value = function()
            except Exception as error:
                with contextlib.suppress(Exception):  # says again that the capture failed
                    graph.capture_end()
                self._start_over()
                raise DeviceError(f"capturing a graph failed: {error}") from error
            try:
                graph.capture_end()
            except RuntimeError as error:
                self._start_over()
                raise DeviceError(f"this cannot be captured in a graph: {error}") from error
            driver = self._device.driver
            executable = driver.instantiate(graph.raw_cuda_graph(), self._handle)
        return Graph(self._device, graph, executable, value)

    def _start_over(self) -> None:
        """After a failed capture: torch goes on giving memory to it until told otherwise."""
        import torch

        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._memory)
        self._memory = torch.cuda.graph_pool_handle()
