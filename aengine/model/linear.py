"""`Linear`: a projection as a plain object around its weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from aengine.kernels.activation import Activation
    from aengine.kernels.ops import Ops


class Linear:
    """`x @ weight.T + bias`, weight [outputs, inputs] as checkpoints store it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[T, inputs] -> [T, outputs]."""
        out = ops.linear(x, self.weight)
        return out if self.bias is None else out.add_(self.bias)

    def gated(self, x: torch.Tensor, activation: Activation, ops: Ops) -> torch.Tensor:
        """`activation(gate) * up`, if this is both of them merged: [T, inputs] -> [T, outputs/2]"""
        if self.bias is None:
            return ops.gated_linear(x, self.weight, activation)
        return ops.gated_activation(self(x, ops), activation)
