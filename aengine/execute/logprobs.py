"""Log-probabilities of sampled and of prompt tokens, from the model's unmodified logits.

They are "raw": log_softmax of what the model said, before temperature, penalties, masks and
truncation (vLLM's default, `raw_logprobs`; a grammar's mask does not show in them either). So they
compare between requests, and a forbidden token can be among the top ones.

Shape legend: L rows with log-probabilities, K most likely tokens, T prompt positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aengine.batch import TokenLogprobs
from aengine.kernels.sampling import log_normaliser

if TYPE_CHECKING:
    from collections.abc import Sequence

_SLICE = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobTensors:
    """Log-probabilities of L tokens. `rank` 1 is the most likely token; ties share the better."""

    token_ids_L: torch.Tensor
    logprobs_L: torch.Tensor
    ranks_L: torch.Tensor
    top_ids_LK: torch.Tensor
    top_logprobs_LK: torch.Tensor

    def start_copy(self) -> LogprobTensors:
        """The same on the host; readable once the stream has passed this point."""
        return LogprobTensors(
            token_ids_L=start_host_copy(self.token_ids_L),
            logprobs_L=start_host_copy(self.logprobs_L),
            ranks_L=start_host_copy(self.ranks_L),
            top_ids_LK=start_host_copy(self.top_ids_LK),
            top_logprobs_LK=start_host_copy(self.top_logprobs_LK),
        )

    def read(self, num_top: Sequence[int] | None = None) -> list[TokenLogprobs]:
        """Host records, one a token. Only for host tensors whose copy is done.

        Args:
            num_top: how many of the K top tokens each record keeps; all K if None.
        """
        top_ids, top_logprobs = self.top_ids_LK.tolist(), self.top_logprobs_LK.tolist()
        records = []
        for i, (token, logprob, rank) in enumerate(
            zip(
                self.token_ids_L.tolist(),
                self.logprobs_L.tolist(),
                self.ranks_L.tolist(),
                strict=True,
            )
        ):
            top = zip(top_ids[i], top_logprobs[i], strict=True)
            kept = tuple(top) if num_top is None else tuple(top)[: num_top[i]]
            records.append(TokenLogprobs(token_id=token, logprob=logprob, rank=rank, top=kept))
        return records


def start_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy that never waits: pinned memory, filled once the stream has passed this point."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def token_logprobs(
    logits_LV: torch.Tensor, token_ids_L: torch.Tensor, num_top: int
) -> LogprobTensors:
    """Log-probability and rank of one token a row, and the `num_top` most likely ones (0: none).

    Each row's numbers are the same whatever the other rows are. The logits are only read.
    """
    chosen_L1 = logits_LV.gather(1, token_ids_L.unsqueeze(1))
    normaliser_L1 = log_normaliser(logits_LV).unsqueeze(1)
    top_LK = logits_LV.topk(min(num_top, logits_LV.shape[1]), dim=-1)
    return LogprobTensors(
        token_ids_L=token_ids_L,
        logprobs_L=(chosen_L1 - normaliser_L1).float().squeeze(1),
        ranks_L=(logits_LV > chosen_L1).sum(dim=-1) + 1,
        top_ids_LK=top_LK.indices,
        top_logprobs_LK=(top_LK.values - normaliser_L1).float(),
    )


def prompt_logprobs(
    logits_TV: torch.Tensor, next_token_ids_T: torch.Tensor, num_top: int
) -> LogprobTensors:
    """Log-probabilities of a prompt's (chunk's) tokens given those before them.

    Row t of the logits was computed at some position, `next_token_ids_T[t]` (int64) is the prompt's
    token at the position after it; the first token of a prompt has no log-probability. Works a
    slice of rows at a time, so that the temporaries stay small however long the prompt is.
    """
    parts = [
        token_logprobs(logits_SV, ids_S, num_top)
        for logits_SV, ids_S in zip(
            torch.split(logits_TV, _SLICE), torch.split(next_token_ids_T, _SLICE), strict=True
        )
    ]
    if len(parts) == 1:
        return parts[0]
    return LogprobTensors(
        token_ids_L=next_token_ids_T,
        logprobs_L=torch.cat([p.logprobs_L for p in parts]),
        ranks_L=torch.cat([p.ranks_L for p in parts]),
        top_ids_LK=torch.cat([p.top_ids_LK for p in parts]),
        top_logprobs_LK=torch.cat([p.top_logprobs_LK for p in parts]),
    )
