"""The stateless operators of a model as one value, so that a device picks its set in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F

from aengine.kernels import activation, moe, norm

if TYPE_CHECKING:
    import torch

    from aengine.kernels.activation import Activation
    from aengine.kernels.moe import Routing
    from aengine.kernels.norm import NormResult


class RmsNorm(Protocol):
    """As `aengine.kernels.norm.rms_norm`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    """As `aengine.kernels.norm.add_rms_norm`."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> NormResult: ...


class GatedActivation(Protocol):
    """As `aengine.kernels.activation.gated_activation`."""

    def __call__(self, gate_up: torch.Tensor, activation: Activation, /) -> torch.Tensor: ...


class Linear(Protocol):
    """`x @ weight.T`, [T, K] and [J, K] to [T, J], in the dtype of `x` or the one asked for."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...


class GatedLinear(Protocol):
    """`activation(gate) * up` of a merged projection, weight [2*I, K]: the gate's rows first."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, activation: Activation, /
    ) -> torch.Tensor: ...


class MoeMlp(Protocol):
    """As `aengine.kernels.moe.moe_mlp`."""

    def __call__(
        self,
        x_TK: torch.Tensor,
        gate_up_EJK: torch.Tensor,
        down_EKI: torch.Tensor,
        routing: Routing,
        activation: Activation,
        /,
    ) -> torch.Tensor: ...


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See `Linear`: torch's matrix product."""
    out = F.linear(x, weight)
    return out if dtype is None else out.to(dtype)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, act: Activation) -> torch.Tensor:
    """See `GatedLinear`."""
    return activation.gated_activation(F.linear(x, weight), act)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Implementations that a model's layers call; each has the signature of its torch twin."""

    rms_norm: RmsNorm = norm.rms_norm
    add_rms_norm: AddRmsNorm = norm.add_rms_norm
    linear: Linear = linear
    gated_linear: GatedLinear = gated_linear
    gated_activation: GatedActivation = activation.gated_activation
    moe_mlp: MoeMlp = moe.moe_mlp
