"""`Deadlines`: which live sequences are due, on the scheduler's clock."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


class Deadlines:
    """Deadlines by time. Entries of sequences that ended are passed over.

    Args:
        live: the sequence ids that have not ended; kept up to date by its owner.
    """

    def __init__(self, live: Container[int]) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []
        self._size_at_sweep = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq_id: int, deadline: float) -> None:
        """This sequence is due at `deadline`, seconds."""
        heapq.heappush(self._heap, (deadline, seq_id))
        if len(self._heap) > 2 * self._size_at_sweep + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
            self._size_at_sweep = len(self._heap)

    def take_due(self, now: float) -> list[int]:
        """Remove and return the sequences whose deadline has passed, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, seq_id = heapq.heappop(self._heap)
            if seq_id in self._live:
                due.append(seq_id)
        return due

    def soonest(self) -> float | None:
        """The earliest deadline of a live sequence."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
