"""RMS normalisation on the GPU, alone and fused with the residual sum. Twin: `kernels.norm`.

A program takes a few whole rows, so that each element is read once and the mean never leaves it.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aengine.kernels.norm import NormResult

if TYPE_CHECKING:
    from collections.abc import Sequence

_ELEMENTS = 4096
"""What one program holds at least, so that short rows (the norm of a head) share a program."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    inner_rows,
    outer_stride,
    inner_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    start = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    result = x * scale[:, None] * weight[None, :]
    out = out_ptr + row[:, None] * WIDTH + column[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    hidden_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    total = x + old.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / WIDTH + eps)
    here = row * WIDTH + column
    tl.store(sum_ptr + here, total.to(sum_ptr.dtype.element_ty), mask=inside)
    hidden = total * scale * weight
    tl.store(hidden_ptr + here, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to unit root mean square, then by `weight`.

    Args:
        x: [..., K] of up to three dimensions with any strides, last dimension contiguous.
        weight: [K], any float dtype, contiguous.
        eps: added to the mean square.

    Returns:
        [..., K], contiguous, in the dtype of `x`; computed in float32 and rounded once.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return out
    inner_rows, outer_stride, inner_stride = _row_strides(x.shape, x.stride())
    block = triton.next_power_of_2(width)
    per_program = max(1, _ELEMENTS // block) if x.dim() == 3 else 1
    _rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        x,
        weight,
        out,
        rows,
        inner_rows,
        outer_stride,
        inner_stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=per_program,
        num_warps=_warps(block * per_program),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> NormResult:
    """`residual + x`, and its RMS norm, in one pass.

    Args:
        x: [T, K], what the last sublayer gave; last dimension contiguous.
        residual: [T, K] of the same dtype, the sum so far. The new sum is written over it if it is
            contiguous.
        weight, eps: as in `rms_norm`.

    Returns:
        The norm (taken of the sum before it is rounded) and the sum, both in the dtype of `x`.
    """
    rows, width = x.shape
    hidden = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = residual if residual.is_contiguous() else torch.empty_like(hidden)
    if rows == 0:
        return NormResult(hidden, total)
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        hidden,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return NormResult(hidden, total)


def _row_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """How many rows lie in a group, the step from group to group and from row to row."""
    if len(shape) == 1:
        return 1, 0, 0
    if len(shape) == 2:
        return 1, strides[0], 0
    return shape[1], strides[0], strides[1]


def _warps(elements: int) -> int:
    return min(16, max(1, elements // 512))
