"""What happens when running sequences need blocks and there are none.

The least urgent running sequence gives way to a more urgent one, never the other way round: so the
most urgent one always goes on, and with it the whole. Its results in flight settle first: until
then it is *parked*, left out of the next steps, and whoever needs its blocks waits a step or two.
Blocks that are on their way back anyhow (leased to a launched step, or a parked sequence's) are
waited for before anybody else is asked to give way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from aengine.batch import IntArray
    from aengine.policy.kv_memory import KVMemory
    from aengine.policy.row_table import RowTable
    from aengine.policy.sequence import Sequence


class MemoryPressure:
    """Finds blocks for sequences that must grow.

    Args:
        memory: where blocks come from.
        rows: the running sequences.
        preempt: takes slot and blocks of a sequence without launched steps.
    """

    def __init__(
        self, memory: KVMemory, rows: RowTable, preempt: Callable[[Sequence], None]
    ) -> None:
        self._memory = memory
        self._rows = rows
        self._preempt = preempt
        self._parked: list[Sequence] = []

    def reserve(self, prefilling: Seq[Sequence]) -> bool:
        """Get every running sequence the blocks of its next tokens; whether all have them."""
        rows = self._rows
        short = rows.decoding & (rows.known < rows.limit) & (rows.computed >= rows.capacity)
        slots = np.flatnonzero(short).astype(np.int32)
        # A prompt has all its blocks since admission; tokens that were forced do not.
        grown = [
            sequence
            for sequence in prefilling
            if not sequence.held
            and not sequence.parked
            and rows.known[sequence.slot] > rows.capacity[sequence.slot]
        ]
        if grown:
            return self.serve(rows.sequences_of(slots) + grown)
        return not len(slots) or self.serve_decoding(slots)

    def serve_decoding(self, slots: IntArray) -> bool:
        """One more block for each of these slots; whether nobody went without or gave way."""
        needy = self._rows.sequences_of(slots)
        blocks = self._memory.grow_each(needy)
        if blocks is None:
            return self.serve(needy)
        if not self._rows.append_blocks(slots, blocks):
            for sequence in needy:
                self._rows.write_blocks(sequence, len(sequence.blocks) - 1)
        return True

    def serve(self, needy: list[Sequence]) -> bool:
        """Get sequences the blocks of the tokens they know, most urgent first.

        Returns:
            Whether nobody went without and nobody had to give way.
        """
        calm = True
        for sequence in sorted(needy, key=lambda each: each.order):
            # An earlier one may have made it give way.
            if sequence.slot and not sequence.parked:
                calm = self._serve_one(sequence) and calm
        return calm

    def _serve_one(self, sequence: Sequence) -> bool:
        tokens = int(self._rows.known[sequence.slot])
        first = len(sequence.blocks)
        calm = True
        while not self._memory.grow(sequence, tokens):
            calm = False
            if not self._take_from_another(sequence, tokens):
                return False
        self._rows.write_blocks(sequence, first)
        return calm

    def _take_from_another(self, sequence: Sequence, tokens: int) -> bool:
        """Make the least urgent sequence give way; whether that freed anything already."""
        pool = self._memory.pool
        missing = self._memory.missing(sequence, tokens)
        # What is cached here could not be evicted, so it is leased too.
        coming = pool.num_free + pool.num_cached + pool.num_leased
        coming += sum(len(each.blocks) for each in self._parked)
        if coming >= missing and (pool.num_cached or pool.num_leased or self._parked):
            return False
        victim = self._least_urgent(sequence)
        if victim is None:
            return False
        if self._rows.pending[victim.slot]:
            self._park(victim)
            return False
        self._preempt(victim)
        return True

    def _least_urgent(self, than: Sequence) -> Sequence | None:
        others = [
            each
            for each in self._rows.sequences
            if each is not None and not each.parked and each.order > than.order
        ]
        return max(others, key=lambda each: each.order, default=None)

    def _park(self, sequence: Sequence) -> None:
        sequence.parked = True
        self._rows.decoding[sequence.slot] = False
        self._parked.append(sequence)

    def preempt_settled(self) -> None:
        """Preempt the parked sequences that have no launched step any more."""
        for sequence in tuple(self._parked):
            if not self._rows.pending[sequence.slot]:
                self._preempt(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has left its slot."""
        if sequence.parked:
            sequence.parked = False
            self._parked.remove(sequence)
