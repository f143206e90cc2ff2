"""The experts' feed-forward on the GPU; asks the device nothing. Twin: `kernels.moe`.

Pairs (token, expert) are sorted by expert; each expert's pairs are cut into blocks of rows, and one
launch multiplies all blocks, each by its own expert's matrix. How many blocks an expert has is
known to the device alone, so the launch is as large as it can get and the programs left over
return: the whole can be captured in a graph.

Shape legend: T tokens, E experts, A experts a token, P = T*A pairs, K hidden size, I expert width.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aengine.kernels.triton_activation import gated_activation

if TYPE_CHECKING:
    from aengine.kernels.activation import Activation
    from aengine.kernels.moe import Routing


@triton.jit
def _grouped_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    weight_ptr,
    order_ptr,
    block_expert_ptr,
    pair_ends_ptr,
    block_ends_ptr,
    N,
    K,
    a_stride,
    EXPERTS: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block)
    if expert >= EXPERTS:
        return
    # An expert begins where the one before it ends.
    first_pair = tl.load(pair_ends_ptr + expert - 1, mask=expert > 0, other=0)
    first_block = tl.load(block_ends_ptr + expert - 1, mask=expert > 0, other=0)
    place = first_pair + (block - first_block) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = place < tl.load(pair_ends_ptr + expert)
    pair = tl.load(order_ptr + place, mask=real, other=0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    k = tl.arange(0, BLOCK_K)
    a_row = a_ptr + (pair // ROWS_SHARED) * a_stride
    b_row = b_ptr + expert.to(tl.int64) * N * K + column.to(tl.int64) * K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        within = start + k < K
        a = tl.load(
            a_row[:, None] + (start + k)[None, :], mask=real[:, None] & within[None, :], other=0.0
        )
        b = tl.load(
            b_row[None, :] + (start + k)[:, None], mask=within[:, None] & inside[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if WEIGHTED:
        total *= tl.load(weight_ptr + pair, mask=real, other=0.0)[:, None]
    here = out_ptr + pair[:, None] * N + column[None, :]
    tl.store(here, total.to(out_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Which pairs each block of rows holds; all on the device but the two sizes."""

    order: torch.Tensor
    """[P] int64: pairs sorted by expert."""
    expert: torch.Tensor
    """[blocks] int64; those beyond the last block say E."""
    pair_ends: torch.Tensor
    """[E] int64, of each expert's pairs in `order`."""
    block_ends: torch.Tensor
    """[E] int64, of each expert's blocks."""
    count: int
    rows: int


def _cut(experts_P: torch.Tensor, experts: int) -> _Blocks:
    pairs = experts_P.shape[0]
    rows = 64 if pairs >= 32 * experts else 16
    # At most one block of each expert is not full; no expert without pairs has any.
    most = pairs // rows + min(experts, pairs)
    ids = torch.arange(experts, device=experts_P.device)
    sizes = (experts_P.unsqueeze(0) == ids.unsqueeze(1)).sum(1)
    block_ends = ((sizes + rows - 1) // rows).cumsum(0)
    blocks = torch.arange(most, device=experts_P.device)
    return _Blocks(
        order=experts_P.argsort(stable=True),
        expert=torch.searchsorted(block_ends, blocks, right=True),
        pair_ends=sizes.cumsum(0),
        block_ends=block_ends,
        count=most,
        rows=rows,
    )


def moe_mlp(
    x_TK: torch.Tensor,
    gate_up_EJK: torch.Tensor,
    down_EKI: torch.Tensor,
    routing: Routing,
    activation: Activation,
) -> torch.Tensor:
    """Sum of each token's experts, weighted.

    Args:
        x_TK: [T, K] hidden states, last dimension contiguous.
        gate_up_EJK: [E, 2*I, K] merged gate and up projections, contiguous.
        down_EKI: [E, K, I] down projections, contiguous.
        routing: float32 weights and int64 experts, [T, A] each.
        activation: as in `aengine.kernels.activation.gated_activation`.

    Returns:
        [T, K] in the dtype of `x_TK`; the sum is taken in float32.
    """
    tokens, hidden = x_TK.shape
    experts, double, _ = gate_up_EJK.shape
    active = routing.experts_TA.shape[1]
    if tokens == 0:
        return torch.empty_like(x_TK)
    blocks = _cut(routing.experts_TA.reshape(-1), experts)
    weights = routing.weights_TA.reshape(-1).contiguous()
    device = x_TK.device
    inner = torch.empty((tokens * active, double), dtype=x_TK.dtype, device=device)
    _multiply(x_TK, gate_up_EJK, inner, blocks, weights, shared=active, weighted=False)
    gated = gated_activation(inner, activation)
    outer = torch.empty((tokens * active, hidden), dtype=torch.float32, device=device)
    _multiply(gated, down_EKI, outer, blocks, weights, shared=1, weighted=True)
    return outer.view(tokens, active, hidden).sum(1).to(x_TK.dtype)


def _multiply(
    a: torch.Tensor,
    b_ENK: torch.Tensor,
    out: torch.Tensor,
    blocks: _Blocks,
    weights: torch.Tensor,
    *,
    shared: int,
    weighted: bool,
) -> None:
    """`out[pair] = a[pair // shared] @ b[expert of pair].T`, times the pair's weight if asked."""
    experts, width, depth = b_ENK.shape
    block_n = 64
    _grouped_kernel[(triton.cdiv(width, block_n), blocks.count)](
        a,
        b_ENK,
        out,
        weights,
        blocks.order,
        blocks.expert,
        blocks.pair_ends,
        blocks.block_ends,
        width,
        depth,
        a.stride(0),
        EXPERTS=experts,
        ROWS_SHARED=shared,
        WEIGHTED=weighted,
        BLOCK_M=blocks.rows,
        BLOCK_N=block_n,
        BLOCK_K=32 if a.dtype == torch.float32 else 64,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
