"""`SchedulerStats`: a snapshot of the scheduler's counts."""

from __future__ import annotations

from dataclasses import dataclass


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
