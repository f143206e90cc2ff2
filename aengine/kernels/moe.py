"""Mixture of experts: routing and the experts' feed-forward, in plain torch.

Shape legend: T tokens, E experts, A experts a token ("active"), K hidden size, I expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from aengine.kernels.activation import gated_activation

if TYPE_CHECKING:
    from aengine.kernels.activation import Activation


class Routing(NamedTuple):
    """Which experts each token goes to, and with which weights."""

    weights_TA: torch.Tensor
    experts_TA: torch.Tensor


def route(logits_TE: torch.Tensor, active: int, *, normalise: bool) -> Routing:
    """The `active` most probable experts of each token.

    Args:
        logits_TE: [T, E] router logits.
        active: experts a token.
        normalise: whether the chosen probabilities are scaled to sum to one.

    Returns:
        float32 weights and int64 expert ids, [T, A] each, most probable first.
    """
    weights, experts = logits_TE.float().softmax(-1).topk(active, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights, experts)


def moe_mlp(
    x_TK: torch.Tensor,
    gate_up_EJK: torch.Tensor,
    down_EKI: torch.Tensor,
    routing: Routing,
    activation: Activation,
) -> torch.Tensor:
    """Sum of each token's experts, weighted.

    Args:
        x_TK: [T, K] hidden states.
        gate_up_EJK: [E, 2*I, K] merged gate and up projections.
        down_EKI: [E, K, I] down projections.
        routing: of `route`.
        activation: as in `aengine.kernels.activation.gated_activation`.

    Returns:
        [T, K] in the dtype of `x_TK`; the sum is taken in float32.
    """
    total = torch.zeros(x_TK.shape, dtype=torch.float32, device=x_TK.device)
    for expert in range(gate_up_EJK.shape[0]):
        tokens, rank = torch.nonzero(routing.experts_TA == expert, as_tuple=True)
        if tokens.numel() == 0:
            continue
        inner = gated_activation(x_TK[tokens] @ gate_up_EJK[expert].T, activation)
        outer = (inner @ down_EKI[expert].T).float()
        total.index_add_(0, tokens, outer * routing.weights_TA[tokens, rank].unsqueeze(1))
    return total.to(x_TK.dtype)
