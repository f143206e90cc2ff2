"""The ring of mask buffers: never handed out again before it was released."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aengine.grammar import BitmaskLease, BitmaskRing


def test_a_lease_has_the_shape_of_packed_masks() -> None:
    ring = BitmaskRing(2, rows=3, vocab_size=65)
    lease = ring.lease_nowait()
    assert lease is not None
    assert lease.array.shape == (3, 3)
    assert lease.array.dtype == np.int32
    assert ring.rows == 3


def test_all_leased_is_none_and_release_brings_one_back() -> None:
    ring = BitmaskRing(2, rows=1, vocab_size=32)
    first, second = ring.lease_nowait(), ring.lease_nowait()
    assert first is not None
    assert second is not None
    assert ring.lease_nowait() is None
    memory = first.array
    first.release()
    third = ring.lease_nowait()
    assert third is not None
    assert third.array is memory


def test_a_released_lease_cannot_be_used_and_releases_once() -> None:
    ring = BitmaskRing(1, rows=1, vocab_size=32)
    lease = ring.lease_nowait()
    assert lease is not None
    lease.release()
    lease.release()
    assert ring.free == 1
    with pytest.raises(RuntimeError, match="released"):
        _ = lease.array


def test_memory_may_come_from_the_caller() -> None:
    made: list[np.ndarray[Any, Any]] = []

    def allocate(rows: int, words: int) -> np.ndarray[Any, Any]:
        made.append(np.zeros((rows, words), np.int32))
        return made[-1]

    ring = BitmaskRing(2, 4, 100, allocate)
    lease = ring.lease_nowait()
    assert lease is not None
    assert any(lease.array is memory for memory in made)
    with pytest.raises(ValueError, match="contiguous int32"):
        BitmaskRing(1, 4, 100, lambda rows, words: np.zeros((rows, words + 1), np.int32))
    with pytest.raises(ValueError, match="needs buffers"):
        BitmaskRing(0, 4, 100)


class RingMachine(RuleBasedStateMachine):
    """Any order of leases and releases: what is leased keeps what its holder wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = BitmaskRing(3, rows=2, vocab_size=64)
        self.held: dict[int, BitmaskLease] = {}
        self.mark = 0

    @rule()
    def lease(self) -> None:
        lease = self.ring.lease_nowait()
        assert (lease is None) == (len(self.held) == 3)
        if lease is not None:
            self.mark += 1
            lease.array[:] = self.mark
            self.held[self.mark] = lease

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            mark = data.draw(st.sampled_from(sorted(self.held)))
            self.held.pop(mark).release()

    @invariant()
    def nobody_else_wrote(self) -> None:
        assert self.ring.free + len(self.held) == 3
        for mark, lease in self.held.items():
            assert (lease.array == mark).all()


TestRing = RingMachine.TestCase
