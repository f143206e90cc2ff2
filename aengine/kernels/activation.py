"""The gated activations of feed-forward layers, in plain torch.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch

Activation = Literal["silu", "gelu_tanh", "gelu"]


def gated_activation(
    gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`activation(gate) * up` of a merged projection.

    Args:
        gate_up: [T, 2*I]: the gate's columns, then those of the other half.
        activation: "silu" (SwiGLU), "gelu_tanh" (Gemma) or "gelu" (exact).
        out: [T, I] to write to, if given.

    Returns:
        [T, I] in the dtype of `gate_up`; computed in float32.
    """
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    result = (gate * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)
