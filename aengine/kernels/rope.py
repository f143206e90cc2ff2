"""Rotary position embedding from a table, alone and with the KV write, in plain torch.

The pairs of a head are (i, i + rotary_dim/2), the half-split form of Hugging Face checkpoints;
loaders of files with interleaved pairs permute the rows of q and k. Source: Su et al., "RoFormer",
2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aengine.kernels.attention import KVLayer, write_kv
from aengine.kernels.norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence


def rope_table(
    inv_freq: torch.Tensor | Sequence[float], max_positions: int, *, scale: float = 1.0
) -> torch.Tensor:
    """Cosines and sines of all positions.

    Args:
        inv_freq: [rotary_dim/2] float32 inverse frequencies in radians a position.
        max_positions: positions 0 .. max_positions-1 are tabled.
        scale: factor of both (YaRN and LongRoPE scale attention this way).

    Returns:
        [max_positions, rotary_dim] float32: first the cosines, then the sines.
    """
    frequencies = torch.as_tensor(inv_freq, dtype=torch.float32)
    positions = torch.arange(max_positions, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


def apply_rope(x_TND: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the first `rotary_dim` of each head's dimensions by its token's position.

    Args:
        x_TND: [T, N, D] queries or keys, strides free (last dimension contiguous).
        cos_sin: [max_positions, rotary_dim] float32 of `rope_table`; rotary_dim is at most D.
        positions: [T] int64.

    Returns:
        [T, N, D] in the dtype of `x_TND`; computed in float32.
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x_TND[..., :rotary_dim].float().chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotary_dim == x_TND.shape[2]:
        return torch.cat(parts, dim=-1).to(x_TND.dtype)
    return torch.cat([*(part.to(x_TND.dtype) for part in parts), x_TND[..., rotary_dim:]], dim=-1)


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
    """Rotate queries and keys, write keys and values at their slots.

    Args:
        q_TND, k_THD, v_THD: [T, N or H, D]; usually slices of one merged projection. A kernel may
            rotate `q_TND` in place.
        cos_sin, positions: as in `apply_rope`.
        kv, slot_mapping: as in `aengine.kernels.attention.write_kv`.
        q_weight, k_weight: [D] weights of an RMS norm of each head that comes before the turn;
            both or neither.
        eps: that norm's.

    Returns:
        The rotated queries, [T, N, D].
    """
    if q_weight is not None and k_weight is not None:
        q_TND, k_THD = rms_norm(q_TND, q_weight, eps), rms_norm(k_THD, k_weight, eps)
    write_kv(apply_rope(k_THD, cos_sin, positions), v_THD, kv, slot_mapping)
    return apply_rope(q_TND, cos_sin, positions)
