"""RMS normalisation, alone and fused with the residual sum, in plain torch.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormResult(NamedTuple):
    """What `add_rms_norm` gives: the normalised sum, and the sum itself for the next residual."""

    hidden: torch.Tensor
    residual: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to unit root mean square, then by `weight`.

    Args:
        x: [..., K] of any float dtype, last dimension contiguous.
        weight: [K], any float dtype (models keep it in float32).
        eps: added to the mean square.

    Returns:
        [..., K] in the dtype of `x`; computed in float32 and rounded once.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> NormResult:
    """`residual + x`, and its RMS norm.

    Args:
        x: [T, K], what the last sublayer gave.
        residual: [T, K] of the same dtype, the sum so far. A kernel may write over both.
        weight, eps: as in `rms_norm`.

    Returns:
        The norm (taken of the sum before it is rounded) and the sum, both in the dtype of `x`.
    """
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    hidden = (total * scale * weight.float()).to(x.dtype)
    return NormResult(hidden, total.to(x.dtype))
