"""Snapshots of the scheduler: `SchedulerStats`, its counts, and `WorkAhead`, what is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from aengine.policy.admission import WaitingQueue
    from aengine.policy.kv_memory import KVMemory
    from aengine.policy.row_table import RowTable
    from aengine.policy.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot. `free + cached + leased + used == total` blocks, always."""

    running: int
    waiting: int
    steps_in_flight: int
    preemptions: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    leased_blocks: int
    used_blocks: int
    cache_nodes: int
    cache_queried_tokens: int
    cache_hit_tokens: int


def snapshot(
    memory: KVMemory, *, running: int, waiting: int, steps_in_flight: int, preemptions: int
) -> SchedulerStats:
    """The counts of a scheduler and its memory."""
    pool, cache = memory.pool, memory.cache
    return SchedulerStats(
        running=running,
        waiting=waiting,
        steps_in_flight=steps_in_flight,
        preemptions=preemptions,
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        leased_blocks=pool.num_leased,
        used_blocks=pool.num_used,
        cache_nodes=cache.num_nodes,
        cache_queried_tokens=cache.queried_tokens,
        cache_hit_tokens=cache.hit_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAhead:
    """What there is for each lane. Tokens are those not launched yet; times are seconds.

    Args:
        decode_rows, decode_context: decoding sequences, and tokens of context of all of them.
        prefill_begun, prefill_waiting: host-known tokens of sequences with and without a slot.
        oldest_wait: how long the most urgent waiting request has waited.
    """

    decode_rows: int
    decode_context: int
    prefill_begun: int
    prefill_waiting: int
    oldest_wait: float


def work_ahead(
    rows: RowTable, prefilling: Seq[Sequence], queue: WaitingQueue, lane: int, now: float
) -> WorkAhead:
    """See `WorkAhead`; `lane` is the one that decodes."""
    decoding = rows.decoding & rows.free_for(lane)
    first = queue.peek()
    return WorkAhead(
        decode_rows=int(decoding.sum()),
        decode_context=int(rows.computed[decoding].sum()),
        prefill_begun=sum(each.num_known - int(rows.computed[each.slot]) for each in prefilling),
        prefill_waiting=queue.tokens,
        oldest_wait=0.0 if first is None else max(0.0, now - first.request.arrival),
    )
