"""Attention over paged keys and values, in plain torch: the CPU path and the kernels' oracle.

Shape legend: T tokens of the step, N query heads, H key/value heads (N is a multiple of H),
D head dimension, R rows, B blocks of the widest table, P rows of one group, Q queries a row,
C context positions.

A row's queries are its last `query_start[r+1] - query_start[r]` positions; each sees the row's
prefix and itself (causal), within the window if there is one. Positions outside a row's context
are never read: neither a stale block id in a table nor a NaN in an unused slot can reach a result.
Rows of context 0 (padding of a captured graph) give unspecified values and disturb no other row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

_QUERIES_AT_ONCE = 256
"""Longer rows go in pieces, so that a piece reads only the context that causality lets it see."""

_GATHER_ELEMENTS = 1 << 25
"""Bound of the copied keys (and values) of one group of decode rows."""


class KVLayer(NamedTuple):
    """The keys and values of one layer, in blocks that any row may own.

    `k` and `v`: [num_blocks, block_size, H, D], contiguous. One pair of tensors a layer: a stacked
    cache made a compiled step several times slower on CPUs.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Rows that are computed in one call: where their queries, keys and values lie."""

    start: int
    """First token of the group; its tokens are `start .. start + P*Q - 1`, row by row."""
    rows: int
    queries: int
    slots: torch.Tensor
    """[P*C] int64: slots of the positions read; those outside a row's context repeat its last."""
    mask: torch.Tensor
    """[P, 1, Q, C] of the compute dtype: 0 where a query may look, -inf where not."""


def write_kv(
    k_THD: torch.Tensor, v_THD: torch.Tensor, kv: KVLayer, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value at its slot, in place.

    Args:
        k_THD, v_THD: [T, H, D], strides free.
        kv: the layer's cache; values are converted to its dtype.
        slot_mapping: [T] int64, block id * block size + offset. Tokens that share a slot
            (padding) leave any one of their values there.
    """
    for cache, new in ((kv.k, k_THD), (kv.v, v_THD)):
        flat = cache.view(-1, cache.shape[2], cache.shape[3])
        flat.index_copy_(0, slot_mapping, new.to(cache.dtype))


def paged_attention(
    q_TND: torch.Tensor,
    kv: KVLayer,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_decode: int,
    max_query_len: int,
    max_context_len: int,
) -> torch.Tensor:
    """Causal attention of each row's new tokens over its paged context.

    Args:
        q_TND: [T, N, D] queries, strides free.
        kv: the layer's cache; this step's own keys and values are already in it.
        block_tables: [R, B] int32 block ids; entries behind a row's context are not read.
        query_start: [R+1] int32, the rows' first tokens; the first `num_decode` rows have one each.
        context_lens: [R] int32, tokens of the row in the cache, this step's own included.
        scale: factor of the products q.k.
        sliding_window: a query at position p sees positions p - sliding_window + 1 .. p.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap) before masking (Gemma 2).
        num_decode, max_query_len, max_context_len: the host-known facts of `ForwardBatch`.

    Returns:
        [T, N, D], contiguous, in the dtype of `q_TND`.
    """
    del max_query_len  # a bound for launch grids; this twin reads the row lengths themselves
    plan = plan_attention(
        block_tables,
        query_start,
        context_lens,
        block_size=kv.k.shape[1],
        elements_a_position=kv.k.shape[2] * kv.k.shape[3],
        dtype=q_TND.dtype,
        sliding_window=sliding_window,
        num_decode=num_decode,
        max_context_len=max_context_len,
    )
    return run_attention(q_TND, kv, plan, scale, soft_cap=soft_cap)


def plan_attention(
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    block_size: int,
    elements_a_position: int,
    dtype: torch.dtype,
    sliding_window: int | None,
    num_decode: int,
    max_context_len: int,
) -> list[AttentionGroup]:
    """The part of `paged_attention` that all layers with the same window share."""
    groups = []
    at_once = max(1, _GATHER_ELEMENTS // max(1, max_context_len * elements_a_position))
    for first in range(0, num_decode, at_once):
        rows = slice(first, min(first + at_once, num_decode))
        groups.append(
            _group(
                first,
                block_tables[rows],
                context_lens[rows],
                queries=1,
                longest=max_context_len,
                block_size=block_size,
                dtype=dtype,
                window=sliding_window,
            )
        )
    if num_decode == context_lens.shape[0]:
        return groups
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for row in range(num_decode, len(contexts)):
        for first in range(starts[row], starts[row + 1], _QUERIES_AT_ONCE):
            queries = min(_QUERIES_AT_ONCE, starts[row + 1] - first)
            context = contexts[row] - (starts[row + 1] - first - queries)
            groups.append(
                _group(
                    first,
                    block_tables[row : row + 1],
                    torch.full_like(context_lens[:1], context),
                    queries=queries,
                    longest=context,
                    block_size=block_size,
                    dtype=dtype,
                    window=sliding_window,
                )
            )
    return groups


def _group(
    start: int,
    tables: torch.Tensor,
    contexts: torch.Tensor,
    *,
    queries: int,
    longest: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> AttentionGroup:
    device = contexts.device
    ends = contexts.long().unsqueeze(1)
    if window is None or window + queries - 1 >= longest:
        firsts = torch.zeros_like(ends)
        span = max(longest, 1)
    else:
        span = window + queries - 1
        firsts = (ends - span).clamp_min(0)
    positions = firsts + torch.arange(span, device=device)
    # A position behind the context repeats the last valid one: masked, and never a NaN.
    readable = torch.minimum(positions, ends - 1).clamp_min(0)
    blocks = tables.long().gather(1, readable // block_size)
    slots = (blocks * block_size + readable % block_size).flatten()
    query_positions = (ends - queries + torch.arange(queries, device=device)).unsqueeze(-1)
    hidden = positions.unsqueeze(1) > query_positions
    if window is not None:
        hidden |= positions.unsqueeze(1) <= query_positions - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    return AttentionGroup(start, tables.shape[0], queries, slots, mask.unsqueeze(1))


def run_attention(
    q_TND: torch.Tensor,
    kv: KVLayer,
    plan: list[AttentionGroup],
    scale: float,
    *,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one layer along a plan: `paged_attention` without its index arithmetic."""
    _, heads, dim = q_TND.shape
    kv_heads = kv.k.shape[2]
    out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    for group in plan:
        rows, queries = group.rows, group.queries
        tokens = slice(group.start, group.start + rows * queries)
        q = q_TND[tokens].reshape(rows, queries, heads, dim).transpose(1, 2)
        k, v = (
            cache.view(-1, kv_heads * dim)
            .index_select(0, group.slots)
            .view(rows, -1, kv_heads, dim)
            .transpose(1, 2)
            .to(q.dtype)
            for cache in kv
        )
        if queries == 1:  # the heads of a group become the queries of one key head
            q = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        if soft_cap is None:
            grouped = q.shape[1] != kv_heads
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=group.mask, scale=scale, enable_gqa=grouped
            )
        else:
            out = _capped(q, k, v, group.mask, scale, soft_cap)
        out = out.reshape(rows, heads, queries, dim).transpose(1, 2)
        out_TND[tokens].view(rows, queries, heads, dim).copy_(out)
    return out_TND


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    rows, kv_heads, _, dim = k.shape
    packed = q.reshape(rows, kv_heads, -1, q.shape[2], dim)
    scores = (packed @ k.unsqueeze(2).transpose(-1, -2)).float() * scale
    scores = soft_cap * torch.tanh(scores / soft_cap) + mask.unsqueeze(2)
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ v.unsqueeze(2)).reshape(q.shape)
