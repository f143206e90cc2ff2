"""Prefix cache: a tree over KV block ids that finds the longest computed beginning of a prompt.

One node is one full block; its key is the exact token ids of the block, so equal keys under equal
parents mean equal prefixes and no hash can collide into another request's keys and values. A root
per `cache_salt` keeps salts apart; a generation makes everything older unreachable after new
weights (radix tree and LRU leaves as in SGLang's RadixAttention, arXiv 2312.07104).

A sequence that holds a node's block holds the blocks of all nodes above it, so the unreferenced
nodes of the tree are always whole subtrees, and leaves can be evicted one by one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aengine.policy.block_pool import BlockPool


class Node:
    """A cached block, or a root (`parent` is None, `block` is 0)."""

    __slots__ = ("block", "children", "failed", "key", "linked", "parent", "step", "used_at")

    def __init__(self, parent: Node | None, key: bytes, block: int, step: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.step = step
        """The launched step that writes the block's keys and values."""
        self.children: dict[bytes, Node] = {}
        self.used_at = 0
        self.linked = parent is not None
        """Whether a lookup can reach it."""
        self.failed = False
        """Whether its keys and values were never written, because the step failed."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached beginning: its blocks in order and the node of the last one."""

    node: Node
    blocks: list[int]


class PrefixCache:
    """Finds, keeps and evicts cached blocks.

    Args:
        pool: where the blocks come from and go back to.
        block_size: tokens per block.
        enabled: False: nothing is kept and nothing is found.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, enabled: bool = True) -> None:
        self.enabled = enabled
        self.generation = 0
        self.num_nodes = 0
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._pool = pool
        self._width = 4 * block_size
        self._block_size = block_size
        self._roots: dict[str | None, Node] = {}
        self._idle: list[tuple[int, int, Node]] = []
        self._clock = 0

    def root(self, salt: str | None) -> Node:
        """Where prefixes of this salt begin."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) > 2 * self.num_nodes + 64:
                # A salt per user must not grow a dictionary for ever.
                self._roots = {key: root for key, root in self._roots.items() if root.children}
            root = self._roots[salt] = Node(None, b"", 0, 0)
        return root

    def match(self, salt: str | None, tokens: bytes, most_tokens: int) -> Match:
        """The longest cached beginning of `tokens`, whole blocks, at most `most_tokens` long.

        Args:
            salt: only prefixes cached under the same salt are seen.
            tokens: token ids as consecutive native int32.
            most_tokens: bound of the match in tokens.
        """
        node = self.root(salt)
        blocks: list[int] = []
        width = self._width
        most = min(len(tokens) // width, max(0, most_tokens) // self._block_size)
        for start in range(0, most * width, width):
            child = node.children.get(tokens[start : start + width])
            if child is None:
                break
            blocks.append(child.block)
            node = child
        return Match(node, blocks)

    def count_lookup(self, queried: int, hit: int) -> None:
        """Note an admitted request's lookup in the statistics, in tokens."""
        self.queried_tokens += queried
        self.hit_tokens += hit

    def find(self, parent: Node, key: bytes) -> Node | None:
        """The child of `parent` for a block of tokens."""
        return parent.children.get(key)

    def insert(self, parent: Node, key: bytes, block: int, step: int) -> Node:
        """Make a used block findable.

        Args:
            parent: the node of the block before it, or a root.
            key: the block's token ids as native int32.
            block: its id.
            step: the launched step that writes it.
        """
        node = Node(parent, key, block, step)
        self._pool.cache(block)
        parent.children[key] = node
        self.num_nodes += 1
        return node

    # -- eviction ------------------------------------------------------------------------------

    def touch(self, node: Node) -> None:
        """A sequence that ended at this node has released it: it was used just now."""
        self._clock += 1
        now = self._clock
        # A node that failed is gone, and what it hung on may be a leaf now.
        while not node.linked and node.parent is not None:
            node = node.parent
        self._offer_at(node, now)
        above: Node | None = node
        while above is not None:
            above.used_at = now
            above = above.parent

    def _offer_at(self, node: Node, time: int) -> None:
        """Put a node among the candidates for eviction if it is an unreferenced leaf."""
        if node.linked and not node.children and not self._pool.references(node.block):
            if len(self._idle) > 2 * self.num_nodes + 64:
                self._idle = [entry for entry in self._idle if self._evictable(entry)]
                heapq.heapify(self._idle)
            heapq.heappush(self._idle, (time, node.block, node))

    def _evictable(self, entry: tuple[int, int, Node]) -> bool:
        time, _, node = entry
        return (
            node.linked
            and not node.children
            and node.used_at == time
            and not self._pool.references(node.block)
        )

    def evict(self, count: int) -> None:
        """Free the least recently used unreferenced leaves until `count` blocks are free.

        A leaf that a launched step may still touch stays: giving it up would free nothing now.
        """
        kept: list[tuple[int, int, Node]] = []
        while self._pool.num_free < count and self._idle:
            entry = heapq.heappop(self._idle)
            if not self._evictable(entry):
                continue
            node = entry[2]
            if self._pool.is_leased(node.block):
                kept.append(entry)
                continue
            self._unlink(node)
            parent = node.parent
            if parent is not None:
                del parent.children[node.key]
                self._offer_at(parent, parent.used_at)
        for entry in kept:
            heapq.heappush(self._idle, entry)

    def _unlink(self, node: Node) -> None:
        node.linked = False
        self.num_nodes -= 1
        self._pool.uncache(node.block)

    # -- invalidation --------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Forget everything: what is cached was computed with something that has changed."""
        self.generation += 1
        for root in self._roots.values():
            for node in _subtree(root):
                if node.linked:
                    self._unlink(node)
        self._roots.clear()
        self._idle.clear()

    def fail(self, node: Node) -> None:
        """The step that was to write this node failed: forget it and everything below it."""
        for each in _subtree(node):
            each.failed = True
            if each.linked:
                self._unlink(each)
        if node.parent is not None and node.parent.children.get(node.key) is node:
            del node.parent.children[node.key]
            self._offer_at(node.parent, node.parent.used_at)


def _subtree(node: Node) -> list[Node]:
    found = [node]
    for each in found:
        found += each.children.values()
    return found
