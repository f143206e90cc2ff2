"""Forward batches written by hand, and caches for them."""

from __future__ import annotations

import torch

from aengine.kernels.attention import KVLayer
from aengine.model.batch import ForwardBatch

BLOCK = 4


def make_cache(
    layers: int, kv_heads: int, dim: int, *, blocks: int = 13, device: str = "cpu"
) -> list[KVLayer]:
    """A cache of zeros; block 0 belongs to padding rows."""
    shape = (blocks, BLOCK, kv_heads, dim)
    return [
        KVLayer(torch.zeros(shape, device=device), torch.zeros(shape, device=device))
        for _ in range(layers)
    ]


def make_batch(
    rows: list[tuple[int, int]], num_decode: int, tables: list[list[int]], *, device: str = "cpu"
) -> ForwardBatch:
    """Rows of (start, length). Token ids below 50 follow from the position alone, so that rows
    which end at the same place have the same logits there."""
    table = torch.tensor(tables, dtype=torch.int32)
    positions = [start + i for start, length in rows for i in range(length)]
    owners = [row for row, (_, length) in enumerate(rows) for _ in range(length)]
    pairs = list(zip(owners, positions, strict=True))
    slots = [int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in pairs]
    bounds = torch.tensor([0, *(length for _, length in rows)]).cumsum(0)
    context = [start + length for start, length in rows]
    return ForwardBatch(
        token_ids=torch.tensor([(17 * p + 5) % 50 for p in positions], device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        query_start=bounds.int().to(device),
        context_lens=torch.tensor(context, dtype=torch.int32, device=device),
        block_tables=table.to(device),
        logit_index=(bounds[1:] - 1).to(device),
        num_decode=num_decode,
        max_query_len=max(length for _, length in rows),
        max_context_len=max(context),
    )
