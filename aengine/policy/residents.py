"""`Residents`: the sequences that have a slot: how they come in, give way, begin again, leave."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from aengine.policy.memory_pressure import MemoryPressure
from aengine.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aengine.batch import StepResult
    from aengine.policy.admission import WaitingQueue
    from aengine.policy.kv_memory import KVMemory
    from aengine.policy.planning import Draft, LaunchedStep
    from aengine.policy.row_table import RowTable
    from aengine.policy.sequence import Sequence
    from aengine.policy.swap_space import SwapSpace


class Residents:
    """Slots and blocks of running sequences.

    Args:
        memory: their blocks.
        rows: their slots.
        queue: where they come from, and go when they give way.
        swap: where their blocks may go then.
    """

    def __init__(
        self, memory: KVMemory, rows: RowTable, queue: WaitingQueue, swap: SwapSpace
    ) -> None:
        self.preemptions = 0
        self.prefilling: list[Sequence] = []
        """Those with host-known tokens to compute, most urgent first."""
        self.pressure = MemoryPressure(memory, rows, self._give_way)
        self._memory = memory
        self._rows = rows
        self._queue = queue
        self._swap = swap

    def enter(self, sequence: Sequence, draft: Draft) -> bool:
        """Give a slot to a sequence that has blocks. False: it waits for its tokens' copies."""
        memory, rows = self._memory, self._rows
        sequence.state = RequestState.RUNNING
        sequence.since = draft.step_id
        sequence.unannounced = True
        cached = memory.count_match(sequence)
        if not sequence.preemptions:
            sequence.cached_tokens = cached
        rows.take(sequence)
        rows.write_blocks(sequence, 0)
        rows.computed[sequence.slot] = cached
        if sequence.swapped > cached:
            draft.returning.append(sequence)
            return False
        self._swap.drop(sequence)
        self.add_prefilling(sequence)
        return True

    def add_prefilling(self, sequence: Sequence) -> None:
        """It has tokens to compute that the host knows."""
        insort(self.prefilling, sequence, key=lambda each: each.order)

    def leave(self, sequence: Sequence) -> None:
        """Take slot and blocks back."""
        self._memory.release(sequence, int(self._rows.last_step[sequence.slot]))
        self._rows.leave(sequence)
        self.pressure.forget(sequence)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)

    def copied(self, copy_id: int, *, ok: bool) -> None:
        """A copy has ended, well or not: then what it was to bring is computed anew."""
        sequence = self._swap.complete(copy_id, ok=ok)
        if sequence is not None and not ok:
            self._preempt(sequence)
        elif sequence is not None and not sequence.parked:
            self.add_prefilling(sequence)
        self.pressure.preempt_settled()

    def rewind(self, sequence: Sequence) -> None:
        """It sampled nothing in this step: its last known token is to be computed once more.

        Its rows in later steps read a token that was never there: they are stale.
        """
        rows, slot = self._rows, sequence.slot
        sequence.since = self._memory.pool.next_step
        rows.known[slot] = sequence.num_known
        rows.computed[slot] = sequence.num_known - 1
        rows.decoding[slot] = False
        if sequence not in self.prefilling:
            self.add_prefilling(sequence)

    def restart_sharers(
        self, launched: LaunchedStep, result: StepResult, live: Iterable[Sequence]
    ) -> None:
        """Who found a block in the cache that was never written begins again."""
        hurt = {launched.sequences[row].seq_id for row in result.errors}
        for sequence in tuple(live):
            lost = sequence.node is not None and sequence.node.failed
            if lost and (sequence.seq_id not in hurt or sequence.since > result.step_id):
                self._preempt(sequence)

    def _give_way(self, sequence: Sequence) -> None:
        """Preempt a sequence without launched steps; what it has computed may go to the host."""
        self._swap.put_away(sequence)
        self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's slot and blocks; it waits in its old place to come back."""
        self.leave(sequence)
        sequence.state = RequestState.PREEMPTED
        sequence.preemptions += 1
        sequence.forced.clear()  # the slot's next SlotInit has them
        self.preemptions += 1
        self._queue.push(sequence)
