"""`KVMemory`: the pool and the prefix cache as one running sequence sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.policy.block_pool import NEVER, BlockPool
from aengine.policy.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Container
    from collections.abc import Sequence as Seq

    from aengine.policy.prefix_cache import Node
    from aengine.policy.row_table import RowTable
    from aengine.policy.sequence import Sequence


class KVMemory:
    """Gives sequences their blocks, keeps what they computed, takes everything back.

    Args:
        num_blocks: usable blocks.
        block_size: tokens per block.
        enable_prefix_cache: whether computed blocks are kept for later requests.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size=block_size, enabled=enable_prefix_cache)
        self._block_size = block_size

    def admit(self, sequence: Sequence, *, alone: bool) -> bool:
        """Blocks for all known tokens, cached ones first; or nothing, and False.

        Args:
            sequence: one without blocks.
            alone: nothing runs whose growth needs blocks to be left over.
        """
        known = sequence.num_known
        if self.cache.enabled:
            self._share(sequence, known)
        missing = self.missing(sequence, known)
        # One that was preempted comes back only if it can go on for more than a few tokens.
        growth = self.pool.num_blocks // 100 + (1 if sequence.preemptions else 0)
        spare = 0 if alone else growth
        within_reach = self.pool.num_free + self.pool.num_cached >= missing + spare
        if within_reach and self._extend(sequence, missing):
            return True
        self.release(sequence, NEVER)
        return False

    def _share(self, sequence: Sequence, known: int) -> None:
        # The last token is computed whatever the cache holds: the sample needs its logits. Prompt
        # log-probabilities need the logits of every position that has none yet.
        most = len(sequence.prompt_logprobs) - 1 if sequence.wants_prompt_logprobs else known - 1
        tokens = sequence.key(0, known)
        match = self.cache.match(sequence.request.cache_salt, tokens, most)
        self.pool.share(sequence.blocks, match.blocks)
        sequence.node, sequence.num_nodes = match.node, len(match.blocks)
        sequence.caching, sequence.generation = True, self.cache.generation

    def count_match(self, sequence: Sequence) -> int:
        """Tokens of a just admitted sequence that need not be computed; counted as a lookup."""
        cached = sequence.num_nodes * self._block_size
        if self.cache.enabled:
            self.cache.count_lookup(sequence.num_known, cached)
        return cached

    def is_written_by(self, sequence: Sequence, steps: Container[int]) -> bool:
        """Whether one of these launched steps writes a block that the sequence found cached."""
        node = sequence.node
        while node is not None and node.step > self.pool.settled:
            if node.step in steps:
                return True
            node = node.parent
        return False

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for `tokens` tokens in all; or nothing, and False."""
        return self._extend(sequence, self.missing(sequence, tokens))

    def grow_each(self, sequences: Seq[Sequence]) -> list[int] | None:
        """One more block for each, in order; or nothing, and None."""
        if self.pool.num_free < len(sequences):
            self.cache.evict(len(sequences))
        return self.pool.extend_each([sequence.blocks for sequence in sequences])

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """How many blocks it lacks for `tokens` tokens in all."""
        return -(-tokens // self._block_size) - len(sequence.blocks)

    def _extend(self, sequence: Sequence, count: int) -> bool:
        if count <= 0:
            return True
        if self.pool.num_free < count:
            self.cache.evict(count)
        return self.pool.extend(sequence.blocks, count)

    def commit_launched(self, sequence: Sequence, tokens: int, step_id: int) -> Node | None:
        """Make the full blocks findable that the step being launched writes.

        Steps run one after the other on the device, so whoever finds such a block runs later, or in
        a later row of the same step.

        Args:
            sequence: whose blocks.
            tokens: that many of its tokens are known, and computed when the step is done.
            step_id: the step.

        Returns:
            The first node that this call made, if it made any.
        """
        first: Node | None = None
        while (place := self._next_place(sequence, tokens)) is not None:
            parent, key, index = place
            # One that exists was computed by somebody else: settled when this step has settled,
            # because the table of a step must name the blocks that the step writes.
            if self.cache.find(parent, key) is not None:
                break
            node = self.cache.insert(parent, key, sequence.blocks[index], step_id)
            self._went_in(sequence, node)
            first = first or node
        return first

    def commit_settled(self, sequence: Sequence, tokens: int, rows: RowTable) -> int | None:
        """Make full blocks findable whose keys and values are written.

        Where the cache has the same tokens in another block already, the sequence takes that block
        and gives its own back.

        Args:
            sequence: whose blocks.
            tokens: that many of its tokens are known and computed.
            rows: know the newest launched step that touches it.

        Returns:
            The index of the first block that was exchanged, if one was.
        """
        changed: int | None = None
        while (place := self._next_place(sequence, tokens)) is not None:
            parent, key, index = place
            node = self.cache.find(parent, key)
            if node is None:
                node = self.cache.insert(parent, key, sequence.blocks[index], NEVER)
            elif node.step > self.pool.settled:
                # Another sequence computes the same at this moment. Reading its block before it is
                # written must not depend on who runs first, so this one keeps to itself.
                sequence.caching = False
                break
            else:
                last_step = int(rows.last_step[sequence.slot])
                self.pool.exchange(sequence.blocks, index, node.block, last_step)
                changed = index if changed is None else changed
            self._went_in(sequence, node)
        return changed

    def _next_place(self, sequence: Sequence, tokens: int) -> tuple[Node, bytes, int] | None:
        """Parent, key and index of the sequence's first block that is not in the cache."""
        index, size = sequence.num_nodes, self._block_size
        if not sequence.caching or (index + 1) * size > tokens:
            return None
        if sequence.generation != self.cache.generation:
            sequence.caching = False
            return None
        parent = sequence.node if index else self.cache.root(sequence.request.cache_salt)
        if parent is None:
            return None
        return parent, sequence.key(index * size, (index + 1) * size), index

    def _went_in(self, sequence: Sequence, node: Node) -> None:
        sequence.node = node
        sequence.num_nodes += 1

    def release(self, sequence: Sequence, last_step: int) -> None:
        """Take all blocks back. `last_step` is the newest launched step that can touch them."""
        self.pool.release(sequence.blocks, last_step)
        node, sequence.node = sequence.node, None
        sequence.num_nodes = 0
        sequence.caching = False
        if node is not None:
            self.cache.touch(node)
