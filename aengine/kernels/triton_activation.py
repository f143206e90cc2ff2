"""The gated activations of feed-forward layers on the GPU. Twin: `kernels.activation`."""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from aengine.kernels.activation import Activation

_BLOCK = 1024


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """`activation(gate) * up` of float32 values; for other kernels to call."""
    if ACTIVATION == "silu":
        active = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z); the constant is 2 * sqrt(2 / pi).
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return active * up


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    out_ptr,
    in_stride,
    out_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    here = gate_up_ptr + row * in_stride + column
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = activate(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, result, mask=inside)


def gated_activation(
    gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`activation(gate) * up` of a merged projection.

    Args:
        gate_up: [T, 2*I]: the gate's columns, then those of the other half; rows contiguous.
        activation: "silu" (SwiGLU), "gelu_tanh" (Gemma) or "gelu" (exact).
        out: [T, I] to write to, if given; rows contiguous.

    Returns:
        [T, I] in the dtype of `gate_up`; computed in float32.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    # Rows are the second grid axis, which ends at 65,535.
    for first in range(0, rows, 65_535):
        part = gate_up[first : first + 65_535]
        _gated_kernel[(triton.cdiv(width, _BLOCK), part.shape[0])](
            part,
            out[first : first + 65_535],
            gate_up.stride(0),
            out.stride(0),
            WIDTH=width,
            ACTIVATION=activation,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
