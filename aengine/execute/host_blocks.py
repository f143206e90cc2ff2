"""Host memory for the KV blocks of sequences that gave way, and the copies to and from it.

Block *ids* are decided in `policy.swap_space`, the bytes are here. A block on the host is one piece
of memory, all layers of it, so that it moves in one copy; on a GPU the layers are gathered into a
small staging buffer first (and scattered out of it), because a copy for each layer of each block
would be thousands of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.errors import ConfigError, OutOfMemoryError
from aengine.execute.memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aengine.batch import BlockCopy
    from aengine.execute.kv_cache import KVCacheSpec
    from aengine.kernels.attention import KVLayer

STAGING_BYTES = 32 << 20
"""Of the device, for one piece of a copy."""


class HostBlocks:
    """The blocks on the host. Its copies run on one stream, one after the other.

    Args:
        spec: the shape of the device's cache.
        kv_cache: its tensors, one entry a layer; the list is read at each copy.
        num_blocks: how many; ids are 1 .. num_blocks.
        device: where the cache is. For a GPU the memory is pinned.
        staged: whether layers are gathered before a copy; None: as suits the device.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        kv_cache: list[KVLayer],
        *,
        num_blocks: int,
        device: torch.device,
        staged: bool | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._kv_cache = kv_cache
        self._device = device
        shape = (spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self._per_slab, sizes = slabs(num_blocks, spec.bytes_per_block)
        on_gpu = device.type != "cpu"
        self._staged = on_gpu if staged is None else staged
        if not self._staged:
            # Pages of zeros take no memory until a block is copied there.
            width = spec.bytes_per_block // (2 * spec.num_layers)
            self._arrays = [
                np.zeros((size, spec.num_layers, 2, width), dtype=np.uint8) for size in sizes
            ]
            return
        self._slabs = [
            torch.empty((size, *shape), dtype=spec.dtype, pin_memory=on_gpu) for size in sizes
        ]
        self._piece = max(1, min(num_blocks, STAGING_BYTES // spec.bytes_per_block))
        self._staging = torch.empty((self._piece, *shape), dtype=spec.dtype, device=device)

    def copy_blocks(self, copy: BlockCopy) -> None:
        """Copy blocks to the host or back. To be launched on the copy stream; waits for nothing."""
        if not self._staged:
            self._copy_by_numpy(copy)
            return
        for start in range(0, len(copy.host_blocks), self._piece):
            piece = slice(start, start + self._piece)
            blocks, host = copy.device_blocks[piece], copy.host_blocks[piece]
            index = self._upload(blocks)
            if copy.to_host:
                self._gather(index)
            for at, slab, first, count in self._runs(host):
                staged = self._staging[at : at + count]
                kept = self._slabs[slab][first : first + count]
                source, target = (staged, kept) if copy.to_host else (kept, staged)
                target.copy_(source, non_blocking=True)
            if not copy.to_host:
                self._scatter(index)

    def _upload(self, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64)
        if self._device.type == "cpu":
            return index
        return index.pin_memory().to(self._device, non_blocking=True)

    def _gather(self, index: torch.Tensor) -> None:
        staged = self._staging[: len(index)]
        for layer, kv in enumerate(self._kv_cache):
            staged[:, layer, 0].copy_(kv.k.index_select(0, index))
            staged[:, layer, 1].copy_(kv.v.index_select(0, index))

    def _scatter(self, index: torch.Tensor) -> None:
        staged = self._staging[: len(index)]
        for layer, kv in enumerate(self._kv_cache):
            kv.k.index_copy_(0, index, staged[:, layer, 0])
            kv.v.index_copy_(0, index, staged[:, layer, 1])

    def _copy_by_numpy(self, copy: BlockCopy) -> None:
        """On a CPU: a torch operation would start a pool of threads of its own here."""
        for at, slab, first, count in self._runs(copy.host_blocks):
            blocks = list(copy.device_blocks[at : at + count])
            kept = self._arrays[slab][first : first + count]
            for layer, kv in enumerate(self._kv_cache):
                for half, tensor in enumerate((kv.k, kv.v)):
                    cache = tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
                    if copy.to_host:
                        kept[:, layer, half] = cache[blocks]
                    else:
                        cache[blocks] = kept[:, layer, half]

    def _runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Neighbours among block ids: where they begin in the list, their slab, their place in it,
        how many."""
        at = 0
        while at < len(blocks):
            slab, first = divmod(blocks[at] - 1, self._per_slab)
            count = 1
            while (
                at + count < len(blocks)
                and blocks[at + count] == blocks[at] + count
                and first + count < self._per_slab
            ):
                count += 1
            yield at, slab, first, count
            at += count


def slabs(num_blocks: int, bytes_per_block: int) -> tuple[int, list[int]]:
    """Blocks of a full slab, and of each.

    torch rounds pinned memory up to a power of two: a slab is as many blocks as fit into one, of a
    size at which what is lost is less than a sixteenth.
    """
    power = 1 << (16 * bytes_per_block - 1).bit_length()
    full = power // bytes_per_block
    sizes = [full] * (num_blocks // full)
    if rest := num_blocks % full:
        sizes.append(rest)
    return full, sizes


def count_host_blocks(spec: KVCacheSpec, swap_space: int) -> int:
    """How many blocks `swap_space` bytes hold.

    Raises:
        ConfigError: not a single one.
        OutOfMemoryError: the host does not have that much.
    """
    if not swap_space:
        return 0
    free = available_memory()
    if swap_space > free:
        raise OutOfMemoryError(
            f"swap_space={swap_space}: {free / 2**20:.0f} MiB of host memory are free",
            breakdown={"swap_space": swap_space, "free": free},
            hint=f"swap_space={free // 2}",
        )
    if swap_space < spec.bytes_per_block:
        raise ConfigError(
            f"swap_space={swap_space} holds no KV block: one takes {spec.bytes_per_block} bytes"
        )
    return swap_space // spec.bytes_per_block
