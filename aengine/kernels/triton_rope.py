"""Rotary embedding and the KV write on the GPU, in one launch. Twin: `kernels.rope`.

A program takes one token and some of its heads: of q (turned in place), of k (turned and written to
the cache) or of v (written). Models that normalise queries and keys head by head can have that done
in the same pass.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from aengine.kernels.attention import KVLayer

_HEADS_AT_ONCE = 8


@triton.jit
def _turn(
    source,
    target,
    cos_sin_row,
    weight_ptr,
    eps,
    source_stride,
    target_stride,
    heads,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    COPY_REST: tl.constexpr,
):
    """Norm (if asked for) and turn some heads of one token."""
    i = tl.arange(0, HALF_BLOCK)
    near = (heads >= 0)[:, None] & (i < HALF)[None, :]
    here = source + heads[:, None] * source_stride + i[None, :]
    first = tl.load(here, mask=near, other=0.0).to(tl.float32)
    second = tl.load(here + HALF, mask=near, other=0.0).to(tl.float32)
    j = 2 * HALF + tl.arange(0, REST_BLOCK)
    far = (heads >= 0)[:, None] & (j < DIM)[None, :]
    if (NORM or COPY_REST) and 2 * HALF < DIM:
        rest = tl.load(source + heads[:, None] * source_stride + j[None, :], mask=far, other=0.0)
        rest = rest.to(tl.float32)
        if NORM:
            squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
            scale = 1.0 / tl.sqrt(squares / DIM + eps)
            weight = tl.load(weight_ptr + j, mask=j < DIM, other=0.0).to(tl.float32)
            rest = rest * scale[:, None] * weight[None, :]
        there = target + heads[:, None] * target_stride + j[None, :]
        tl.store(there, rest.to(target.dtype.element_ty), mask=far)
    elif NORM:
        scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / DIM + eps)
    if NORM:
        low = tl.load(weight_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
        high = tl.load(weight_ptr + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        # Rounded as a norm of its own would round, so that fusing changes no result.
        narrow = source.dtype.element_ty
        first = (first * scale[:, None] * low[None, :]).to(narrow).to(tl.float32)
        second = (second * scale[:, None] * high[None, :]).to(narrow).to(tl.float32)
    cos = tl.load(cos_sin_row + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_row + HALF + i, mask=i < HALF, other=0.0)[None, :]
    there = target + heads[:, None] * target_stride + i[None, :]
    tl.store(there, (first * cos - second * sin).to(target.dtype.element_ty), mask=near)
    tl.store(there + HALF, (second * cos + first * sin).to(target.dtype.element_ty), mask=near)


@triton.jit
def _rope_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    position_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    q_token_stride,
    k_token_stride,
    v_token_stride,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS if TURN else 0
    kv_parts: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    row = cos_sin_ptr
    if TURN:
        row = cos_sin_ptr + tl.load(position_ptr + token) * (2 * HALF)
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        head = tl.where(head < Q_HEADS, head, -1)
        queries = q_ptr + token * q_token_stride
        _turn(
            queries, queries, row, q_weight_ptr, eps, q_head_stride, q_head_stride, head,
            DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM, NORM,
        )  # fmt: skip
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64) * (KV_HEADS * DIM)
        if TURN and part < q_parts + kv_parts:
            head = (part - q_parts) * HEADS + tl.arange(0, HEADS)
            head = tl.where(head < KV_HEADS, head, -1)
            _turn(
                k_ptr + token * k_token_stride, k_cache_ptr + slot, row, k_weight_ptr, eps,
                k_head_stride, DIM, head, DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM, True,
            )  # fmt: skip
        else:
            copied = part - q_parts
            if TURN:
                copied = copied - kv_parts
            head = (copied % kv_parts) * HEADS + tl.arange(0, HEADS)
            d = tl.arange(0, DIM_BLOCK)
            inside = (head < KV_HEADS)[:, None] & (d < DIM)[None, :]
            there = slot + head[:, None] * DIM + d[None, :]
            if TURN or copied >= kv_parts:
                here = v_ptr + token * v_token_stride + head[:, None] * v_head_stride + d[None, :]
                value = tl.load(here, mask=inside, other=0.0)
                tl.store(v_cache_ptr + there, value.to(v_cache_ptr.dtype.element_ty), mask=inside)
            else:
                here = k_ptr + token * k_token_stride + head[:, None] * k_head_stride + d[None, :]
                value = tl.load(here, mask=inside, other=0.0)
                tl.store(k_cache_ptr + there, value.to(k_cache_ptr.dtype.element_ty), mask=inside)


def rope_write_kv(
    q_TND: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv: KVLayer,
    slot_mapping: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate queries (in place) and keys, write keys and values at their slots.

    Args:
        q_TND, k_THD, v_THD: [T, N or H, D]; usually slices of one merged projection, last dimension
            contiguous. `k_THD` and `v_THD` are left as they are.
        cos_sin: [max_positions, rotary_dim] float32 of `rope_table`; rotary_dim is at most D.
        positions: [T] int64.
        kv: the layer's cache, contiguous; values are converted to its dtype.
        slot_mapping: [T] int64, block id * block size + offset.
        q_weight, k_weight: [D] weights of an RMS norm of each head that comes before the turn;
            both or neither.
        eps: that norm's.

    Returns:
        The rotated queries: `q_TND` itself.
    """
    _launch(q_TND, k_THD, v_THD, cos_sin, positions, kv, slot_mapping, q_weight, k_weight, eps)
    return q_TND


def write_kv(
    k_THD: torch.Tensor, v_THD: torch.Tensor, kv: KVLayer, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value at its slot, in place; see `kernels.attention.write_kv`."""
    _launch(k_THD, k_THD, v_THD, None, None, kv, slot_mapping, None, None, 0.0)


def _launch(
    q_TND: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    kv: KVLayer,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    tokens, q_heads, dim = q_TND.shape
    kv_heads = k_THD.shape[1]
    if tokens == 0:
        return
    turn = cos_sin is not None
    half = cos_sin.shape[1] // 2 if cos_sin is not None else dim // 2
    parts = 2 * triton.cdiv(kv_heads, _HEADS_AT_ONCE)
    if turn:
        parts += triton.cdiv(q_heads, _HEADS_AT_ONCE)
    _rope_write_kernel[(tokens, parts)](
        q_TND,
        k_THD,
        v_THD,
        cos_sin if turn else q_TND,
        positions if turn else slot_mapping,
        kv.k,
        kv.v,
        slot_mapping,
        q_weight if q_weight is not None else q_TND,
        k_weight if k_weight is not None else q_TND,
        eps,
        q_TND.stride(0),
        k_THD.stride(0),
        v_THD.stride(0),
        q_TND.stride(1),
        k_THD.stride(1),
        v_THD.stride(1),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(max(1, dim - 2 * half)),
        HEADS=_HEADS_AT_ONCE,
        TURN=turn,
        NORM=q_weight is not None,
        num_warps=2,
    )
