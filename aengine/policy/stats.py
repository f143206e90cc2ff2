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
    from aengine.policy.swap_space import SwapSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot. `free + cached + leased + used == total` blocks, always, and on the host
    `host_free + host_leased + swapped == host_total`."""

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
    host_total_blocks: int = 0
    host_free_blocks: int = 0
    host_leased_blocks: int = 0
    swapped_blocks: int = 0
    copies_in_flight: int = 0
    swapped_out: int = 0
    """Sequences whose blocks were copied to the host when they gave way."""
    swapped_in: int = 0


def snapshot(
    memory: KVMemory,
    swap: SwapSpace,
    *,
    running: int,
    waiting: int,
    steps_in_flight: int,
    preemptions: int,
) -> SchedulerStats:
    """The counts of a scheduler and its memory."""
    pool, cache, host = memory.pool, memory.cache, swap.pool
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
        host_total_blocks=host.num_blocks,
        host_free_blocks=host.num_free,
        host_leased_blocks=host.num_leased,
        swapped_blocks=host.num_used,
        copies_in_flight=swap.in_flight,
        swapped_out=swap.outs,
        swapped_in=swap.ins,
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
