"""From a plan's integers to the tensors of a forward: `build`.

All arithmetic is numpy on the host, a few calls whatever the number of rows; the only device-side
input is the token of each decode row, gathered from the FutureMap because the host may not know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from aengine.model.batch import ForwardBatch
from aengine.policy.runs import copy_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from aengine.batch import StepPlan

FEW_ROWS = 64
"""Decode rows up to which a loop in Python is quicker than waiting for the GIL."""
POISON = -(2**62)
"""A token that was read already: no token id, and no row of the embedding."""


class HostBatch(NamedTuple):
    """A `ForwardBatch` of decode rows as arrays."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_index: npt.NDArray[np.int64]


class InputBuilder:
    """Builds forward batches for one engine.

    Args:
        block_size: tokens per KV block.
        device: where the tensors go.
        poison: overwrite each token of the FutureMap as it is read, and check that none is read
            twice or before it was sampled. Costs a kernel or two a step.
    """

    def __init__(self, *, block_size: int, device: torch.device, poison: bool = False) -> None:
        self._block_size = block_size
        self._device = device
        self._poison = poison
        self._count = np.arange(FEW_ROWS + 1, dtype=np.int32)
        self._index = np.arange(FEW_ROWS)

    def build(self, plan: StepPlan, future_map: torch.Tensor) -> ForwardBatch:
        """The tensors of one step.

        Args:
            plan: the step.
            future_map: [slots + 1] int64, the last token sampled in each slot.
        """
        query_start = np.zeros(plan.num_rows + 1, dtype=np.int32)
        np.cumsum(plan.lengths, out=query_start[1:])
        positions = _positions(plan, query_start)
        context_lens = plan.starts + plan.lengths
        width = max(1, int(plan.num_blocks.max()))
        return ForwardBatch(
            token_ids=self._token_ids(plan, future_map),
            positions=self._to_device(positions),
            slot_mapping=self._to_device(self._slot_mapping(plan, positions)),
            query_start=self._to_device(query_start),
            context_lens=self._to_device(context_lens),
            block_tables=self._to_device(np.ascontiguousarray(plan.block_tables[:, :width])),
            logit_index=self._to_device(logit_index(plan, query_start)),
            num_decode=plan.num_decode,
            max_query_len=int(plan.lengths.max()),
            max_context_len=int(context_lens.max()),
        )

    def few(self, plan: StepPlan, newest: npt.NDArray[np.int64]) -> HostBatch | None:
        """A few decode rows for a CPU, without letting go of the GIL; None: it is another step.

        This stands between one forward and the next, and the step before is just done: other
        threads want the GIL for what follows from that. Index arrays, `np.arange` and all of torch
        let go of it, and get it back when those are through (a millisecond a token, measured).

        Args:
            plan: the step.
            newest: [slots + 1], the last token sampled in each slot.
        """
        rows, size = plan.num_rows, self._block_size
        if self._poison or not rows == plan.num_decode <= FEW_ROWS or not plan.samples.all():
            return None
        starts, table = plan.starts.tolist(), plan.block_tables
        tables = np.empty((rows, max(plan.num_blocks.tolist())), dtype=np.int32)
        copy_rows(tables, table[:, : tables.shape[1]])
        return HostBatch(
            token_ids=np.array([newest.item(slot) for slot in plan.slots.tolist()]),
            positions=np.array(starts),
            slot_mapping=np.array(
                [table.item(row, at // size) * size + at % size for row, at in enumerate(starts)]
            ),
            query_start=self._count[: rows + 1],
            context_lens=plan.starts + plan.lengths,
            block_tables=tables,
            logit_index=self._index[:rows],
        )

    def _token_ids(self, plan: StepPlan, future_map: torch.Tensor) -> torch.Tensor:
        if self._poison:
            for init in plan.slot_inits:  # what its last owner left is nobody's
                future_map[init.slot] = POISON
        known = self._to_device(plan.prefill_token_ids.astype(np.int64))
        if not plan.num_decode:
            return known
        slots = self._to_device(plan.slots[: plan.num_decode].astype(np.int64))
        newest = future_map[slots]
        if self._poison:
            self._consume(plan, future_map, slots, newest)
        return torch.cat([newest, known])

    def _consume(
        self,
        plan: StepPlan,
        future_map: torch.Tensor,
        slots: torch.Tensor,
        newest: torch.Tensor,
    ) -> None:
        """Poison what was read; on a GPU the check is the device's, so that nothing waits.

        Raises:
            RuntimeError: a token was poisoned already (on a GPU the device fails instead).
        """
        future_map[slots] = POISON
        good = newest != POISON
        if self._device.type != "cpu":
            torch._assert_async(good.all())
        elif not good.all():
            rows = (~good).nonzero().flatten().tolist()
            raise RuntimeError(
                f"step {plan.step_id} reads tokens that were read before or never sampled: "
                f"{[(plan.seq_ids[row], int(plan.slots[row])) for row in rows]} (sequence, slot)"
            )

    def _slot_mapping(
        self, plan: StepPlan, positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        rows = np.repeat(np.arange(plan.num_rows), plan.lengths)
        blocks = plan.block_tables[rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        # Pinned and copied asynchronously; the step's completion keeps the staging memory alive.
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _positions(plan: StepPlan, query_start: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """[T]: each row counts up from its start."""
    total = int(query_start[-1])
    shift = np.repeat(plan.starts - query_start[:-1], plan.lengths)
    return np.arange(total, dtype=np.int64) + shift


def logit_index(plan: StepPlan, query_start: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Which tokens need logits: the last of each sampling row, in row order; then every token of
    the rows that want prompt log-probabilities, row by row."""
    last = (query_start[1:] - 1)[plan.samples].astype(np.int64)
    spans = [
        np.arange(query_start[row], query_start[row + 1], dtype=np.int64)
        for row in plan.prompt_logprob_rows
    ]
    return np.concatenate([last, *spans]) if spans else last
