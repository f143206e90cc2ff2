"""A random paged batch and a float64 attention written as loops: the oracle of attention tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aengine.kernels.attention import KVLayer

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(kw_only=True)
class PagedCase:
    """Inputs of `paged_attention`; unused slots hold NaN and unused table entries a bad block."""

    q_TND: torch.Tensor
    kv: KVLayer
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    num_decode: int

    def arguments(self) -> dict[str, object]:
        """What `paged_attention` takes by keyword besides scale and the optional parts."""
        lens = self.query_start.diff()
        return {
            "num_decode": self.num_decode,
            "max_query_len": int(lens.max()),
            "max_context_len": int(self.context_lens.max()),
        }


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedCase:
    """Rows with scattered blocks in a poisoned cache. Leading rows of one query are decode rows."""
    rng = torch.Generator().manual_seed(seed)
    rows = len(query_lens)
    needed = [math.ceil(context / block_size) for context in context_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks - 1, generator=rng).add(1).tolist()
    shape = (num_blocks, block_size, kv_heads, dim)
    kv = KVLayer(*(torch.full(shape, math.nan, dtype=dtype) for _ in range(2)))
    tables = torch.zeros(rows, max(needed) + 1, dtype=torch.int32)
    for row, context in enumerate(context_lens):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(context):
            for cache in kv:
                value = torch.randn(kv_heads, dim, generator=rng)
                cache[blocks[position // block_size], position % block_size] = value.to(dtype)
    num_decode = 0
    while num_decode < rows and query_lens[num_decode] == 1:
        num_decode += 1
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return PagedCase(
        q_TND=torch.randn(sum(query_lens), heads, dim, generator=rng).to(dtype),
        kv=kv,
        block_tables=tables,
        query_start=starts,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        num_decode=num_decode,
    )


def naive_attention(
    case: PagedCase,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """[T, N, D] float64, one query and one head at a time, straight from the definition."""
    heads, kv_heads = case.q_TND.shape[1], case.kv.k.shape[2]
    block_size = case.kv.k.shape[1]
    out = torch.zeros(case.q_TND.shape, dtype=torch.float64)
    starts = case.query_start.tolist()
    for row, context in enumerate(case.context_lens.tolist()):
        count = starts[row + 1] - starts[row]
        for offset in range(count):
            token, position = starts[row] + offset, context - count + offset
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = range(first, position + 1)
            at = [(case.block_tables[row, p // block_size], p % block_size) for p in seen]
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                query = case.q_TND[token, head].double()
                keys = torch.stack([case.kv.k[b, o, kv_head].double() for b, o in at])
                values = torch.stack([case.kv.v[b, o, kv_head].double() for b, o in at])
                scores = keys @ query * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[token, head] = scores.softmax(0) @ values
    return out
