"""`SwapSpace`: host memory for the KV blocks of sequences that gave way, and what goes there.

Ids only, as in `block_pool`: the host's blocks are a pool of their own, and the bytes are moved by
whoever launches the copies that are decided here. A copy counts as a launched step: the device's
blocks that it reads or writes are leased to it, and so are the host's; a sequence that is coming
back has its slot and its blocks, and takes part in steps only when the copy has ended.

Copying what a sequence has computed costs time that grows with its length, and computing it anew
costs more of it, but that needs no host memory and the prefix cache often has the beginning still:
so short sequences are left to be computed again, and all of them where there is no room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aengine.batch import BlockCopy
from aengine.policy.block_pool import NEVER, BlockPool
from aengine.policy.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aengine.policy.kv_memory import KVMemory
    from aengine.policy.row_table import RowTable
    from aengine.policy.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Launched:
    """What is remembered of a copy until it has ended."""

    sequence: Sequence
    slot: int
    """That waits for it; 0: it goes to the host."""


class SwapSpace:
    """Decides who is copied where.

    Args:
        memory: the device's blocks.
        rows: the running sequences.
        num_blocks: blocks of host memory; 0: everybody is computed anew.
        block_size: tokens per block.
        min_tokens: fewer computed tokens are not worth a copy.
    """

    def __init__(
        self,
        memory: KVMemory,
        rows: RowTable,
        *,
        num_blocks: int,
        block_size: int,
        min_tokens: int,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.outs = self.ins = 0
        """Sequences that were copied to the host, and back."""
        self._memory = memory
        self._rows = rows
        self._block_size = block_size
        self._min_tokens = min_tokens
        self._decided: list[BlockCopy] = []
        self._launched: dict[int, _Launched] = {}

    @property
    def in_flight(self) -> int:
        """Copies that have not ended."""
        return len(self._launched)

    def take(self) -> list[BlockCopy]:
        """The copies decided since the last call, in order: to be launched now."""
        taken, self._decided = self._decided, []
        return taken

    def put_away(self, sequence: Sequence) -> None:
        """It is about to lose its blocks: copy what it has computed, if that is worth it.

        No launched step may touch it any more.
        """
        slot = sequence.slot
        tokens = int(self._rows.computed[slot])
        # One that gives way again on its way back is on the host still.
        if sequence.swapped or not self.pool.num_blocks or tokens < self._min_tokens:
            return
        count = -(-tokens // self._block_size)
        if not self.pool.extend(sequence.host, count):
            return
        sequence.swapped = tokens
        self.outs += 1
        self._launch(sequence, 0, count, slot=0)

    def bring_back(self, sequences: Iterable[Sequence]) -> None:
        """Copy to these sequences, which have slots and blocks, what the cache did not have."""
        rows = self._rows
        for sequence in sequences:
            slot = sequence.slot
            first = int(rows.computed[slot]) // self._block_size
            self.ins += 1
            self._launch(sequence, first, -(-sequence.swapped // self._block_size), slot=slot)
            rows.computed[slot] = min(sequence.swapped, sequence.num_known - 1)
            rows.pending[slot] += 1
            sequence.since = sequence.copying

    def _launch(self, sequence: Sequence, first: int, stop: int, *, slot: int) -> None:
        copy_id = self._memory.pool.next_step
        self._memory.pool.launch(copy_id)
        self.pool.launch(copy_id)
        self._rows.last_step[sequence.slot] = copy_id
        sequence.copying = copy_id
        self._launched[copy_id] = _Launched(sequence, slot)
        self._decided.append(
            BlockCopy(
                copy_id=copy_id,
                to_host=not slot,
                device_blocks=tuple(sequence.blocks)[first:stop],
                host_blocks=tuple(sequence.host)[first:stop],
            )
        )

    def complete(self, copy_id: int, *, ok: bool) -> Sequence | None:
        """A copy has ended; the sequence that waits in its slot for that, if it still does.

        Args:
            copy_id: which.
            ok: whether it did what it was to do. If not, the sequence has nothing on the host.
        """
        copy = self._launched.pop(copy_id)
        self._memory.pool.complete(copy_id)
        self.pool.complete(copy_id)
        if copy.slot:
            self._rows.settle(Runs([copy.slot]))
        sequence = copy.sequence
        if sequence.copying != copy_id:
            return None
        sequence.copying = NEVER
        waits = bool(copy.slot) and sequence.slot == copy.slot
        # Who is to give way again keeps what is on the host.
        if not ok or (waits and not sequence.parked):
            self.drop(sequence)
        return sequence if waits else None

    def drop(self, sequence: Sequence) -> None:
        """It needs nothing on the host any more: free when the copy that touches it has ended."""
        self.pool.release(sequence.host, sequence.copying)
        sequence.swapped = 0
        sequence.copying = NEVER
