"""Paged prefill and extend attention on the GPU: rows of any length in one launch, causal.

A program holds a run of queries of one row, for all query heads of one key head: those heads read
the same keys, and a short chunk of new tokens still fills the tile of a matrix product. Which row a
program works for it finds by a binary search in `query_start`, so the launch needs the host-known
sums alone. Tiles wholly before the first query need no mask and run in a loop of their own.

Source: Dao, "FlashAttention-2", 2023.
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
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from aengine.kernels.attention import KVLayer


@triton.jit
def _attend(
    q,
    maximum,
    total,
    result,
    k_ptr,
    v_ptr,
    k_box,
    v_box,
    table,
    kv_offset,
    query_position,
    begin,
    end,
    scale,
    soft_cap,
    SLOT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    BOXES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Running softmax over the positions `begin .. end-1`; `scale` carries log2(e)."""
    d = tl.arange(0, BLOCK_D)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = n + tl.arange(0, BLOCK_N)
        if BOXES and not MASKED:
            row = tl.load(table + n // PAGE) * PAGE + n % PAGE
            k = k_box.load([row, kv_offset]).to(q.dtype)
            v = v_box.load([row, kv_offset]).to(q.dtype)
        else:
            if PAGE % BLOCK_N == 0:  # a tile lies in one block: one table entry serves it
                page = tl.load(table + n // PAGE)
            elif MASKED:
                page = tl.load(table + position // PAGE, mask=position < end, other=0)
            else:
                page = tl.load(table + position // PAGE)
            if WIDE:
                page = page.to(tl.int64)
            slot = (page * PAGE + position % PAGE) * SLOT + kv_offset
            at = slot[:, None] + d[None, :]
            if MASKED:
                readable = (position < end)[:, None] & (d < DIM)[None, :]
                k = tl.load(k_ptr + at, mask=readable, other=0.0).to(q.dtype)
                v = tl.load(v_ptr + at, mask=readable, other=0.0).to(q.dtype)
            elif BLOCK_D != DIM:
                k = tl.load(k_ptr + at, mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
                v = tl.load(v_ptr + at, mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
            else:
                k = tl.load(k_ptr + at).to(q.dtype)
                v = tl.load(v_ptr + at).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP:
            capped = score * (scale * 0.6931471805599453 / soft_cap)
            capped = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * capped))
            score = capped * (soft_cap / (scale * 0.6931471805599453))
        if MASKED:
            seen = (position[None, :] <= query_position[:, None]) & (position < end)[None, :]
            if WINDOW > 0:
                seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(maximum, tl.max(score, axis=1) * scale)
        level = larger
        if MASKED:
            # A query may see nothing of a tile (its window begins later, or it is padding).
            level = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score * scale - level[:, None])
        decay = tl.exp2(maximum - level)
        total = total * decay + tl.sum(weight, axis=1)
        result = result * decay[:, None]
        result = tl.dot(weight.to(q.dtype), v, result, input_precision=PRECISION)
        maximum = larger
    return maximum, total, result


# One compilation for any batch: neither counts nor where a slice begins may decide.
@triton.jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "query_start_ptr", "context_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_box,
    v_box,
    table_ptr,
    query_start_ptr,
    context_ptr,
    out_ptr,
    rows,
    scale,
    soft_cap,
    q_token_stride,
    q_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WIDE: tl.constexpr,
    BOXES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # The last tiles of a row see the most: they start first, so that the short ones fill the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Row r owns ceil(its queries / QUERIES) tiles at most: those from this bound on.
    origin = tl.load(query_start_ptr)
    low = kv_head * 0  # a tensor, whether the loop runs or not
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = (tl.load(query_start_ptr + middle) - origin) // QUERIES + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    row = low
    start = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - start
    first = (tile - (start - origin) // QUERIES - row) * QUERIES
    if first >= queries:
        return
    context = tl.load(context_ptr + row)
    prefix = context - queries

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = first + m // GROUP
    own = ((query < queries) & (m < QUERIES * GROUP))[:, None] & (d < DIM)[None, :]
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    at = token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    q = tl.load(q_ptr + at, mask=own, other=0.0)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    position = prefix + query
    begin = 0
    whole = (prefix + first + 1) // BLOCK_N * BLOCK_N
    end = prefix + tl.minimum(first + QUERIES, queries)
    table = table_ptr + row.to(tl.int64) * table_stride
    if WINDOW > 0:
        begin = tl.maximum(prefix + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = begin
    else:
        maximum, total, result = _attend(
            q, maximum, total, result, k_ptr, v_ptr, k_box, v_box, table, kv_head * DIM,
            position, begin, whole, scale, soft_cap, KV_HEADS * DIM, DIM, BLOCK_D, BLOCK_N,
            PAGE, WINDOW, SOFT_CAP, False, WIDE, BOXES, PRECISION, STAGES,
        )  # fmt: skip
    maximum, total, result = _attend(
        q, maximum, total, result, k_ptr, v_ptr, k_box, v_box, table, kv_head * DIM,
        position, whole, end, scale, soft_cap, KV_HEADS * DIM, DIM, BLOCK_D, BLOCK_N,
        PAGE, WINDOW, SOFT_CAP, True, WIDE, BOXES, PRECISION, STAGES,
    )  # fmt: skip
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    there = token[:, None] * (KV_HEADS * GROUP * DIM) + head[:, None] * DIM + d[None, :]
    tl.store(out_ptr + there, result.to(out_ptr.dtype.element_ty), mask=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """How a launch is cut: the tuning knobs that `benchmarks/kernels.py` turns."""

    queries: int
    """Rows of the matrix products: queries times the heads of a group."""
    keys: int
    warps: int
    stages: int
    boxes: bool = False
    """Whether the tensor memory accelerator loads whole tiles, if a block holds one."""


def prefill_tile(group: int, head_dim: int, itemsize: int) -> PrefillTile:
    """The tile for a model, by how much of a tile fits into shared memory and registers."""
    if itemsize > 2:
        return PrefillTile(
            queries=max(32, triton.next_power_of_2(group)), keys=32, warps=4, stages=1
        )
    rows = max(128, triton.next_power_of_2(group))
    if head_dim > 128:
        return PrefillTile(queries=rows, keys=64, warps=8, stages=2, boxes=True)
    return PrefillTile(queries=rows, keys=64, warps=4, stages=3, boxes=True)


def prefill_attention(
    q_TND: torch.Tensor,
    kv: KVLayer,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_tokens: int,
    out: torch.Tensor,
    tile: PrefillTile | None = None,
) -> torch.Tensor:
    """Causal attention of rows with any number of new tokens over their paged context.

    Args:
        q_TND: [T, N, D] queries of the whole step, last dimension contiguous.
        kv: the layer's cache, contiguous.
        block_tables: [P, B] int32 of these rows.
        query_start: [P+1] int32, first tokens of these rows, counted within `q_TND`.
        context_lens: [P] int32.
        scale, sliding_window, soft_cap: as in `kernels.attention.paged_attention`.
        num_tokens: a bound on the tokens of these rows, known to the host.
        out: [T, N, D], contiguous; the rows' tokens are written.
        tile: overrides the choice of `prefill_tile`.

    Returns:
        `out`.
    """
    rows = context_lens.shape[0]
    if rows == 0 or num_tokens == 0:
        return out
    _, heads, dim = q_TND.shape
    _, page, kv_heads, _ = kv.k.shape
    group = heads // kv_heads
    if tile is None:
        tile = prefill_tile(group, dim, q_TND.element_size())
    boxed = tile.boxes and page % tile.keys == 0 and dim == triton.next_power_of_2(dim)
    boxes = [_box(cache, tile.keys) if boxed else cache for cache in kv]
    tiles = num_tokens // (tile.queries // group) + rows
    _prefill_kernel[(kv_heads, tiles)](
        q_TND,
        kv.k,
        kv.v,
        boxes[0],
        boxes[1],
        block_tables,
        query_start,
        context_lens,
        out,
        rows,
        scale * 1.4426950408889634,
        soft_cap or 1.0,
        q_TND.stride(0),
        q_TND.stride(1),
        block_tables.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        PAGE=page,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap is not None,
        WIDE=kv.k.numel() >= 2**31,
        BOXES=boxed,
        PRECISION="ieee" if q_TND.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def _box(cache: torch.Tensor, keys: int) -> TensorDescriptor:
    """The cache as rows of all heads, cut into boxes of `keys` rows and one head."""
    blocks, page, kv_heads, dim = cache.shape
    shape = [blocks * page, kv_heads * dim]
    return TensorDescriptor(cache, shape, [shape[1], 1], [keys, dim])
