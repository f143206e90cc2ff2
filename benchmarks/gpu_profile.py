"""Where a decode step's time goes on a GPU: the captured step of some sizes, kernel by kernel.

    [SMS=N] python benchmarks/gpu_profile.py [ROWS:CONTEXT | prefill:TOKENS ...]

Same model as benchmarks/gpu.py. Prints the time of a replay (events around 30 of them) and what the
profiler says of the kernels in it; for `prefill` that of an eager step with one new prompt. With
`SMS` decode steps run on the lane of that many multiprocessors.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aengine.config import EngineConfig
from aengine.device.cuda import CudaDevice
from aengine.device.graphs import GraphPool
from aengine.device.lanes import open_lanes
from aengine.execute.graph_shapes import StepShape, largest_shape
from aengine.execute.loader import load_model
from aengine.execute.packing import HEADER
from aengine.execute.sampler_state import SamplerFeature
from aengine.execute.step_program import StepProgram
from aengine.model.batch import ForwardBatch
from aengine.model.files import open_model
from benchmarks.gpu import model_folder

if TYPE_CHECKING:
    from collections.abc import Callable


def show(run: Callable[[], object], times: int = 4) -> None:
    """What the profiler says of `run`, an average of some."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    table = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in table[:16]:
        if event.self_device_time_total:
            print(
                f"{event.self_device_time_total / 1e3 / times:8.3f} ms {event.count // times:5d} x "
                f"{event.self_device_time_total / event.count:7.2f} us  {event.key[:90]}"
            )


def timed(run: Callable[[], object], times: int) -> float:
    """Milliseconds of device time that one of `times` runs takes."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times


def prefill_batch(tokens: int) -> ForwardBatch:
    """One new prompt."""
    index = torch.arange(tokens, device="cuda")
    blocks = -(-tokens // 64)
    return ForwardBatch(
        token_ids=index % 1000,
        positions=index,
        slot_mapping=index + 64,
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32, device="cuda").view(1, -1),
        logit_index=torch.tensor([tokens - 1], device="cuda"),
        num_decode=0,
        max_query_len=tokens,
        max_context_len=tokens,
    )


def main() -> None:
    sms = int(os.environ.get("SMS", "0"))
    wanted = sys.argv[1:] or ["1:256", "32:1152", "256:1152", "prefill:4096"]
    prefills = [int(a.removeprefix("prefill:")) for a in wanted if a.startswith("prefill:")]
    sizes = [tuple(map(int, a.split(":"))) for a in wanted if a[0] != "p"]
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name), 32)
        options = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "block_size": 64}
        config = EngineConfig.from_options(
            str(folder),
            {"load_format": "dummy", "max_model_len": 8192, "kv_cache_fraction": 0.8, **options},
        )
        files = open_model(folder, weights=False)
    device = CudaDevice()
    stream = device.stream("forward")
    with device.guard(stream.handle), torch.inference_mode():
        began = time.perf_counter()
        model = load_model(config, files, torch.device("cuda"))
        torch.cuda.synchronize()
        print(f"load {time.perf_counter() - began:.2f} s")
        program = StepProgram(
            model.forward,
            model.sampler,
            block_size=64,
            largest=largest_shape(max_rows=256, max_tokens=4096, max_blocks=128),
            max_context_len=8192,
        )
        for tokens in prefills:
            batch = prefill_batch(tokens)
            for _ in range(2):
                model.forward(batch)
            step = timed(lambda batch=batch: model.forward(batch), 5)
            print(f"== prefill of {tokens}: {step:.2f} ms, {tokens / step * 1e3:.0f} tokens/s")
            show(lambda batch=batch: model.forward(batch), 2)
        pool = GraphPool(device)
        if sms:
            pair = open_lanes(device, stream, cores=0, decode_counts=[sms]).pairs[-1]
            pool, stream = GraphPool(device, pair.decode_capture), pair.decode
            print(f"on {pair.partition.decode} SMs")
        for rows, context in sizes:
            shape = StepShape(rows, 0, 0, 128, SamplerFeature(0))
            packed = program.packed[: rows * (HEADER + 128)].view(rows, -1)
            packed[:, 0] = torch.arange(1, rows + 1)
            packed[:, 1] = context - 1
            per_row = -(-context // 64)
            packed[:, HEADER : HEADER + per_row] = torch.arange(
                1, rows * per_row + 1, device="cuda"
            ).view(rows, -1)
            program(shape)
            graph = pool.capture(lambda shape=shape: program(shape))
            launch = stream.prepare([("cuGraphLaunch", (graph.handle, stream.handle))])
            for _ in range(5):
                launch.launch(graph)
            step = timed(lambda launch=launch, graph=graph: launch.launch(graph), 30)
            print(f"== {rows} rows of {context}: {step:.3f} ms a step")
            show(lambda launch=launch, graph=graph: launch.launch(graph))
    device.close()


if __name__ == "__main__":
    main()
