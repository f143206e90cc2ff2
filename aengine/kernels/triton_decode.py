"""Paged decode attention on the GPU: one query a row, the context split over programs.

A program holds all query heads of one key head (they read the same keys, so they share the read)
and one part of one row's context. The launch grid depends on host-known sizes alone, so that a
captured graph fits any context: each program finds its part from `context_lens` on the device, and
those that have none return at once. The last program of a row to finish combines the parts; the
alternative, a second kernel, costs a launch and a drained device in every layer.

Source of the split: Dao et al., "Flash-Decoding for long-context inference", 2023.
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
    from aengine.kernels.attention import KVLayer

_FILL = 128
"""Programs that fill the 132 multiprocessors of an H100 or H200."""

_LONG_CONTEXT = 16_384
"""Above this, two programs a multiprocessor win more than combining twice the parts costs."""

_SHORTEST_SPLIT = 128
"""Parts shorter than this cost more in the combination than they win."""

_LONG_SPLIT = 2048
_MOST_SPLITS = 64
_MOST_PROGRAMS = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeWorkspace:
    """What the parts of a split context leave for the program that combines them.

    Owned by one lane (law 6): two launches that share it must be ordered on one stream. `arrived`
    is zero between launches; the kernel leaves it so.
    """

    partial: torch.Tensor
    """[elements] float32: unnormalised results."""
    statistics: torch.Tensor
    """[2, rows * splits * heads] float32: maxima and sums of the parts."""
    arrived: torch.Tensor
    """[rows * key heads] int32."""

    @classmethod
    def allocate(
        cls,
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> DecodeWorkspace:
        """Enough for any batch of up to `max_rows` rows."""
        row_splits = max(
            rows * _splits(rows, num_kv_heads, context)[0]
            for rows in range(1, max_rows + 1)
            for context in (_LONG_CONTEXT, _MOST_SPLITS * _LONG_SPLIT)
        )
        return cls(
            partial=torch.empty(row_splits * num_heads * head_dim, device=device),
            statistics=torch.empty(2, row_splits * num_heads, device=device),
            arrived=torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        )

    def holds(self, rows: int, splits: int, heads: int, kv_heads: int, dim: int) -> bool:
        """Whether a launch of this size fits."""
        parts = rows * splits * heads
        return (
            parts * dim <= self.partial.numel()
            and parts <= self.statistics.shape[1]
            and rows * kv_heads <= self.arrived.numel()
        )


# One compilation for any batch: neither a table's width nor where a slice begins may decide.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    context_ptr,
    out_ptr,
    partial_ptr,
    maximum_ptr,
    sum_ptr,
    arrived_ptr,
    scale,
    soft_cap,
    q_row_stride,
    q_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(context_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    span = context - first
    part = tl.cdiv(tl.cdiv(span, SPLITS), BLOCK_N) * BLOCK_N
    part = tl.maximum(part, SHORTEST)
    used = tl.maximum(tl.cdiv(span, part), 1)
    if split >= used:
        return
    begin = first + split * part
    end = tl.minimum(begin + part, context)

    member = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    own = (member < GROUP)[:, None] & (d < DIM)[None, :]
    head = kv_head * GROUP + member
    q = tl.load(
        q_ptr + row * q_row_stride + head[:, None] * q_head_stride + d[None, :], mask=own, other=0.0
    )
    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    result = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    table = table_ptr + row * table_stride
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = n + tl.arange(0, BLOCK_N)
        inside = position < end
        page = tl.load(table + position // PAGE, mask=inside, other=0)
        if WIDE:
            page = page.to(tl.int64)
        slot = (page * PAGE + position % PAGE) * (KV_HEADS * DIM) + kv_head * DIM
        at = slot[:, None] + d[None, :]
        readable = inside[:, None] & (d < DIM)[None, :]
        k = tl.load(k_ptr + at, mask=readable, other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP:
            score = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * score / soft_cap)))
        score = tl.where(inside[None, :], score * 1.4426950408889634, float("-inf"))
        # Each tile of the loop has a position inside, so the new maximum is a number.
        larger = tl.maximum(maximum, tl.max(score, axis=1))
        weight = tl.exp2(score - larger[:, None])
        decay = tl.exp2(maximum - larger)
        total = total * decay + tl.sum(weight, axis=1)
        v = tl.load(v_ptr + at, mask=readable, other=0.0).to(q.dtype)
        result = result * decay[:, None]
        result = tl.dot(weight.to(q.dtype), v, result, input_precision=PRECISION)
        maximum = larger

    out = out_ptr + row * (KV_HEADS * GROUP * DIM) + head[:, None] * DIM + d[None, :]
    if SPLITS == 1 or used == 1:
        result = result / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=own)
    else:
        heads: tl.constexpr = KV_HEADS * GROUP
        here = (row * SPLITS + split) * heads + head
        tl.store(partial_ptr + here[:, None] * DIM + d[None, :], result, mask=own)
        tl.store(maximum_ptr + here, maximum, mask=member < GROUP)
        tl.store(sum_ptr + here, total, mask=member < GROUP)
        # All threads' stores come before the one release by which this program says it is done.
        tl.debug_barrier()
        counter = arrived_ptr + row * KV_HEADS + kv_head
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == used - 1:
            tl.debug_barrier()
            tl.store(counter, 0)
            g = tl.arange(0, BLOCK_G)
            grouped = g < GROUP
            column = kv_head * GROUP + g
            highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
            whole = tl.zeros([BLOCK_G], tl.float32)
            combined = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            # In the order of the parts, not of arrival: the same numbers in every run. Several at
            # once, because what this costs is the latency of each round of loads.
            for from_part in range(0, used, AT_ONCE):
                parts = from_part + tl.arange(0, AT_ONCE)
                there = (row * SPLITS + parts)[:, None] * heads + column[None, :]
                valid = (parts < used)[:, None] & grouped[None, :]
                high = tl.load(
                    maximum_ptr + there, mask=valid, other=float("-inf"), cache_modifier=".cg"
                )
                mass = tl.load(sum_ptr + there, mask=valid, other=0.0, cache_modifier=".cg")
                value = tl.load(
                    partial_ptr + there[:, :, None] * DIM + d[None, None, :],
                    mask=valid[:, :, None] & (d < DIM)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                larger = tl.maximum(highest, tl.max(high, axis=0))
                # Padding heads have no maximum; any level but -inf keeps NaN away from them.
                larger = tl.where(grouped, larger, 0.0)
                decay = tl.exp2(highest - larger)
                share = tl.exp2(high - larger[None, :])
                whole = whole * decay + tl.sum(mass * share, axis=0)
                combined = combined * decay[:, None] + tl.sum(value * share[:, :, None], axis=0)
                highest = larger
            combined = combined / tl.where(grouped, whole, 1.0)[:, None]
            target = out_ptr + row * (heads * DIM) + column[:, None] * DIM + d[None, :]
            real = grouped[:, None] & (d < DIM)[None, :]
            tl.store(target, combined.to(out_ptr.dtype.element_ty), mask=real)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """How a launch is cut: the tuning knobs that `benchmarks/kernels.py` turns."""

    keys: int
    splits: int
    warps: int
    stages: int
    shortest: int = _SHORTEST_SPLIT


def decode_tile(
    rows: int, num_kv_heads: int, head_dim: int, max_context_len: int, itemsize: int
) -> DecodeTile:
    """The tile for a batch, from host-known sizes."""
    splits, shortest = _splits(rows, num_kv_heads, max_context_len)
    return DecodeTile(
        keys=128 if head_dim * itemsize <= 256 else 32,
        splits=splits,
        warps=4,
        stages=3,
        shortest=shortest,
    )


def decode_attention(
    q_RND: torch.Tensor,
    kv: KVLayer,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    max_context_len: int,
    out: torch.Tensor | None = None,
    tile: DecodeTile | None = None,
) -> torch.Tensor:
    """Attention of one query a row over its paged context.

    Args:
        q_RND: [R, N, D] queries, last dimension contiguous.
        kv: the layer's cache, contiguous.
        block_tables: [R, B] int32; entries behind a row's context are not read.
        context_lens: [R] int32. A row of context 0 gets zeros.
        scale, sliding_window, soft_cap: as in `kernels.attention.paged_attention`.
        workspace: of this lane, for at least R rows.
        max_context_len: a bound on `context_lens`, which may be generous: it sets how many parts a
            row has at most.
        out: [R, N, D], contiguous, to write to, if given.
        tile: overrides the choice of `decode_tile`.

    Returns:
        [R, N, D], contiguous, in the dtype of `q_RND`.

    Raises:
        ValueError: the workspace is too small for this launch.
    """
    rows, heads, dim = q_RND.shape
    if out is None:
        out = torch.empty((rows, heads, dim), dtype=q_RND.dtype, device=q_RND.device)
    if rows == 0:
        return out
    _, page, kv_heads, _ = kv.k.shape
    if tile is None:
        tile = decode_tile(rows, kv_heads, dim, max_context_len, kv.k.element_size())
    group = heads // kv_heads
    block_d, block_g = triton.next_power_of_2(dim), triton.next_power_of_2(group)
    if tile.splits > 1 and not workspace.holds(rows, tile.splits, heads, kv_heads, dim):
        raise ValueError(f"the workspace is too small for {rows} rows in {tile.splits} parts")
    _decode_kernel[(kv_heads, rows, tile.splits)](
        q_RND,
        kv.k,
        kv.v,
        block_tables,
        context_lens,
        out,
        workspace.partial,
        workspace.statistics[0],
        workspace.statistics[1],
        workspace.arrived,
        scale,
        soft_cap or 1.0,
        q_RND.stride(0),
        q_RND.stride(1),
        block_tables.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_H=max(16, block_g),
        BLOCK_G=block_g,
        AT_ONCE=max(1, min(8, 4096 // (block_g * block_d))),
        BLOCK_N=tile.keys,
        PAGE=page,
        SPLITS=tile.splits,
        SHORTEST=tile.shortest,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap is not None,
        WIDE=kv.k.numel() >= 2**31,
        PRECISION="ieee" if q_RND.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def _splits(rows: int, num_kv_heads: int, max_context_len: int) -> tuple[int, int]:
    """Parts of a row's context at most, and positions of a part at least.

    Few rows are cut fine, to fill the device. Many rows fill it by themselves: only contexts far
    longer than others gain there, and all others must stay whole, because combining costs. Powers
    of two, because each number of parts is a kernel of its own.
    """
    programs = rows * num_kv_heads
    fill = _FILL if max_context_len <= _LONG_CONTEXT else 2 * _FILL
    wanted, shortest = min(max_context_len // _SHORTEST_SPLIT, fill // programs), _SHORTEST_SPLIT
    if fill // programs < 2:
        wanted = min(max_context_len // _LONG_SPLIT, _MOST_PROGRAMS // programs)
        shortest = _LONG_SPLIT
    splits = 1
    while 2 * splits <= min(wanted, _MOST_SPLITS):
        splits *= 2
    return splits, shortest
