"""KV block ids: who holds them, which are cached, which are still leased to a launched step.

Only ids live here; the tensors they index are in `execute.kv_cache`. Ids run from 1 to
`num_blocks`; id 0 is the padding block, which nobody owns.

A block is in exactly one state:

* *used*: at least one `BlockTable` holds it;
* *cached*: nobody holds it, the prefix cache can find it;
* *leased*: nobody holds it or can find it, but a launched step may still touch it;
* *free*.

There is no call that frees a block id. References live in tables, and releasing a table empties it,
so a second release finds nothing: freeing twice cannot be written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEVER = 0
"""The step id of "no step": real step ids start at 1."""


class BlockTable:
    """The blocks of one sequence in order of position. Only a `BlockPool` changes it."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: list[int] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> int:
        return self._blocks[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)


class BlockPool:
    """Block ids with reference counts and leases.

    Args:
        num_blocks: usable blocks; their ids are 1 .. num_blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.returns = 0
        """Grows whenever a block becomes easier to have; lets a caller skip hopeless retries."""
        self._free = list(range(num_blocks, 0, -1))
        self._references = [0] * (num_blocks + 1)
        self._touched = [NEVER] * (num_blocks + 1)
        self._in_cache = bytearray(num_blocks + 1)
        self._num_cached = 0
        self._num_leased = 0
        self._leases: dict[int, list[int]] = {}
        self._in_flight: dict[int, None] = {}
        self._last_launched = NEVER
        self._cached_until = NEVER

    # -- counts --------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache knows."""
        return self._num_cached

    @property
    def num_leased(self) -> int:
        """Blocks that come back when a launched step completes."""
        return self._num_leased

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - self._num_cached - self._num_leased

    @property
    def next_step(self) -> int:
        """The id of the next step (or copy) that is launched."""
        return self._last_launched + 1

    @property
    def settled(self) -> int:
        """Every step up to this id has completed."""
        return next(iter(self._in_flight), self._last_launched + 1) - 1

    def references(self, block: int) -> int:
        """How many tables hold the block."""
        return self._references[block]

    def is_leased(self, block: int) -> bool:
        """Whether a step in flight may touch this unreferenced block."""
        return self._touched[block] > self.settled

    # -- steps ---------------------------------------------------------------------------------

    def launch(self, step_id: int) -> None:
        """A step begins to hold whatever it touches. Ids grow from call to call."""
        if step_id <= self._last_launched:
            raise ValueError(f"step {step_id} launched after step {self._last_launched}")
        self._last_launched = step_id
        self._in_flight[step_id] = None

    def complete(self, step_id: int) -> None:
        """A step has completed. Its leases end with those of all steps before it."""
        del self._in_flight[step_id]
        settled = self.settled
        for last_step in [step for step in self._leases if step <= settled]:
            blocks = self._leases.pop(last_step)
            self._num_leased -= len(blocks)
            self._free += blocks
            self.returns += 1
        if self._cached_until and settled >= self._cached_until:
            self._cached_until = NEVER
            self.returns += 1

    # -- tables --------------------------------------------------------------------------------

    def extend(self, table: BlockTable, count: int) -> bool:
        """Append `count` free blocks to a table, or none if there are not that many."""
        if count > len(self._free):
            return False
        for _ in range(count):
            block = self._free.pop()
            self._references[block] = 1
            self._touched[block] = NEVER
            table._blocks.append(block)
        return True

    def extend_each(self, tables: Sequence[BlockTable]) -> list[int] | None:
        """Append one free block to each table; the blocks, or None if there are not that many."""
        first = len(self._free) - len(tables)
        if first < 0:
            return None
        blocks = self._free[first:]
        del self._free[first:]
        for table, block in zip(tables, blocks, strict=True):
            self._references[block] = 1
            self._touched[block] = NEVER
            table._blocks.append(block)
        return blocks

    def share(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Append cached or used blocks to a table."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                self._require_cached(block)
                self._num_cached -= 1
            references[block] += 1
        table._blocks += blocks

    def exchange(self, table: BlockTable, index: int, block: int, last_step: int) -> None:
        """Put a cached block in the place of a table's own, whose last step was `last_step`."""
        if self._references[block] == 0:
            self._require_cached(block)
            self._num_cached -= 1
        self._references[block] += 1
        old, table._blocks[index] = table._blocks[index], block
        self._drop(old, last_step)

    def release(self, table: BlockTable, last_step: int) -> None:
        """Empty a table. `last_step` is the newest launched step that can touch its blocks."""
        blocks, table._blocks = table._blocks, []
        # Backwards, so that the free list hands them out again in their old order.
        for block in reversed(blocks):
            self._drop(block, last_step)

    def _drop(self, block: int, last_step: int) -> None:
        if last_step > self._touched[block]:
            self._touched[block] = last_step
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._in_cache[block]:
                self._num_cached += 1
                self._cached_until = max(self._cached_until, self._touched[block])
                self.returns += 1
            else:
                self._give_back(block)

    def _give_back(self, block: int) -> None:
        if self.is_leased(block):
            self._leases.setdefault(self._touched[block], []).append(block)
            self._num_leased += 1
        else:
            self._free.append(block)
            self.returns += 1

    # -- the prefix cache's side ---------------------------------------------------------------

    def cache(self, block: int) -> None:
        """The prefix cache can find this used block from now on."""
        if not self._references[block] or self._in_cache[block]:
            raise ValueError(f"block {block} is not a used block outside the cache")
        self._in_cache[block] = True

    def uncache(self, block: int) -> None:
        """The prefix cache has forgotten the block."""
        self._require_cached(block)
        self._in_cache[block] = False
        if self._references[block] == 0:
            self._num_cached -= 1
            self._give_back(block)

    def _require_cached(self, block: int) -> None:
        if not self._in_cache[block]:
            raise ValueError(f"block {block} is not in the prefix cache")
