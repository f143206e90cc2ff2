"""The prefix cache against a dictionary of prefixes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aengine.policy.block_pool import BlockPool, BlockTable
from aengine.policy.prefix_cache import Node, PrefixCache
from aengine.policy.sequence import pack

BLOCK = 2
TOTAL = 14
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
SALTS = st.sampled_from([None, "a"])


class Holder:
    """A sequence: it shares a prefix and computes the rest."""

    def __init__(self, salt: str | None, tokens: list[int]) -> None:
        self.salt, self.tokens = salt, tokens
        self.table = BlockTable()
        self.node: Node | None = None


class CacheMachine(RuleBasedStateMachine):
    """Sequences match, extend, cache what they computed, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.cache = PrefixCache(self.pool, block_size=BLOCK)
        self.content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.holders: list[Holder] = []
        self.steps: list[int] = []
        self.next_step = 1

    @rule(salt=SALTS, tokens=TOKENS)
    def arrive(self, salt: str | None, tokens: list[int]) -> None:
        holder = Holder(salt, tokens)
        most = len(tokens) - 1
        match = self.cache.match(salt, pack(tokens), most)
        assert len(match.blocks) * BLOCK <= most
        for index, block in enumerate(match.blocks):
            prefix = tuple(tokens[: (index + 1) * BLOCK])
            assert self.content[block] == (salt, prefix), "a hit holds other tokens"
        self.pool.share(holder.table, match.blocks)
        holder.node = match.node
        missing = -(-len(tokens) // BLOCK) - len(match.blocks)
        if self.pool.num_free < missing:
            reachable = self.pool.num_free + self.pool.num_cached
            self.cache.evict(missing)
            if not self.steps:
                assert self.pool.num_free >= min(missing, reachable)
        if not self.pool.extend(holder.table, missing):
            self.pool.release(holder.table, 0)
            self.cache.touch(match.node)
            return
        node = match.node
        for index in range(len(match.blocks), len(tokens) // BLOCK):
            key = pack(tokens[index * BLOCK : (index + 1) * BLOCK])
            found = self.cache.find(node, key)
            if found is None:
                block = holder.table[index]
                self.content[block] = (salt, tuple(tokens[: (index + 1) * BLOCK]))
                node = self.cache.insert(node, key, block, 0)
            else:
                self.pool.exchange(holder.table, index, found.block, 0)
                node = found
        holder.node = node
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), in_flight=st.booleans())
    def leave(self, data: st.DataObject, in_flight: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        last = 0
        if in_flight:
            last = self.next_step
            self.next_step += 1
            self.pool.launch(last)
            self.steps.append(last)
        self.pool.release(holder.table, last)
        assert holder.node is not None
        self.cache.touch(holder.node)

    @precondition(lambda self: self.steps)
    @rule()
    def complete(self) -> None:
        self.pool.complete(self.steps.pop(0))

    @rule(count=st.integers(1, TOTAL))
    def evict(self, count: int) -> None:
        self.cache.evict(count)
        if not self.steps and self.pool.num_free < count:
            assert self.pool.num_cached == 0, "an unreferenced leaf was not found"

    @rule()
    def invalidate(self) -> None:
        self.cache.invalidate()
        assert self.cache.num_nodes == self.pool.num_cached == 0
        # What runs on keeps its blocks and adds nothing to the new generation.
        self.content.clear()
        for holder in self.holders:
            holder.node = self.cache.root("nobody")

    @invariant()
    def books_balance(self) -> None:
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_leased + pool.num_used == TOTAL
        used = {block for holder in self.holders for block in holder.table}
        assert pool.num_used == len(used)

    @invariant()
    def who_holds_a_node_holds_those_above(self) -> None:
        for holder in self.holders:
            held = set(holder.table)
            node = holder.node
            while node is not None and node.parent is not None:
                assert node.block in held
                node = node.parent


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def cached(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: str | None = None) -> None:
    """Put a prompt into the cache and let it go."""
    table, node = BlockTable(), cache.root(salt)
    pool.extend(table, len(tokens) // BLOCK)
    for index in range(len(tokens) // BLOCK):
        key = pack(tokens[index * BLOCK : (index + 1) * BLOCK])
        node = cache.insert(node, key, table[index], 0)
    pool.release(table, 0)
    cache.touch(node)


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = BlockPool(6)
    cache = PrefixCache(pool, block_size=BLOCK)
    cached(cache, pool, [1, 1, 2, 2])
    cached(cache, pool, [3, 3, 4, 4])
    table = BlockTable()
    match = cache.match(None, pack([1, 1, 2, 2]), 4)
    pool.share(table, match.blocks)
    pool.release(table, 0)
    cache.touch(match.node)
    cache.evict(4)
    assert len(cache.match(None, pack([1, 1, 2, 2]), 4).blocks) == 2
    assert len(cache.match(None, pack([3, 3, 4, 4]), 4).blocks) == 0


def test_salts_do_not_see_each_other() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, block_size=BLOCK)
    cached(cache, pool, [1, 1, 2, 2], salt="a")
    assert not cache.match(None, pack([1, 1, 2, 2]), 4).blocks
    assert not cache.match("b", pack([1, 1, 2, 2]), 4).blocks
    assert len(cache.match("a", pack([1, 1, 2, 2]), 4).blocks) == 2


def test_many_salts_leave_nothing_behind() -> None:
    cache = PrefixCache(BlockPool(8), block_size=BLOCK)
    for user in range(1000):
        cache.match(f"user {user}", pack([1, 1]), 2)
    assert len(cache._roots) < 100


def test_a_hot_prefix_does_not_grow_the_candidates_for_ever() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=BLOCK)
    cached(cache, pool, [1, 1])
    for _ in range(1000):
        table = BlockTable()
        match = cache.match(None, pack([1, 1]), 2)
        pool.share(table, match.blocks)
        pool.release(table, 0)
        cache.touch(match.node)
    assert len(cache._idle) < 100
    cache.evict(4)
    assert pool.num_free == 4


def test_what_a_failed_block_hung_on_can_be_evicted() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=BLOCK)
    table = BlockTable()
    pool.extend(table, 2)
    above = cache.insert(cache.root(None), pack([1, 1]), table[0], 0)
    failed = cache.insert(above, pack([2, 2]), table[1], 1)
    cache.fail(failed)
    pool.release(table, 0)
    cache.touch(failed)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    cache.evict(4)
    assert pool.num_free == 4
