"""The block pool against a model of it, and the misuse it refuses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aengine.policy.block_pool import BlockPool, BlockTable

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables come, grow and go while steps are launched and complete."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.tables: list[BlockTable] = []
        self.last_step: dict[int, int] = {}
        self.in_flight: dict[int, set[int]] = {}
        self.cached: set[int] = set()
        self.next_step = 1

    def touchable(self) -> set[int]:
        """Blocks that a launched step may touch."""
        return set().union(*self.in_flight.values()) if self.in_flight else set()

    @rule(count=st.integers(1, 5))
    def extend(self, count: int) -> None:
        table = BlockTable()
        free = self.pool.num_free
        if self.pool.extend(table, count):
            self.tables.append(table)
            assert not set(table) & self.touchable()
            assert self.pool.num_free == free - count
        else:
            assert free < count
            assert len(table) == 0

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def extend_each(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.tables), unique_by=id, min_size=1))
        before = [list(table) for table in chosen]
        blocks = self.pool.extend_each(chosen)
        if blocks is None:
            assert self.pool.num_free < len(chosen)
            assert [list(table) for table in chosen] == before
        else:
            assert [table[len(table) - 1] for table in chosen] == blocks
            assert not set(blocks) & self.touchable()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.tables), unique_by=id, min_size=1))
        step = self.next_step
        self.next_step += 1
        self.pool.launch(step)
        self.in_flight[step] = set().union(*map(set, rows))
        for table in rows:
            self.last_step[id(table)] = step

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.pool.complete(step)
        del self.in_flight[step]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        last = self.last_step.pop(id(table), 0)
        blocks = list(table)
        self.pool.release(table, last)
        assert len(table) == 0
        counts = (self.pool.num_free, self.pool.num_cached, self.pool.num_leased)
        self.pool.release(table, last)
        assert counts == (self.pool.num_free, self.pool.num_cached, self.pool.num_leased)
        self.tables = [each for each in self.tables if each is not table]
        alive = set().union(*map(set, self.tables)) if self.tables else set()
        gone = set(blocks) - alive - self.cached
        assert not gone & set(self.pool._free) & self.touchable()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        held = sorted({block for table in self.tables for block in table} - self.cached)
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.cache(block)
            self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.uncache(block)
        self.cached.discard(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        table = BlockTable()
        self.pool.share(table, blocks)
        assert list(table) == blocks
        self.tables.append(table)

    @precondition(lambda self: self.cached and self.tables)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        others = sorted(self.cached - set(table))
        if others:
            index = data.draw(st.integers(0, len(table) - 1))
            block = data.draw(st.sampled_from(others))
            self.pool.exchange(table, index, block, self.last_step.get(id(table), 0))
            assert table[index] == block

    @invariant()
    def states_are_disjoint_and_complete(self) -> None:
        used = {block for table in self.tables for block in table}
        free = set(self.pool._free)
        leased = {block for blocks in self.pool._leases.values() for block in blocks}
        cached = self.cached - used
        assert len(free) == self.pool.num_free == len(self.pool._free)
        assert len(leased) == self.pool.num_leased
        assert len(cached) == self.pool.num_cached
        assert len(used) == self.pool.num_used
        assert used | free | leased | cached == set(range(1, TOTAL + 1))
        assert len(used) + len(free) + len(leased) + len(cached) == TOTAL
        assert not free & self.touchable(), "a free block can be touched by a launched step"

    @invariant()
    def references_are_counted(self) -> None:
        for block in range(1, TOTAL + 1):
            assert self.pool.references(block) == sum(list(t).count(block) for t in self.tables)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_padding_block_is_never_handed_out() -> None:
    pool, table = BlockPool(3), BlockTable()
    assert pool.extend(table, 3)
    assert sorted(table) == [1, 2, 3]
    assert not pool.extend(BlockTable(), 1)


def test_a_released_block_waits_for_its_step_and_for_those_before_it() -> None:
    pool, table = BlockPool(2), BlockTable()
    pool.extend(table, 1)
    pool.launch(1)
    pool.launch(2)
    pool.release(table, 2)
    assert (pool.num_free, pool.num_leased) == (1, 1)
    pool.complete(2)
    assert (pool.num_free, pool.num_leased) == (1, 1)
    pool.complete(1)
    assert (pool.num_free, pool.num_leased) == (2, 0)


def test_a_block_no_launched_step_touches_is_free_at_once() -> None:
    pool, old, new = BlockPool(2), BlockTable(), BlockTable()
    pool.extend(old, 1)
    pool.launch(1)
    pool.complete(1)
    pool.extend(new, 1)
    pool.launch(2)
    pool.release(old, 1)
    assert (pool.num_free, pool.num_leased, pool.num_used) == (1, 0, 1)


def test_step_ids_must_grow() -> None:
    pool = BlockPool(1)
    pool.launch(2)
    with pytest.raises(ValueError, match="launched after step 2"):
        pool.launch(2)


def test_only_used_blocks_enter_the_cache_and_only_cached_ones_are_shared() -> None:
    pool, table = BlockPool(2), BlockTable()
    with pytest.raises(ValueError, match="not a used block"):
        pool.cache(1)
    pool.extend(table, 1)
    pool.release(table, 0)
    with pytest.raises(ValueError, match="not in the prefix cache"):
        pool.share(table, [1])
