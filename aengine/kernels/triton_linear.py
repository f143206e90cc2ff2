"""Projections of few rows on the GPU: bound by reading the weights, so made to stream them.

cuBLAS reaches 60 to 90 % of the memory's rate with a handful of rows (measured in Llama-3.1-8B's
shapes). Here each program owns a few outputs and the whole sum behind them: no partial results, no
second kernel, and for a gated layer the activation is applied before anything is stored.

Shape legend: R rows (at most `MOST_ROWS`), K inputs, J outputs.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from aengine.kernels.triton_activation import activate, gated_activation

if TYPE_CHECKING:
    from aengine.kernels.activation import Activation

MOST_ROWS = 32
"""Above this the matrix product has work enough for cuBLAS."""


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    outputs,
    x_stride,
    out_stride,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`BLOCK_J` outputs of all rows by matrix products; with an activation, as many pairs."""
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + j.to(tl.int64)[:, None] * K + k[None, :]
    others = weights + outputs.to(tl.int64) * K
    inputs = x_ptr + r.to(tl.int64)[None, :] * x_stride + k[:, None]
    real = (j < outputs)[:, None]
    row = (r < rows)[None, :]
    total = tl.zeros([BLOCK_J, BLOCK_R], tl.float32)
    other = tl.zeros([BLOCK_J, BLOCK_R], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k < K - start
        x = tl.load(inputs + start, mask=row & inside[:, None], other=0.0)
        w = tl.load(
            weights + start, mask=real & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        total = tl.dot(w, x, total, input_precision=PRECISION)
        if ACTIVATION != "none":
            w = tl.load(
                others + start,
                mask=real & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            other = tl.dot(w, x, other, input_precision=PRECISION)
    if ACTIVATION != "none":
        # Rounded in between as a stored projection would be: the same numbers as unfused.
        gate = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = other.to(out_ptr.dtype.element_ty).to(tl.float32)
        total = activate(gate, up, ACTIVATION)
    there = out_ptr + r.to(tl.int64)[None, :] * out_stride + j[:, None]
    tl.store(there, total.to(out_ptr.dtype.element_ty), mask=real & row)


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    outputs,
    K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """`BLOCK_J` outputs of one row by plain sums: no tile of padding rows, no shared memory."""
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + j.to(tl.int64)[:, None] * K + k[None, :]
    others = weights + outputs.to(tl.int64) * K
    real = (j < outputs)[:, None]
    total = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    other = tl.zeros([BLOCK_J, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        w = tl.load(
            weights + start, mask=real & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        total += w.to(tl.float32) * x
        if ACTIVATION != "none":
            w = tl.load(
                others + start,
                mask=real & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            other += w.to(tl.float32) * x
    result = tl.sum(total, axis=1)
    if ACTIVATION != "none":
        gate = result.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = tl.sum(other, axis=1).to(out_ptr.dtype.element_ty).to(tl.float32)
        result = activate(gate, up, ACTIVATION)
    tl.store(out_ptr + j, result.to(out_ptr.dtype.element_ty), mask=j < outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """How a launch is cut: the tuning knobs that `benchmarks/linear.py` turns."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    plain: bool = False
    """Sums instead of matrix products; for one row."""


def linear_tile(rows: int, inputs: int, outputs: int, gated: bool) -> LinearTile | None:
    """The tile for a launch; None: cuBLAS is at least as fast (measured)."""
    if rows == 1:
        return LinearTile(outputs=1, inputs=2048, warps=8, plain=True)
    if rows > MOST_ROWS or inputs > 8192:
        return None
    if gated or outputs > 65_536:
        return LinearTile(outputs=64, inputs=128, warps=4, stages=4)
    return LinearTile(outputs=64, inputs=256, warps=4, stages=4)


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`x @ weight.T`; see `kernels.ops.Linear`."""
    tile = _tile(x, weight, False)
    if tile is None:
        out = F.linear(x, weight)
        return out if dtype is None else out.to(dtype)
    return few_rows_linear(x, weight, tile=tile, dtype=dtype)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`activation(gate) * up`; see `kernels.ops.GatedLinear`."""
    tile = _tile(x, weight, True)
    if tile is None:
        return gated_activation(F.linear(x, weight), activation)
    return few_rows_linear(x, weight, activation, tile=tile)


def _tile(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> LinearTile | None:
    # Float32 is for exactness, and its tiles would be twice as large.
    if x.dtype == torch.float32 or not weight.is_contiguous():
        return None
    return linear_tile(x.shape[0], x.shape[1], weight.shape[0], gated)


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: Activation | None = None,
    *,
    tile: LinearTile,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ weight.T`, or with an activation `activation(gate) * up` of a merged projection.

    Args:
        x: [R, K], rows contiguous, at most `MOST_ROWS`.
        weight: [J, K] contiguous, or [2*J, K]: the gate's rows, then those of the other half.
        activation: "silu", "gelu_tanh" or "gelu"; None: a plain projection.
        tile: how to cut it.
        dtype: of the result; None: that of `x`.

    Returns:
        [R, J], summed in float32.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    grid = (triton.cdiv(outputs, tile.outputs),)
    block_k = min(tile.inputs, triton.next_power_of_2(inputs))
    if tile.plain:
        _one_row_kernel[grid](
            x,
            weight,
            out,
            outputs,
            K=inputs,
            BLOCK_J=tile.outputs,
            BLOCK_K=block_k,
            ACTIVATION=activation or "none",
            num_warps=tile.warps,
        )
        return out
    _few_rows_kernel[grid](
        x,
        weight,
        out,
        rows,
        outputs,
        x.stride(0),
        out.stride(0),
        K=inputs,
        BLOCK_R=max(16, triton.next_power_of_2(rows)),
        BLOCK_J=tile.outputs,
        BLOCK_K=max(16, block_k),
        ACTIVATION=activation or "none",
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
