"""Tensor parallelism: which shard of each layer a rank holds, and the two collectives it needs.

Every rank runs the same forward on the same batch. Column-parallel layers (q, k, v, gate, up) hold
a slice of the outputs, row-parallel ones (o, down) a slice of the inputs and sum over the ranks;
embedding and head hold a slice of the vocabulary. Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aengine.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Collectives(Protocol):
    """What a rank asks of the others. Calls come in the same order on every rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; may write over `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors side by side along the last dimension, in rank order."""
        ...


class NoCollectives:
    """Collectives of a single process: every tensor is already whole."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x


class TorchCollectives:
    """Collectives over a `torch.distributed` process group (gloo on CPUs, NCCL on GPUs).

    Args:
        group: the group, whose ranks are those of the `ParallelConfig`; None: the default group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist  # not every torch build has it

        self._dist = dist
        self._group = group
        self._size = dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in place."""
        self._dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor, `world_size` times as wide."""
        import torch

        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True, slots=True)
class Shard:
    """A half-open range of rows or columns that one rank holds."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, width: int) -> Shard:
        """The same share, counted in parts of `width` (heads to columns)."""
        return Shard(self.start * width, self.stop * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """This process's place among those that share a model.

    Args:
        rank, world_size: 0 <= rank < world_size.
        collectives: needed when world_size is above 1.

    Raises:
        ConfigError: the numbers do not fit each other, or collectives are missing.
    """

    rank: int = 0
    world_size: int = 1
    collectives: Collectives = field(default_factory=NoCollectives)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} must be at least 0 and below world_size={self.world_size}"
            )
        if self.world_size > 1 and isinstance(self.collectives, NoCollectives):
            raise ConfigError(f"world_size={self.world_size} needs collectives between the ranks")

    def split(self, what: str, count: int) -> Shard:
        """This rank's even share of `count` heads or columns.

        Raises:
            ConfigError: `count` is not a multiple of the world size.
        """
        if count % self.world_size:
            raise ConfigError(
                f"the model's {what}={count} cannot be split over world_size={self.world_size}: "
                "it must be a multiple of it"
            )
        share = count // self.world_size
        return Shard(self.rank * share, (self.rank + 1) * share)

    def split_kv_heads(self, count: int) -> Shard:
        """This rank's key/value heads; with fewer heads than ranks, several ranks hold one each.

        Raises:
            ConfigError: heads and ranks are not multiples of each other.
        """
        if count >= self.world_size or self.world_size % count:
            return self.split("num_kv_heads", count)
        head = self.rank * count // self.world_size
        return Shard(head, head + 1)

    def split_vocab(self, count: int) -> Shard:
        """This rank's rows of embedding and head; the last ranks may hold fewer, or none."""
        share = -(-count // self.world_size)
        return Shard(min(self.rank * share, count), min((self.rank + 1) * share, count))

    def split_vocab_share(self, count: int) -> int:
        """Rows of the vocabulary that every rank's shard is padded to for a gather."""
        return -(-count // self.world_size)

    def copies(self, heads: int) -> int:
        """How many ranks hold each head: more than one where heads are fewer than ranks."""
        return max(1, self.world_size // heads)
