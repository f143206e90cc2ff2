"""The device work of a steady decode step, from its packed inputs to its packed result.

Everything it reads and writes has a fixed address, and everything that varies within a shape comes
from `packed` or from the slots' own tensors on the device: so it can be captured once a shape and
launched for any step of that shape. Needs Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aengine.execute.decode_graphs import ResultLayout
from aengine.execute.logprobs import token_logprobs
from aengine.execute.sampler_state import SamplerFeature
from aengine.kernels import triton_sampling as kernels
from aengine.kernels.sampling import DrawParams, PenaltyParams
from aengine.kernels.triton_inputs import HEADER, DecodeInputs, publish, slot_draws, unpack_decode
from aengine.model.batch import ForwardBatch

if TYPE_CHECKING:
    from aengine.execute.decode_graphs import StepShape
    from aengine.execute.runner import Forward
    from aengine.execute.sampler import Sampler
    from aengine.kernels.triton_logits import Peaks


class DecodeProgram:
    """Runs steps of any shape up to a largest one. Belongs to one lane.

    Args:
        forward: the model with its KV cache, with the workspaces of this lane.
        sampler: whose slots are sampled.
        block_size: tokens of a KV block.
        max_rows, max_blocks, max_top: of the largest shape.
        max_context_len: the longest context.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        *,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        max_top: int,
        max_context_len: int,
    ) -> None:
        device = sampler.device
        self._forward = forward
        self._sampler = sampler
        self._block_size = block_size
        self._max_context_len = max_context_len
        self._inputs = DecodeInputs.allocate(rows=max_rows, blocks=max_blocks, device=device)
        self._index = torch.arange(max_rows + 1, device=device)
        self._query_start = self._index.to(torch.int32)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        words = max_rows * (3 + 2 * max_top)
        self.packed = torch.zeros(
            max_rows * (HEADER + max_blocks), dtype=torch.int32, device=device
        )
        self.result = torch.zeros(words, dtype=torch.int32, device=device)

    def __call__(self, shape: StepShape) -> None:
        """Compute a step: read `packed`, write `result` and the slots' state.

        Every row must be one that the sampler's slots know, or padding (slot 0, position -1).
        """
        rows, table = shape.rows, self._sampler.table
        inputs = self._inputs.first(rows, shape.blocks)
        packed = self.packed[: rows * (HEADER + shape.blocks)].view(rows, -1)
        unpack_decode(packed, self._sampler.future_map, inputs, block_size=self._block_size)
        logits = self._forward(
            ForwardBatch(
                token_ids=inputs.token_ids,
                positions=inputs.positions,
                slot_mapping=inputs.slot_mapping,
                query_start=self._query_start[: rows + 1],
                context_lens=inputs.context_lens,
                block_tables=inputs.block_tables,
                logit_index=None,
                num_decode=rows,
                max_query_len=1,
                max_context_len=self._max_context_len,
            )
        )
        raw = logits
        index = self._index[:rows]
        if shape.features & SamplerFeature.PENALTIES:
            raw = logits.clone() if shape.features & SamplerFeature.LOGPROBS else logits
            reals = table.reals.index_select(0, inputs.slots)
            penalties = PenaltyParams(
                repetition=reals[:, 3], presence=reals[:, 4], frequency=reals[:, 5]
            )
            kernels.penalise_(logits, index, inputs.slots, table.seen, penalties)
        best = kernels.row_peaks(logits)
        drawn = self._draw(logits, inputs, best, shape)
        token_ids = self._token_ids[:rows]
        result = self.result[:rows]
        publish(self._sampler.future_map, inputs.slots, best, drawn, table.reals, token_ids, result)
        if shape.features & SamplerFeature.PENALTIES:
            kernels.count_(table.seen, inputs.slots, token_ids)
        if shape.features & SamplerFeature.LOGPROBS:
            self._logprobs(raw, token_ids, shape)

    def _draw(
        self, logits: torch.Tensor, inputs: DecodeInputs, best: Peaks, shape: StepShape
    ) -> torch.Tensor | None:
        if not shape.features & SamplerFeature.RANDOM:
            return None
        table = self._sampler.table
        draws = slot_draws(inputs.slots, inputs.positions, table.reals, table.ints)
        params = DrawParams(
            uniform=draws.uniform,
            temperature=draws.temperature,
            top_k=draws.top_k,
            top_p=draws.top_p,
            min_p=draws.min_p,
            truncated=bool(shape.features & SamplerFeature.TRUNCATED),
            largest_top_k=None,
        )
        return kernels.draw(logits, self._index[: shape.rows], best.values_S, params)

    def _logprobs(self, raw: torch.Tensor, token_ids: torch.Tensor, shape: StepShape) -> None:
        at = ResultLayout.of(shape)
        found = token_logprobs(raw, token_ids, shape.top)
        real = self.result.view(torch.float32)
        square = shape.rows, shape.top
        real[at.logprobs : at.ranks].copy_(found.logprobs_L)
        self.result[at.ranks : at.top_ids].copy_(found.ranks_L)
        self.result[at.top_ids : at.top_logprobs].view(square).copy_(found.top_ids_LK)
        real[at.top_logprobs : at.words].view(square).copy_(found.top_logprobs_LK)
