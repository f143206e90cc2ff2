"""Graphs of a lane on a GPU: captured beside running work, launched as a list."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aengine.device.cuda import CudaDevice

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    from aengine.device.cuda import CudaDevice

    made = CudaDevice()
    yield made
    made.close()


async def test_a_graph_is_launched_again_and_again(device: CudaDevice) -> None:
    from aengine.device.graphs import GraphPool

    stream, pool = device.stream("forward"), GraphPool(device)
    x = torch.zeros(1000, device="cuda")
    weight = torch.eye(1000, device="cuda")
    torch.cuda.synchronize()
    await stream.launch(lambda: weight @ x)
    graph = pool.capture(lambda: x.copy_(weight @ x + 1))
    await stream.record()
    assert float(x.sum()) == 0, "capturing runs nothing"
    prepared = stream.prepare([("cuGraphLaunch", (graph.handle, stream.handle))], holds=graph)
    gone = weakref.ref(graph)
    del graph
    points = [prepared.launch() for _ in range(10)]
    await points[-1]
    assert x.tolist() == [10] * 1000
    del prepared, points
    gc.collect()
    device.patrol()
    gc.collect()
    assert gone() is None


async def test_capturing_in_a_thread_leaves_the_lane_alone(device: CudaDevice) -> None:
    from aengine.device.graphs import GraphPool

    stream, pool = device.stream("forward"), GraphPool(device)
    a, b = torch.ones(2048, 2048, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    await stream.launch(lambda: a @ a)
    graphs = []

    def capture() -> None:
        graphs.extend(pool.capture(lambda: b.add_((a @ a)[0, 0])) for _ in range(20))

    thread = threading.Thread(target=capture)
    thread.start()
    count = 0
    while thread.is_alive():
        result = await stream.launch(lambda: (a @ a).sum())
        assert float(result) == 2048.0**3
        count += 1
    thread.join()
    assert count
    assert len(graphs) == 20
    for graph in graphs:
        stream.prepare([("cuGraphLaunch", (graph.handle, stream.handle))]).launch(graph)
    await stream.record()
    assert float(b) == 20 * 2048


async def test_what_cannot_be_captured_is_refused_and_the_next_capture_works(
    device: CudaDevice,
) -> None:
    from aengine.device.graphs import GraphPool

    pool = GraphPool(device)
    x = torch.zeros(10, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(DeviceError, match="captur"):
        pool.capture(lambda: x.sum().item())
    with pytest.raises(DeviceError, match="captur") as caught:
        pool.capture(lambda: [][0])
    assert isinstance(caught.value.__cause__, IndexError)
    graph = pool.capture(lambda: x.add_(1))
    stream = device.stream("forward")
    await stream.prepare([("cuGraphLaunch", (graph.handle, stream.handle))]).launch(graph)
    assert float(x.sum()) == 10
