"""Loading on a GPU: the model, and for each lane its workspaces and its captured steps (law 6)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aengine.config import EngineConfig
    from aengine.device.cuda import CudaDevice
    from aengine.device.cuda_stream import CudaStream
    from aengine.device.lanes import Lanes
    from aengine.device.protocols import Stream
    from aengine.execute.graph_shapes import LaneWork
    from aengine.execute.launcher import Launcher
    from aengine.execute.loader import LoadedModel
    from aengine.model.files import LoadedFiles

logger = logging.getLogger("aengine")


def load_on_gpu(
    config: EngineConfig,
    files: LoadedFiles,
    device: CudaDevice,
    stream: CudaStream,
    lanes: Lanes | None,
    on_progress: Callable[[str, int, int], None],
) -> tuple[LoadedModel, Mapping[Stream, Launcher]]:
    """Load, and capture the common steps of each lane. Its work is on the lanes when it returns.

    Args:
        config, files: the engine's settings and the opened files.
        device, stream: where steps run that are not split.
        lanes: what prefill and decode run on side by side; None: they take turns.
        on_progress: told (stage, done, all).

    Returns:
        The model, and the launchers of the lanes other than `stream`.

    Raises:
        ModelLoadError, ConfigError, OutOfMemoryError: as `load_parts`.
    """
    import torch

    from aengine.execute.cuda_capture import capture_common, warm_up_prefill
    from aengine.execute.graph_shapes import LaneWork
    from aengine.execute.loader import load_model
    from aengine.execute.memory import CudaMemory

    launchers: dict[Stream, Launcher] = {}
    before = 0
    with device.current(), device.guard(stream.handle):
        torch_device = torch.device("cuda", device.index)
        pairs = 1 if lanes is None else len(lanes.pairs)
        memory = CudaMemory(torch_device)
        model = load_model(config, files, torch_device, memory, pairs=pairs)
        on_progress("warm up", 0, 1)
        warm_up_prefill(model, config.scheduler.max_num_batched_tokens, torch_device)
        on_progress("warm up", 1, 1)
        before = memory.free()
        if config.cuda_graphs:
            work = LaneWork(prefill=lanes is None)
            graphs = capture_common(
                config.scheduler, model, model.forward, device, stream, on_progress, work=work
            )
            if graphs is not None:
                model.runner.use_graphs(graphs)
    if lanes is not None:
        _equip(lanes, launchers, config, model, device, stream, on_progress)
    if model.runner.has_graphs:
        taken, reserved = before - memory.free(), model.profile.graphs
        logger.info("graphs take %d MiB of %d reserved", taken >> 20, reserved >> 20)
    return model, launchers


def _equip(
    lanes: Lanes,
    launchers: dict[Stream, Launcher],
    config: EngineConfig,
    model: LoadedModel,
    device: CudaDevice,
    stream: CudaStream,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Give the lanes other than `stream` their launchers."""
    from aengine.execute.cuda_capture import capture_common
    from aengine.execute.graph_shapes import LaneWork

    done = {LaneWork(prefill=False, few=True)}  # what `stream` has run includes these
    for lane, capture, work in _others(lanes, stream):
        # The weights and what was computed so far were the work of `stream`.
        lane.wait(stream.record())
        with device.current(), device.guard(lane.handle):
            forward = model.weights.bind(model.kv_cache)
            runner = launchers[lane] = model.runner.beside(forward)
            if model.runner.has_graphs:
                graphs = capture_common(
                    config.scheduler,
                    model,
                    forward,
                    device,
                    lane,
                    on_progress,
                    work=work,
                    capture_stream=capture,
                    run=work not in done,
                )
                if graphs is not None:
                    runner.use_graphs(graphs)
        done.add(work)
        stream.wait(lane.record())


def _others(lanes: Lanes, stream: CudaStream) -> Iterator[tuple[CudaStream, int | None, LaneWork]]:
    """Each lane once, but `stream`: where its graphs are captured, and what it does."""
    from aengine.device.cuda_stream import CudaStream
    from aengine.execute.graph_shapes import LaneWork

    seen: set[object] = {stream}
    for pair in lanes.pairs:
        for lane, capture, work in (
            (pair.prefill, pair.prefill_capture, LaneWork(decode=False, few=True)),
            (pair.decode, pair.decode_capture, LaneWork(prefill=False, few=True)),
        ):
            if lane not in seen:
                seen.add(lane)
                assert isinstance(lane, CudaStream)
                yield lane, capture, work
