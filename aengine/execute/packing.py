"""From a plan's integers to one packed buffer of 32-bit words, which a captured step reads.

numpy on pinned memory, a few calls whatever the number of rows; see `graph_shapes` for the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.execute.graph_shapes import INTS, REALS, MixedLayout, SampleLayout

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
    table[:rows, HEADER : HEADER + width] = plan.block_tables
    table[rows:, 0] = 0
    table[rows:, 1] = PADDING_POSITION


def pack_mixed(
    plan: StepPlan,
    shape: StepShape,
    packed: Words,
    *,
    block_size: int,
    init_slots: Sequence[int],
    reals: npt.NDArray[np.float64],
    ints: npt.NDArray[np.int64],
) -> None:
    """Write a step with chunks.

    Decode rows fill the shape's first D rows and tokens, chunk rows follow from row D and token D
    on. A decode row that pads has context 0; a chunk row that pads has no tokens.

    Args:
        plan: decode rows, then chunk rows.
        shape: at least as large.
        packed: [at least the layout's words].
        block_size: tokens of a KV block.
        init_slots: slots that are taken in this step, at most the shape's chunks.
        reals: [len(init_slots), REALS] their parameters.
        ints: [len(init_slots), INTS] likewise.
    """
    at = MixedLayout.of(shape)
    decode, room = plan.num_decode, shape.decode
    chunks = plan.num_rows - decode
    known = len(plan.prefill_token_ids)
    rows, tokens = _targets(plan, shape)

    count = len(init_slots)
    parameters = packed[: at.ints].view(np.float64).reshape(-1, REALS)
    parameters[:count], parameters[count:] = reals, 0.0
    integers = packed[at.ints : at.init_slots].view(np.int64).reshape(-1, INTS)
    integers[:count], integers[count:] = ints, 0
    inits = packed[at.init_slots : at.slots]
    inits[:count], inits[count:] = init_slots, 0

    per_row = packed[at.slots : at.query_start].reshape(2, -1)
    per_row[:] = 0
    per_row[0, rows] = plan.slots
    per_row[1, rows] = np.where(plan.samples, plan.slots, 0)
    first = packed[at.query_start : at.context_lens]
    first[:room] = np.arange(room)
    first[room] = room
    first[room + 1 : room + 1 + chunks] = room + np.cumsum(plan.lengths[decode:])
    first[room + 1 + chunks :] = room + known
    contexts = packed[at.context_lens : at.logit_index]
    contexts[:] = 0
    contexts[rows] = plan.starts + plan.lengths
    last = packed[at.logit_index : at.token_ids]
    last[:] = 0
    last[rows] = first[1:][rows] - 1

    ids, positions, places = packed[at.token_ids : at.tables].reshape(3, -1)
    ids[:] = 0  # of decode rows the device knows the token
    ids[room : room + known] = plan.prefill_token_ids
    row_of = np.repeat(np.arange(plan.num_rows), plan.lengths)
    started = np.cumsum(plan.lengths) - plan.lengths
    position = np.arange(len(row_of)) + (plan.starts - started)[row_of]
    positions[:] = 0
    positions[tokens] = position
    blocks = plan.block_tables[row_of, position // block_size]
    places[:] = 0
    places[tokens] = blocks * block_size + position % block_size
    width = plan.block_tables.shape[1]
    tables = packed[at.tables : at.words].reshape(shape.rows, shape.blocks)
    tables[rows, :width] = plan.block_tables


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
    rows, _ = _targets(plan, forward)
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
    places, _ = _targets(plan, forward)
    found: list[int] = places[list(rows)].tolist()
    return found


def _targets(
    plan: StepPlan, shape: StepShape
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the plan's rows and tokens go in a shape."""
    decode, shift = plan.num_decode, shape.decode - plan.num_decode
    rows, tokens = np.arange(plan.num_rows), np.arange(plan.num_tokens)
    rows[decode:] += shift
    tokens[decode:] += shift
    return rows, tokens
