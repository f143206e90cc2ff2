"""Paged attention of a whole step on the GPU: decode rows and prefill rows, each by its kernel.

Twin: `kernels.attention.paged_attention`, whose rules about stale table entries and padding rows
hold here too. Head dimensions of 16 to 256, any block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aengine.kernels.triton_decode import decode_attention
from aengine.kernels.triton_prefill import prefill_attention

if TYPE_CHECKING:
    from aengine.kernels.attention import KVLayer
    from aengine.kernels.triton_decode import DecodeWorkspace


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
    workspace: DecodeWorkspace,
) -> torch.Tensor:
    """Causal attention of each row's new tokens over its paged context; asks the device nothing.

    Args:
        q_TND: [T, N, D] queries, last dimension contiguous.
        kv: the layer's cache; this step's own keys and values are already in it.
        block_tables: [R, B] int32 block ids; entries behind a row's context are not read.
        query_start: [R+1] int32, the rows' first tokens; the first `num_decode` rows have one each.
        context_lens: [R] int32, tokens of the row in the cache, this step's own included.
        scale, sliding_window, soft_cap: as in the twin.
        num_decode, max_query_len, max_context_len: the host-known facts of `ForwardBatch`.
        workspace: of this lane, for at least `num_decode` rows.

    Returns:
        [T, N, D], contiguous, in the dtype of `q_TND`.
    """
    del max_query_len  # the launch is cut by the sum of the lengths, which is tighter
    out = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    if num_decode:
        decode_attention(
            q_TND[:num_decode],
            kv,
            block_tables[:num_decode],
            context_lens[:num_decode],
            scale,
            workspace,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            max_context_len=max_context_len,
            out=out[:num_decode],
        )
    if num_decode < context_lens.shape[0]:
        prefill_attention(
            q_TND,
            kv,
            block_tables[num_decode:],
            query_start[num_decode:],
            context_lens[num_decode:],
            scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            # A bound that holds too where decode rows that pad share their places with chunks.
            num_tokens=q_TND.shape[0],
            out=out,
        )
    return out
