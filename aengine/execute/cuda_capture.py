"""Captures steps on a CUDA lane and prepares their launch lists. Needs Triton."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from aengine.device.graphs import GraphPool
from aengine.errors import DeviceError
from aengine.execute.graph_shapes import (
    GraphSizes,
    LaneWork,
    ResultLayout,
    SampleShape,
    largest_shape,
)
from aengine.execute.step_graphs import StepGraphs
from aengine.execute.step_program import StepProgram
from aengine.model.batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.config import SchedulerConfig
    from aengine.device.cuda import CudaDevice
    from aengine.device.cuda_launch import PreparedLaunch
    from aengine.device.cuda_stream import CudaStream
    from aengine.execute.loader import LoadedModel
    from aengine.execute.runner import Forward
    from aengine.execute.step_graphs import Shape

logger = logging.getLogger("aengine")

EVERYTHING = LaneWork()


class PinnedStaging:
    """Pinned memory for the packed input and the packed result of one step."""

    def __init__(self, packed_words: int, result_words: int) -> None:
        # Kept as tensors: they own the pinned memory that the arrays look at.
        self._tensors = [
            torch.zeros(words, dtype=torch.int32, pin_memory=True)
            for words in (packed_words, result_words)
        ]
        self.packed, self.result = (tensor.numpy() for tensor in self._tensors)
        self.packed_address, self.result_address = (t.data_ptr() for t in self._tensors)


class CudaCapture:
    """Captures the steps of one lane.

    Args:
        program, pool: the lane's.
        stream: where the graphs will run.
    """

    def __init__(self, program: StepProgram, pool: GraphPool, stream: CudaStream) -> None:
        self._program = program
        self._pool = pool
        self._stream = stream

    def __call__(self, shape: Shape) -> PreparedLaunch:
        """See `step_graphs.Capture`."""
        program, handle = self._program, self._stream.handle
        if isinstance(shape, SampleShape) or not shape.samples:
            assert len(program.logits)  # memory that two graphs share is made outside of both
        graph = self._pool.capture(lambda: program(shape))
        bytes_in = 4 * program.input_words(shape)
        bytes_out = 4 * ResultLayout.of(shape).words
        calls = [
            ("cuMemcpyHtoDAsync_v2", (program.packed.data_ptr(), 0, bytes_in, handle)),
            ("cuGraphLaunch", (graph.handle, handle)),
            ("cuMemcpyDtoHAsync_v2", (0, program.result.data_ptr(), bytes_out, handle)),
        ]
        slots = ((0, 1), (2, 0))
        return self._stream.prepare(calls, slots=slots, key=("step", *shape), holds=graph)


@torch.inference_mode()
def warm_up_prefill(model: LoadedModel, num_tokens: int, device: torch.device) -> None:
    """Run the largest prefill once, on padding: its kernels are compiled before the first request.

    Args:
        model: to run.
        num_tokens: of the largest step.
        device: the model's.
    """
    tokens = min(num_tokens, model.max_model_len)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    model.forward(
        ForwardBatch(
            token_ids=zeros,
            positions=zeros,
            slot_mapping=zeros,
            query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
            block_tables=torch.zeros(1, tokens, dtype=torch.int32, device=device),
            logit_index=zeros[:1],
            num_decode=0,
            max_query_len=tokens,
            max_context_len=tokens,
        )
    )


def capture_common(
    config: SchedulerConfig,
    model: LoadedModel,
    forward: Forward,
    device: CudaDevice,
    stream: CudaStream,
    on_progress: Callable[[str, int, int], None],
    *,
    work: LaneWork = EVERYTHING,
    capture_stream: int | None = None,
    run: bool = True,
) -> StepGraphs | None:
    """The graphs of a lane, with the common steps captured; None (and a warning): it has none.

    To be called with the lane's stream current.

    Args:
        config: of the scheduler.
        model: whose steps they are.
        forward: the model with the workspaces of this lane.
        device, stream: the lane.
        on_progress: told ("graphs", done, all).
        work: what the lane does.
        capture_stream: as in `GraphPool`.
        run: run each step once before it is captured, on padding: that compiles and sets up what a
            capture cannot. False: another lane has done so.
    """
    limits = {
        "max_rows": config.max_num_seqs,
        "max_tokens": config.max_num_batched_tokens,
        "max_blocks": -(-model.max_model_len // config.tokens_per_block),
    }
    sizes = GraphSizes.of(work, **limits)
    program = StepProgram(
        forward,
        model.sampler,
        block_size=config.tokens_per_block,
        largest=largest_shape(**limits),
        max_context_len=model.max_model_len,
    )
    try:
        graphs = StepGraphs(
            CudaCapture(program, GraphPool(device, capture_stream), stream),
            model.sampler,
            lambda: PinnedStaging(program.packed.numel(), program.result.numel()),
            sizes,
            in_flight=config.max_steps_in_flight,
            block_size=config.tokens_per_block,
        )
        shapes = sizes.common
        for done, shape in enumerate(shapes):
            on_progress("graphs", done, len(shapes))
            if run:
                with torch.inference_mode():
                    program(shape)
            graphs.capture([shape])
    except DeviceError as error:
        logger.warning("steps are launched kernel by kernel: %s", error)
        return None
    on_progress("graphs", len(shapes), len(shapes))
    return graphs
