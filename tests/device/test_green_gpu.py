"""Lanes on a real GPU: which SMs the work of a lane really runs on, and what it computes there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aengine.batch import LaneKind
from aengine.device import CudaDevice
from aengine.device.green import probe
from aengine.device.lanes import open_lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aengine.device.lanes import LanePair, Lanes

pytestmark = pytest.mark.gpu


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    found = probe()
    if not found.green:
        pytest.skip(str(found))
    device = CudaDevice()
    made = open_lanes(device, device.stream("forward"), cores=1)
    yield made
    device.close()
    made.close()


def green(lanes: Lanes) -> list[LanePair]:
    return [lanes.pair(partition) for partition in lanes.of_kind(LaneKind.GREEN)]


@pytest.fixture(scope="module")
def where() -> Callable[[Any], Any]:
    """`where(out)`: a kernel whose every program notes the SM that it ran on."""
    triton = pytest.importorskip("triton")
    # Global: what a kernel names is looked up in its module.
    global tl, smid
    import triton.language as tl
    from triton.language.extra.cuda import smid

    @triton.jit
    def note_sm(out, spins):
        value = smid()
        # Long enough that the programs spread over all SMs that they may use.
        for _ in range(spins):
            value = tl.maximum(value, smid())
        tl.store(out + tl.program_id(0), value)

    def launch(out: Any) -> Any:
        note_sm[(out.numel(),)](out, 2000)
        return out

    return launch


async def test_the_lanes_of_a_partition_run_on_disjoint_sms(lanes: Lanes, where: Any) -> None:
    """known-faults: pytorch 195378."""
    import torch

    outs = [torch.full((4096,), -1, dtype=torch.int32, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    assert len(green(lanes)) >= 3
    for pair in green(lanes):
        both = [pair.prefill.launch(where, outs[0]), pair.decode.launch(where, outs[1])]
        used = [set((await each).cpu().tolist()) for each in both]
        assert -1 not in used[0] | used[1]
        assert not used[0] & used[1], pair.partition
        assert len(used[0]) == pair.partition.prefill
        assert len(used[1]) == pair.partition.decode


async def test_the_plain_lane_runs_everywhere(lanes: Lanes, where: Any) -> None:
    import torch

    out = torch.full((4096,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    used = set((await lanes.plain.decode.launch(where, out)).cpu().tolist())
    assert len(used) == lanes.plain.partition.decode


async def test_a_graph_stays_on_the_lane_that_it_was_captured_on(lanes: Lanes, where: Any) -> None:
    """known-faults: TensorRT-LLM 12802."""
    import torch

    pair = green(lanes)[0]
    out = torch.full((4096,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    first = set((await pair.decode.launch(where, out)).cpu().tolist())
    handle: Any = pair.decode
    stream = torch.cuda.ExternalStream(handle.handle)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        where(out)
    out.fill_(-1)
    torch.cuda.synchronize()
    await pair.decode.launch(graph.replay)
    replayed = set(out.cpu().tolist())
    assert replayed == first
    assert len(replayed) == pair.partition.decode


async def test_the_same_layer_on_both_lanes_at_once_is_what_it_is_alone(lanes: Lanes) -> None:
    """known-faults: S#37904, S#37905: 10,000 steps, workspaces by lane."""
    import torch

    torch.manual_seed(0)
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(32, 2048, device="cuda", dtype=torch.bfloat16)
    prompt = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    pair = green(lanes)[2]

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight) @ weight.T

    expected = [await pair.prefill.launch(layer, prompt), await pair.decode.launch(layer, rows)]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()

    def many(index: int, x: torch.Tensor) -> None:
        for _ in range(100):
            wrong[index] += (layer(x) != expected[index]).sum()

    for _ in range(100):
        both = [pair.prefill.launch(many, 0, prompt), pair.decode.launch(many, 1, rows)]
        for each in both:
            await each
    assert wrong.tolist() == [0, 0]


async def test_a_join_is_an_edge_on_the_device(lanes: Lanes) -> None:
    """known-faults: S#29958: decode sees what a slow prefill lane wrote before the join."""
    import torch

    pair = green(lanes)[0]
    kv = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()

    def prefill() -> torch.Tensor:
        torch.cuda._sleep(200_000_000)
        return kv.fill_(7.0)

    written = pair.prefill.launch(prefill)
    pair.decode.wait(written.completion)
    read = pair.decode.launch(lambda: kv.sum())
    assert not written.done()
    assert float(await read) == 7.0 * 1024
