"""The device work of a step, from its packed inputs to its packed result.

Everything it reads and writes has a fixed address, and everything that varies within a shape comes
from `packed` or from the slots' own tensors on the device: so it can be captured once a shape and
launched for any step that fits. Needs Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from aengine.execute.graph_shapes import (
    INTS,
    REALS,
    MixedLayout,
    ResultLayout,
    SampleLayout,
    SampleShape,
    largest_sample,
)
from aengine.execute.logprobs import token_logprobs
from aengine.execute.packing import HEADER
from aengine.execute.sampler_state import SamplerFeature
from aengine.kernels import triton_sampling as kernels
from aengine.kernels.sampling import DrawParams, PenaltyParams
from aengine.kernels.triton_inputs import DecodeInputs, publish, slot_draws, unpack_decode
from aengine.model.batch import ForwardBatch

if TYPE_CHECKING:
    from aengine.execute.graph_shapes import StepShape
    from aengine.execute.runner import Forward
    from aengine.execute.sampler import Sampler
    from aengine.kernels.triton_logits import Peaks


class SamplingRows(NamedTuple):
    """Which slots the rows of logits are sampled for. Rows of slot 0 are sampled for nothing."""

    slots: torch.Tensor
    """[R] int64."""
    positions: torch.Tensor
    """[R] int64, of the tokens whose logits these are."""


class StepProgram:
    """Runs steps of any shape up to a largest one. Belongs to one lane.

    Args:
        forward: the model with its KV cache, with the workspaces of this lane.
        sampler: whose slots are sampled.
        block_size: tokens of a KV block.
        largest: no step needs more memory.
        max_context_len: the longest context.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        *,
        block_size: int,
        largest: StepShape,
        max_context_len: int,
    ) -> None:
        device = sampler.device
        rows, steady = largest.rows, largest.decode * (HEADER + largest.blocks)
        self._forward = forward
        self._sampler = sampler
        self._block_size = block_size
        self._max_context_len = max_context_len
        self._inputs = DecodeInputs.allocate(
            rows=largest.decode, blocks=largest.blocks, device=device
        )
        self._index = torch.arange(rows + 1, device=device)
        self._query_start = self._index.to(torch.int32)
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        sample = SampleLayout.of(largest_sample(largest), sampler.table.vocab_size)
        words = max(steady, MixedLayout.of(largest).words, sample.words)
        # Made with the first graph that leaves logits: most engines have none.
        self._logits: torch.Tensor | None = None
        self._logits_rows = rows + 1
        self.packed = torch.zeros(words, dtype=torch.int32, device=device)
        words = ResultLayout.of(largest).words
        self.result = torch.zeros(words, dtype=torch.int32, device=device)

    def __call__(self, shape: StepShape | SampleShape) -> None:
        """Compute a step, or a part of one: read `packed`, write `result` and the slots' state."""
        if isinstance(shape, SampleShape):
            self._sample_later(shape)
            return
        batch, rows = self._mixed(shape) if shape.tokens else self._steady(shape)
        logits = self._forward(batch)
        if shape.samples:
            self._sample(logits, rows, shape)
        else:
            self.logits[: shape.rows].copy_(logits)

    @property
    def logits(self) -> torch.Tensor:
        """[rows + 1, V] float32: what steps leave that are sampled later; the last row is spare.

        Must have been made before a capture that uses it.
        """
        if self._logits is None:
            shape = self._logits_rows, self._sampler.table.vocab_size
            self._logits = torch.empty(shape, dtype=torch.float32, device=self.packed.device)
        return self._logits

    def input_words(self, shape: StepShape | SampleShape) -> int:
        """How much of `packed` a shape reads."""
        if isinstance(shape, SampleShape):
            return SampleLayout.of(shape, self._sampler.table.vocab_size).words
        if shape.tokens:
            return MixedLayout.of(shape).words
        return shape.rows * (HEADER + shape.blocks)

    def _steady(self, shape: StepShape) -> tuple[ForwardBatch, SamplingRows]:
        rows = shape.decode
        inputs = self._inputs.first(rows, shape.blocks)
        packed = self.packed[: self.input_words(shape)].view(rows, -1)
        unpack_decode(packed, self._sampler.future_map, inputs, block_size=self._block_size)
        batch = ForwardBatch(
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
        return batch, SamplingRows(inputs.slots, inputs.positions)

    def _mixed(self, shape: StepShape) -> tuple[ForwardBatch, SamplingRows]:
        at, packed, table = MixedLayout.of(shape), self.packed, self._sampler.table
        # Slots that are taken in this step; what pads this list goes to slot 0, as zeros.
        taken = packed[at.init_slots : at.slots].long()
        reals = packed[: at.ints].view(torch.float64).view(-1, REALS)
        ints = packed[at.ints : at.init_slots].view(torch.int64).view(-1, INTS)
        table.reals.index_copy_(0, taken, reals)
        table.ints.index_copy_(0, taken, ints)

        context_lens = packed[at.context_lens : at.logit_index]
        token_ids = packed[at.token_ids : at.positions].long()
        # The first tokens are those of the decode rows; where these pad, chunks have begun already.
        slots = packed[at.slots : at.slots + shape.decode].long()
        newest = self._sampler.future_map.index_select(0, slots)
        first = token_ids[: shape.decode]
        first.copy_(torch.where(context_lens[: shape.decode] > 0, newest, first))
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=packed[at.positions : at.slot_mapping].long(),
            slot_mapping=packed[at.slot_mapping : at.tables].long(),
            query_start=packed[at.query_start : at.context_lens],
            context_lens=context_lens,
            block_tables=packed[at.tables : at.words].view(shape.rows, shape.blocks),
            logit_index=packed[at.logit_index : at.token_ids].long(),
            num_decode=shape.decode,
            max_query_len=shape.tokens,
            max_context_len=self._max_context_len,
        )
        sampled = packed[at.sampled : at.query_start].long()
        return batch, SamplingRows(sampled, context_lens.long() - 1)

    def _sample_later(self, shape: SampleShape) -> None:
        at = SampleLayout.of(shape, self._sampler.table.vocab_size)
        # A mask that pads is for the row behind the last, which is nobody's or not sampled again.
        logits, packed = self.logits[: shape.rows + 1], self.packed
        slots, positions = packed[: at.mask_rows].view(2, -1).long()
        rows = SamplingRows(slots, positions)
        raw = logits[:-1].clone() if shape.features & SamplerFeature.LOGPROBS else None
        masks = packed[at.masks : at.words].view(shape.masks, -1)
        kernels.apply_bitmask_(logits, masks, packed[at.mask_rows : at.masks].long())
        self._sample(logits[:-1], rows, shape, raw)

    def _sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        shape: StepShape | SampleShape,
        raw: torch.Tensor | None = None,
    ) -> None:
        """Sample; `raw` are the logits as the model gave them, if these are not."""
        table, features = self._sampler.table, shape.features
        index = self._index[: shape.rows]
        if features & SamplerFeature.PENALTIES:
            if raw is None and features & SamplerFeature.LOGPROBS:
                raw = logits.clone()
            reals = table.reals.index_select(0, rows.slots)
            penalties = PenaltyParams(
                repetition=reals[:, 3], presence=reals[:, 4], frequency=reals[:, 5]
            )
            kernels.penalise_(logits, index, rows.slots, table.seen, penalties)
        best = kernels.row_peaks(logits)
        drawn = self._draw(logits, rows, best, shape)
        token_ids, result = self._token_ids[: shape.rows], self.result[: shape.rows]
        future_map = self._sampler.future_map
        publish(future_map, rows.slots, best, drawn, table.reals, token_ids, result)
        if features & SamplerFeature.PENALTIES:
            kernels.count_(table.seen, rows.slots, token_ids)
        if features & SamplerFeature.LOGPROBS:
            self._logprobs(logits if raw is None else raw, token_ids, shape)

    def _draw(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        best: Peaks,
        shape: StepShape | SampleShape,
    ) -> torch.Tensor | None:
        if not shape.features & SamplerFeature.RANDOM:
            return None
        table = self._sampler.table
        draws = slot_draws(rows.slots, rows.positions, table.reals, table.ints)
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

    def _logprobs(
        self, raw: torch.Tensor, token_ids: torch.Tensor, shape: StepShape | SampleShape
    ) -> None:
        at = ResultLayout.of(shape)
        found = token_logprobs(raw, token_ids, shape.top)
        real = self.result.view(torch.float32)
        square = shape.rows, shape.top
        real[at.logprobs : at.ranks].copy_(found.logprobs_L)
        self.result[at.ranks : at.top_ids].copy_(found.ranks_L)
        self.result[at.top_ids : at.top_logprobs].view(square).copy_(found.top_ids_LK)
        real[at.top_logprobs : at.words].view(square).copy_(found.top_logprobs_LK)
