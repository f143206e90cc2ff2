"""From a plan's integers to one packed buffer of 32-bit words, which a captured step reads.

numpy on pinned memory, a few calls whatever the number of rows; see `graph_shapes` for the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.execute.graph_shapes import INTS, REALS, MixedLayout, SampleLayout
from aengine.policy.runs import QUIET, copy_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from aengine.batch import StepPlan
    from aengine.execute.graph_shapes import SampleShape, StepShape

    Words = npt.NDArray[np.int32]

HEADER = 2
"""Columns of a packed decode row before its block ids: slot and position."""
PADDING_POSITION = -1


def pack_decode(plan: StepPlan, shape: StepShape, packed: Words) -> None:
    """Write a steady step: a row each of slot, position, block ids.

    Args:
        plan: decode rows only.
        shape: at least as large, without chunks.
        packed: [at least rows * (2 + blocks)].
    """
    rows, width = plan.num_rows, plan.block_tables.shape[1]
    table = packed[: shape.rows * (HEADER + shape.blocks)].reshape(shape.rows, -1)
    table[:rows, 0] = plan.slots
    table[:rows, 1] = plan.starts
    copy_rows(table[:rows, HEADER : HEADER + width], plan.block_tables)
    table[rows:, 0] = 0
    table[rows:, 1] = PADDING_POSITION


class MixedPacker:
    """Writes steps with chunks.

    Decode rows fill the shape's first D rows and chunk rows follow from row D on, while the tokens
    of all lie end to end. A decode row that pads has context 0, a chunk row that pads no tokens.

    No index arrays, and no numpy on more than a few hundred numbers at once: both let go of the GIL
    (see `policy.runs`).

    Args:
        block_size: tokens of a KV block.
        max_model_len: the longest context.
    """

    def __init__(self, *, block_size: int, max_model_len: int) -> None:
        self._block_size = block_size
        self._count = np.arange(max_model_len + 1, dtype=np.int32)

    def pack(
        self,
        plan: StepPlan,
        shape: StepShape,
        packed: Words,
        *,
        init_slots: Sequence[int],
        reals: npt.NDArray[np.float64],
        ints: npt.NDArray[np.int64],
    ) -> None:
        """Write a step.

        Args:
            plan: decode rows, then chunk rows.
            shape: at least as large.
            packed: [at least the layout's words].
            init_slots: slots that are taken in this step, at most the shape's chunks.
            reals: [len(init_slots), REALS] their parameters.
            ints: [len(init_slots), INTS] likewise.
        """
        at = MixedLayout.of(shape)
        room, decode, known = shape.decode, plan.num_decode, len(plan.prefill_token_ids)
        chunks = plan.num_rows - decode

        def rows_of(begin: int, values: npt.NDArray[Any]) -> None:
            target = packed[begin : begin + shape.rows]
            target[:] = 0
            target[:decode] = values[:decode]
            target[room : room + chunks] = values[decode:]

        _pad(packed[: at.ints].view(np.float64).reshape(-1, REALS), reals)
        _pad(packed[at.ints : at.init_slots].view(np.int64).reshape(-1, INTS), ints)
        _pad(packed[at.init_slots : at.slots], np.array(init_slots, dtype=np.int32))
        rows_of(at.slots, plan.slots)
        rows_of(at.sampled, np.where(plan.samples, plan.slots, 0))
        ends = np.cumsum(plan.lengths, dtype=np.int32)
        first = packed[at.query_start : at.context_lens]
        first[:decode] = self._count[:decode]
        first[decode : room + 1] = decode
        first[room + 1 : room + 1 + chunks] = ends[decode:]
        first[room + 1 + chunks :] = decode + known
        rows_of(at.context_lens, plan.starts + plan.lengths)
        rows_of(at.logit_index, ends - 1)

        tokens = shape.tokens
        ids, positions, places = (
            packed[begin : begin + tokens]
            for begin in (at.token_ids, at.positions, at.slot_mapping)
        )
        # What pads is token 0 at position 0, written to the padding block. The tokens of decode
        # rows are known to the device.
        ids.data[decode : decode + known] = plan.prefill_token_ids.data
        positions[:decode] = plan.starts[:decode]
        for quiet in (ids, positions, places):
            _zero(quiet, decode + known)
        self._places(plan, positions, places)
        tables = packed[at.tables : at.words].reshape(shape.rows, shape.blocks)
        width = plan.block_tables.shape[1]
        copy_rows(tables[:decode, :width], plan.block_tables[:decode])
        copy_rows(tables[room : room + chunks, :width], plan.block_tables[decode:])

    def _places(self, plan: StepPlan, positions: Words, places: Words) -> None:
        """Positions of the chunks' tokens, and where in the cache each token of the step goes."""
        size, decode = self._block_size, plan.num_decode
        count, target = self._count.data, positions.data
        starts = plan.starts.tolist()
        for row in range(decode):
            block, offset = divmod(starts[row], size)
            places[row] = plan.block_tables[row, block] * size + offset
        token = decode
        for row, length in enumerate(plan.lengths[decode:].tolist(), decode):
            position, end = starts[row], starts[row] + length
            target[token : token + length] = count[position:end]
            while position < end:
                block, offset = divmod(position, size)
                taken = min(size - offset, end - position)
                begin = int(plan.block_tables[row, block]) * size + offset
                np.add(self._count[:taken], begin, out=places[token : token + taken])
                token, position = token + taken, position + taken


def _pad(target: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """Write values to the beginning and zeros behind them."""
    target[: len(values)] = values
    target[len(values) :] = 0


def _zero(target: Words, begin: int) -> None:
    """Zeros from `begin` on, in pieces that keep the GIL."""
    for first in range(begin, len(target), QUIET):
        target[first : first + QUIET] = 0


def pack_sample(
    plan: StepPlan,
    forward: StepShape,
    shape: SampleShape,
    packed: Words,
    *,
    vocab_size: int,
    mask_rows: Sequence[int],
    bitmask: Words,
) -> list[int]:
    """Write what a step's rows are sampled for, after its forward.

    Args:
        plan: the step.
        forward: the shape that its forward ran in: it says where the rows' logits are.
        shape: at least as large.
        packed: [at least the layout's words].
        vocab_size: of the model.
        mask_rows: plan rows that have a mask.
        bitmask: [len(mask_rows), ceil(vocab_size / 32)].

    Returns:
        The plan rows that are sampled: constrained rows without a mask are not.
    """
    at = SampleLayout.of(shape, vocab_size)
    rows = _rows(plan, forward)
    late = set(plan.constrained) - set(mask_rows)
    sampled = [row for row in np.flatnonzero(plan.samples).tolist() if row not in late]
    slots, positions = packed[: at.mask_rows].reshape(2, -1)
    slots[:] = positions[:] = 0
    slots[rows[sampled]] = plan.slots[sampled]
    positions[rows] = plan.starts + plan.lengths - 1
    targets = packed[at.mask_rows : at.masks]
    targets[:] = shape.rows  # a row behind the last, for masks that pad
    targets[: len(mask_rows)] = rows[list(mask_rows)]
    masks = packed[at.masks : at.words].reshape(shape.masks, -1)
    masks[: len(mask_rows)] = bitmask
    return sampled


def places_of(plan: StepPlan, forward: StepShape, rows: Sequence[int]) -> list[int]:
    """Where plan rows are among the rows of a shape."""
    shift = forward.decode - plan.num_decode
    return [row if row < plan.num_decode else row + shift for row in rows]


def _rows(plan: StepPlan, shape: StepShape) -> npt.NDArray[np.int64]:
    """Where the plan's rows go in a shape."""
    rows = np.arange(plan.num_rows)
    rows[plan.num_decode :] += shape.decode - plan.num_decode
    return rows
