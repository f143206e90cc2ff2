"""`ForwardBatch`: the tensors of one step, as the model sees them.

Shape legend: T tokens of the step, R rows (sequences), S rows of which logits are wanted,
B blocks in the widest row's table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """Inputs of one forward. Built for one step and never written again.

    Row r owns the tokens `query_start[r] .. query_start[r+1]-1`; the first `num_decode` rows have
    exactly one token each. `context_lens` counts tokens in KV after this step's own are written.
    """

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64."""
    slot_mapping: torch.Tensor
    """[T] int64: block id * block size + offset where the token's KV is written."""
    query_start: torch.Tensor
    """[R+1] int32."""
    context_lens: torch.Tensor
    """[R] int32."""
    block_tables: torch.Tensor
    """[R, B] int32."""
    logit_index: torch.Tensor | None
    """[S] int64: indices into T of the tokens whose logits are wanted; None: all of them."""
    num_decode: int
    """Rows 0 .. num_decode-1 are decode rows."""
    max_query_len: int
    max_context_len: int
    """The two host-known maxima, so that no kernel launch needs the device's answer."""
