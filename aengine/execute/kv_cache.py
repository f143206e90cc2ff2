"""KV cache tensors and their sizing. Block *ids* live in `policy.block_pool`, the tensors here.

Block 0 is the padding block: rows that pad a batch read and write it, no sequence owns it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.errors import OutOfMemoryError
from aengine.kernels.attention import KVLayer

if TYPE_CHECKING:
    from aengine.config import KVCacheConfig
    from aengine.execute.memory_profile import MemoryProfile
    from aengine.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of a cache: one K and one V tensor a layer, each
    [num_blocks + 1, block_size, num_kv_heads, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """The cache that a model needs."""
        return cls(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    @property
    def bytes_per_block(self) -> int:
        values = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> list[KVLayer]:
        """The tensors of `num_blocks` usable blocks and the padding block."""
        shape = (num_blocks + 1, self.block_size, self.num_kv_heads, self.head_dim)
        return [
            KVLayer(_zeros(shape, self.dtype, device), _zeros(shape, self.dtype, device))
            for _ in range(self.num_layers)
        ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, so that what a padded row reads is a number: NaN would spread through a softmax.

    On a CPU the pages come from calloc and take no memory until a sequence writes to them, which
    torch's own zeros would do at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


def size_cache(
    spec: KVCacheSpec,
    config: KVCacheConfig,
    profile: MemoryProfile,
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """How many blocks to make.

    Args:
        spec: the cache's shape.
        config: what the caller asked for.
        profile: what there is, and what of it weights, activations and graphs take.
        max_num_seqs, max_model_len: more than this many full sequences is never needed.

    Raises:
        OutOfMemoryError: not even one sequence of `max_model_len` fits, or more is asked for than
            is left; the hint says what would do.
    """
    per_sequence = -(-max_model_len // spec.block_size)
    budget = _budget(config, profile)
    blocks = min(budget // spec.bytes_per_block, per_sequence * max_num_seqs)
    there = profile.left // spec.bytes_per_block
    if per_sequence <= blocks <= there:
        return blocks
    needed = per_sequence * spec.bytes_per_block
    proposals = _proposals(spec, min(blocks, there), per_sequence, there, over=blocks > there)
    advice = f"use {', or '.join(proposals)}" if proposals else _NOTHING_FITS
    raise OutOfMemoryError(
        f"the KV cache gets {_mib(budget)}, and one sequence of max_model_len={max_model_len} "
        f"needs {_mib(needed)} ({_mib(profile.free)} are free beside the weights' "
        f"{_mib(profile.weights)}; of them the largest step's activations take "
        f"{_mib(profile.activations)}, captured graphs {_mib(profile.graphs)}); {advice}",
        breakdown={
            "weights": profile.weights,
            "activations": profile.activations,
            "graphs": profile.graphs,
            "kv_cache": budget,
            "free": profile.free,
            "one_sequence": needed,
        },
        hint=proposals[0].removesuffix(" or less") if proposals else "",
    )


_NOTHING_FITS = (
    "no context fits: free some memory, or make steps smaller (max_num_batched_tokens, "
    "max_num_seqs)"
)


def _proposals(
    spec: KVCacheSpec, blocks: int, per_sequence: int, there: int, *, over: bool
) -> list[str]:
    """Settings that would do. `over`: more was asked for than the `there` blocks that are left."""
    found = []
    memory = there if over else per_sequence
    if blocks < per_sequence and blocks * spec.block_size >= 2:
        found.append(f"max_model_len={blocks * spec.block_size} or less")
        if over:
            found[-1] += f" with kv_cache_memory={memory * spec.bytes_per_block}"
    if per_sequence <= there:
        found.append(f"kv_cache_memory={memory * spec.bytes_per_block}")
    return found


def fit_context(
    spec: KVCacheSpec, config: KVCacheConfig, profile: MemoryProfile, *, longest: int
) -> int:
    """The longest context, up to the model's, of which one sequence fits the cache's budget."""
    budget = min(_budget(config, profile), profile.left)
    return max(2, min(longest, budget // spec.bytes_per_block * spec.block_size))


def _budget(config: KVCacheConfig, profile: MemoryProfile) -> int:
    if config.memory is not None:
        return config.memory
    fraction = profile.default_fraction if config.fraction is None else config.fraction
    return int(profile.left * fraction)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
