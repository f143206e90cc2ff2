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
    from aengine.model.config import ModelConfig

CPU_DEFAULT_FRACTION = 0.25
"""A program that embeds the engine needs its memory too: by default KV takes a quarter of what is
free, and never more than the running sequences could fill."""


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
    *,
    free_bytes: int,
    weight_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """How many blocks to make.

    Args:
        spec: the cache's shape.
        config: what the caller asked for.
        free_bytes: memory that is free now, with the weights already loaded.
        weight_bytes: what the weights took, for the error's breakdown.
        max_num_seqs, max_model_len: more than this many full sequences is never needed.

    Raises:
        OutOfMemoryError: not even one sequence of `max_model_len` fits, or more is asked for than
            is free; the hint says what would do.
    """
    per_sequence = -(-max_model_len // spec.block_size)
    budget = _budget(config, free_bytes)
    blocks = min(budget // spec.bytes_per_block, per_sequence * max_num_seqs)
    there = free_bytes // spec.bytes_per_block
    if per_sequence <= blocks <= there:
        return blocks
    needed = per_sequence * spec.bytes_per_block
    proposals = _proposals(spec, min(blocks, there), per_sequence, there, over=blocks > there)
    raise OutOfMemoryError(
        f"the KV cache gets {_mib(budget)}, and one sequence of max_model_len={max_model_len} "
        f"needs {_mib(needed)} ({_mib(free_bytes)} are free, weights take "
        f"{_mib(weight_bytes)}); "
        + (f"use {', or '.join(proposals)}" if proposals else "no context fits: free some memory"),
        breakdown={
            "weights": weight_bytes,
            "kv_cache": budget,
            "free": free_bytes,
            "one_sequence": needed,
        },
        hint=proposals[0].removesuffix(" or less") if proposals else "",
    )


def _proposals(
    spec: KVCacheSpec, blocks: int, per_sequence: int, there: int, *, over: bool
) -> list[str]:
    """Settings that would do. `over`: more was asked for than the `there` blocks that are free."""
    found = []
    memory = there if over else per_sequence
    if blocks < per_sequence and blocks * spec.block_size >= 2:
        found.append(f"max_model_len={blocks * spec.block_size} or less")
        if over:
            found[-1] += f" with kv_cache_memory={memory * spec.bytes_per_block}"
    if per_sequence <= there:
        found.append(f"kv_cache_memory={memory * spec.bytes_per_block}")
    return found


def fit_context(spec: KVCacheSpec, config: KVCacheConfig, *, free_bytes: int, longest: int) -> int:
    """The longest context, up to the model's, of which one sequence fits the cache's budget."""
    fits = min(_budget(config, free_bytes), free_bytes) // spec.bytes_per_block * spec.block_size
    return max(2, min(longest, fits))


def _budget(config: KVCacheConfig, free_bytes: int) -> int:
    if config.memory is not None:
        return config.memory
    fraction = CPU_DEFAULT_FRACTION if config.fraction is None else config.fraction
    return int(free_bytes * fraction)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
