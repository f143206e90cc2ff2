"""The two ends of a captured decode step: its inputs unpacked, its tokens published.

The host packs a step into one [R, 2 + B] int32 buffer, a row each: slot, position, block ids. One
copy brings it to the device, where these kernels, part of the step's graph, make of it what the
forward and the sampler read. A padding row has slot 0 and a negative position: it gets context 0
and writes its key and value to the padding block.

Shape legend: R rows of the graph, B blocks of its tables, N slots of the engine, V vocabulary.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from aengine.kernels.triton_logits import Peaks

HEADER = 2
"""Columns of a packed row before its block ids: slot and position."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeInputs:
    """What a decode step reads; tensors of fixed address, written anew by each `unpack_decode`."""

    slots: torch.Tensor
    """[R] int64."""
    token_ids: torch.Tensor
    """[R] int64."""
    positions: torch.Tensor
    """[R] int64; 0 in padding rows."""
    slot_mapping: torch.Tensor
    """[R] int64."""
    context_lens: torch.Tensor
    """[R] int32."""
    block_tables: torch.Tensor
    """[R, B] int32."""

    @classmethod
    def allocate(cls, *, rows: int, blocks: int, device: torch.device) -> DecodeInputs:
        """Tensors for `rows` rows with tables of `blocks` blocks."""
        wide = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)]
        return cls(
            slots=wide[0],
            token_ids=wide[1],
            positions=wide[2],
            slot_mapping=wide[3],
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(rows, blocks, dtype=torch.int32, device=device),
        )

    def first(self, rows: int, blocks: int) -> DecodeInputs:
        """The part of this memory that `rows` rows with tables of `blocks` blocks take."""
        tables = self.block_tables.view(-1)[: rows * blocks]
        return DecodeInputs(
            slots=self.slots[:rows],
            token_ids=self.token_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            context_lens=self.context_lens[:rows],
            block_tables=tables.view(rows, blocks),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotDraws:
    """Sampling parameters of R rows; fields as in `kernels.sampling.DrawParams`."""

    uniform: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@triton.jit(do_not_specialize=["packed_stride", "blocks"])
def _unpack_kernel(
    packed_ptr,
    future_ptr,
    slots_ptr,
    token_ptr,
    position_ptr,
    mapping_ptr,
    context_ptr,
    table_ptr,
    packed_stride,
    blocks,
    HEADER: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    here = packed_ptr + row * packed_stride
    slot = tl.load(here).to(tl.int64)
    packed_position = tl.load(here + 1)
    position = tl.maximum(packed_position, 0)
    for start in range(0, blocks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < blocks
        ids = tl.load(here + HEADER + column, mask=inside, other=0)
        tl.store(table_ptr + row * blocks + column, ids, mask=inside)
    block = tl.load(here + HEADER + position // PAGE).to(tl.int64)
    mapping = block * PAGE + position % PAGE
    tl.store(slots_ptr + row, slot)
    tl.store(token_ptr + row, tl.load(future_ptr + slot))
    tl.store(position_ptr + row, position.to(tl.int64))
    tl.store(mapping_ptr + row, tl.where(packed_position < 0, 0, mapping))
    tl.store(context_ptr + row, packed_position + 1)


@triton.jit
def _mix64(x):
    """As `kernels.sampling.mix64`, on unsigned integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["rows"])
def _draws_kernel(
    slots_ptr,
    position_ptr,
    reals_ptr,
    ints_ptr,
    uniform_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    reals_stride,
    ints_stride,
    rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    # The token to be sampled comes one position after the one that was computed.
    position = tl.load(position_ptr + row, mask=inside, other=0) + 1
    key = tl.load(ints_ptr + slot * ints_stride, mask=inside, other=0).to(tl.uint64)
    golden = tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix64(key ^ _mix64(position.to(tl.uint64) * golden + golden))
    uniform = (bits >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16
    tl.store(uniform_ptr + row, uniform, mask=inside)
    reals = reals_ptr + slot * reals_stride
    temperature = tl.load(reals, mask=inside, other=0.0)
    # A greedy row is drawn for nothing: with these parameters that costs the least.
    random = temperature > 0
    top_k = tl.load(ints_ptr + slot * ints_stride + 1, mask=inside & random, other=0)
    top_p = tl.load(reals + 1, mask=inside & random, other=1.0)
    min_p = tl.load(reals + 2, mask=inside & random, other=0.0)
    tl.store(temperature_ptr + row, tl.where(random, temperature, 1.0), mask=inside)
    tl.store(top_k_ptr + row, top_k, mask=inside)
    tl.store(top_p_ptr + row, top_p, mask=inside)
    tl.store(min_p_ptr + row, min_p, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _publish_kernel(
    future_ptr,
    slots_ptr,
    peak_ptr,
    best_ptr,
    drawn_ptr,
    reals_ptr,
    token_ptr,
    result_ptr,
    reals_stride,
    rows,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    token = tl.load(best_ptr + row, mask=inside, other=0)
    if RANDOM:
        temperature = tl.load(reals_ptr + slot * reals_stride, mask=inside, other=0.0)
        drawn = tl.load(drawn_ptr + row, mask=inside, other=0)
        token = tl.where(temperature > 0, drawn, token)
    peak = tl.load(peak_ptr + row, mask=inside, other=0.0)
    sampled = (peak > float("-inf")) & (peak < float("inf"))
    tl.store(future_ptr + slot, token, mask=inside)
    tl.store(token_ptr + row, token, mask=inside)
    tl.store(result_ptr + row, tl.where(sampled, token, -1).to(tl.int32), mask=inside)


def unpack_decode(
    packed: torch.Tensor, future_map: torch.Tensor, inputs: DecodeInputs, *, block_size: int
) -> None:
    """Write the inputs of a decode step.

    Args:
        packed: [R, 2 + B] int32, rows contiguous: slot, position (negative: padding), block ids.
        future_map: [N] int64, the newest token of each slot.
        inputs: for R rows and B blocks.
        block_size: tokens of a KV block.
    """
    rows, blocks = inputs.block_tables.shape
    _unpack_kernel[(rows,)](
        packed,
        future_map,
        inputs.slots,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.context_lens,
        inputs.block_tables,
        packed.stride(0),
        blocks,
        HEADER=HEADER,
        PAGE=block_size,
        BLOCK=min(1024, triton.next_power_of_2(blocks)),
        num_warps=4,
    )


def slot_draws(
    slots: torch.Tensor, positions: torch.Tensor, reals: torch.Tensor, ints: torch.Tensor
) -> SlotDraws:
    """The sampling parameters of the rows' slots, and the uniform of (key, position + 1).

    Greedy rows (temperature 0) get parameters that truncate nothing: their draw means nothing.

    Args:
        slots, positions: [R] int64 of `DecodeInputs`.
        reals: [N, at least 3] float64: temperature, top_p, min_p.
        ints: [N, at least 2] int64: random key, top_k.
    """
    rows = slots.shape[0]
    wide = [torch.empty(rows, dtype=torch.float64, device=slots.device) for _ in range(4)]
    top_k = torch.empty(rows, dtype=torch.int64, device=slots.device)
    draws = SlotDraws(
        uniform=wide[0], temperature=wide[1], top_k=top_k, top_p=wide[2], min_p=wide[3]
    )
    if rows:
        _draws_kernel[(triton.cdiv(rows, 128),)](
            slots,
            positions,
            reals,
            ints,
            draws.uniform,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            reals.stride(0),
            ints.stride(0),
            rows,
            BLOCK=128,
            num_warps=4,
        )
    return draws


def publish(
    future_map: torch.Tensor,
    slots: torch.Tensor,
    best: Peaks,
    drawn: torch.Tensor | None,
    reals: torch.Tensor,
    token_ids: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """Settle each row's token and write it where it is needed.

    Rows of slot 0 (padding) leave any one of theirs there.

    Args:
        future_map: [N] int64, written at the rows' slots.
        slots: [R] int64.
        best: of the R rows.
        drawn: [R] int64, taken by the rows whose slot has a temperature; None: all are greedy.
        reals: [N, at least 1] float64, temperature first.
        token_ids: [R] int64, written.
        result: [R] int32, written: for the host, -1 where nothing could be sampled.
    """
    rows = slots.shape[0]
    if rows:
        _publish_kernel[(triton.cdiv(rows, 128),)](
            future_map,
            slots,
            best.values_S,
            best.token_ids_S,
            best.token_ids_S if drawn is None else drawn,
            reals,
            token_ids,
            result,
            reals.stride(0),
            rows,
            RANDOM=drawn is not None,
            BLOCK=128,
            num_warps=4,
        )
