"""What needs a real GPU: torch on our streams, lifetimes by allocator, a kernel that faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aengine.device import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the whole device raises."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _program(name: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_values_survive_when_every_reference_is_dropped(allocator: str) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    assert _program("lifetimes.py", "1000", **environment) == "0"


def test_without_holding_anything_values_are_lost() -> None:
    assert int(_program("lifetimes.py", "100", "--unheld")) > 0


@pytest.mark.parametrize("way", ["native", "python"])
def test_a_kernel_that_faults_fails_everything_within_100_ms(way: str) -> None:
    heard = json.loads(_program("faulting.py", way))
    assert heard["kinds"] == ["DeviceLostError"]
    assert heard["steps"] == [7, 8]
    assert heard["late"] == "DeviceLostError"
    assert heard["pending"] == 0
    assert heard["after_known_ms"] < 100


async def test_our_streams_are_none_of_torchs() -> None:
    import torch

    device = CudaDevice()
    ours = {device.stream(f"s{i}", priority=-5 * (i % 2)).handle for i in range(16)}
    theirs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert len(ours) == 16
    assert not ours & theirs
    device.close()


async def test_torch_runs_on_the_stream_and_never_synchronises() -> None:
    import torch

    device = CudaDevice()
    forward, copy = device.stream("forward"), device.stream("copy", priority=-5)
    host = torch.empty(1024, pin_memory=True)
    x = torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    with no_synchronisation():
        product = forward.launch(lambda: (torch.cuda.current_stream().cuda_stream, x @ x))
        total = copy.launch(lambda p: host.copy_(p[1].sum(0), non_blocking=True), product)
        await total
        handle, value = await product
    assert handle == forward.handle
    assert torch.allclose(host, value.sum(0).cpu())
    assert torch.allclose(value.double(), x.double() @ x.double(), rtol=1e-2, atol=1e-1)
    device.close()


async def test_a_graph_replays_from_a_launch_list() -> None:
    import torch

    device = CudaDevice()
    stream = device.stream("forward")
    external = torch.cuda.ExternalStream(stream.handle)
    counter = torch.zeros(1, device="cuda", dtype=torch.int64)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=external):
        counter.add_(1)
    graph.instantiate()
    handle = graph.raw_cuda_graph_exec()
    prepared = stream.prepare([("cuGraphLaunch", (int(handle), stream.handle))])
    points = [prepared.launch() for _ in range(100)]
    await asyncio.gather(*(_wait(point) for point in points))
    assert counter.item() == 100
    device.close()


async def _wait(point: object) -> None:
    await point  # type: ignore[misc]
