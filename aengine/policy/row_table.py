"""`RowTable`: the running sequences' numbers, as arrays indexed by slot.

A steady decode step touches every running sequence; doing that in numpy keeps its cost per row far
below a microsecond. Plans get copies (law 4: what a launched step reads is never written again).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from aengine.batch import IntArray
    from aengine.policy.runs import Runs
    from aengine.policy.sequence import Sequence


class RowTable:
    """Arrays over slots 0 .. max_num_seqs; slot 0 is padding and never taken.

    Args:
        max_num_seqs: slots that can be taken.
        block_size: tokens per block.
        widest: most blocks that one sequence can hold.
    """

    def __init__(self, max_num_seqs: int, *, block_size: int, widest: int) -> None:
        size = max_num_seqs + 1
        self.computed: IntArray = np.zeros(size, dtype=np.int32)
        """Tokens whose keys and values are written when all launched steps are done."""
        self.known: IntArray = np.zeros(size, dtype=np.int32)
        """Tokens of the sequence, those included that launched steps will sample."""
        self.limit: IntArray = np.zeros(size, dtype=np.int32)
        self.capacity: IntArray = np.zeros(size, dtype=np.int32)
        """Tokens for which it has blocks."""
        self.pending: IntArray = np.zeros(size, dtype=np.int32)
        """Launched steps of this slot that have not settled."""
        self.lane = np.zeros(size, dtype=np.int8)
        """The `Work` of its newest launched step."""
        self.last_step = np.zeros(size, dtype=np.int64)
        self.seq_ids = np.zeros(size, dtype=np.int64)
        self.decoding = np.zeros(size, dtype=np.bool_)
        """Its next token comes from the FutureMap, and nothing keeps it out of the next step."""
        self.constrained = np.zeros(size, dtype=np.bool_)
        self.num_constrained = 0
        self.sequences: list[Sequence | None] = [None] * size
        self._block_size = block_size
        self._widest = widest
        self._tables: IntArray = np.zeros((size, min(widest, 64)), dtype=np.int32)
        self._free = list(range(max_num_seqs, 0, -1))
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Give a sequence a slot. There is a free one."""
        slot = sequence.slot = self._free.pop()
        self.sequences[slot] = sequence
        self.known[slot] = sequence.num_known
        self.limit[slot] = sequence.limit
        self.seq_ids[slot] = sequence.seq_id
        self.last_step[slot] = 0
        if sequence.request.params.structured is not None:
            self.constrained[slot] = True
            self.num_constrained += 1

    def leave(self, sequence: Sequence) -> None:
        """Take the slot back. It is free when the launched steps that use it have settled."""
        slot, sequence.slot = sequence.slot, 0
        self.sequences[slot] = None
        self.decoding[slot] = False
        self.computed[slot] = self.known[slot] = self.limit[slot] = self.capacity[slot] = 0
        self._tables[slot] = 0
        if self.constrained[slot]:
            self.constrained[slot] = False
            self.num_constrained -= 1
        if self.pending[slot]:
            self._leaving.append(slot)
        else:
            self._free.append(slot)

    def free_for(self, lane: int) -> npt.NDArray[np.bool_]:
        """[slots] whether nothing of the slot is in flight in another lane."""
        free: npt.NDArray[np.bool_] = (self.pending == 0) | (self.lane == lane)
        return free

    def settle(self, runs: Runs) -> None:
        """A launched step of these slots has settled."""
        runs.add(self.pending, -1)
        if self._leaving:
            still = [slot for slot in self._leaving if self.pending[slot]]
            self._free += [slot for slot in self._leaving if not self.pending[slot]]
            self._leaving = still

    def write_blocks(self, sequence: Sequence, first: int) -> None:
        """Copy a sequence's block ids from index `first` on into the tables."""
        blocks = sequence.blocks
        count = len(blocks)
        while count > self._tables.shape[1]:
            wider = min(2 * self._tables.shape[1], self._widest)
            added = np.zeros((len(self._tables), wider - self._tables.shape[1]), dtype=np.int32)
            self._tables = np.concatenate([self._tables, added], axis=1)
        if count - first == 1:
            self._tables[sequence.slot, first] = blocks[first]
        else:
            self._tables[sequence.slot, first:count] = list(blocks)[first:]
        self.capacity[sequence.slot] = count * self._block_size

    def append_blocks(self, slots: IntArray, blocks: list[int]) -> bool:
        """Note one more block for each slot; False if the tables are not wide enough yet."""
        index = self.capacity[slots] // self._block_size
        if index.max() >= self._tables.shape[1]:
            return False
        self._tables[slots, index] = blocks
        self.capacity[slots] += self._block_size
        return True

    def sequences_of(self, slots: IntArray) -> list[Sequence]:
        """The sequences in these slots, which are taken."""
        return cast("list[Sequence]", list(map(self.sequences.__getitem__, slots.tolist())))

    def tables_of(self, runs: Runs, widest: int) -> IntArray:
        """[rows, widest] copy of block tables."""
        return runs.take(self._tables, widest)
