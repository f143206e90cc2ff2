"""What a settled step means for the prefix cache: what it wrote, and what it failed to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aengine.batch import StepResult
    from aengine.policy.kv_memory import KVMemory
    from aengine.policy.planning import LaunchedStep
    from aengine.policy.prefix_cache import PrefixCache
    from aengine.policy.row_table import RowTable


def keep_computed(
    launched: LaunchedStep, result: StepResult, memory: KVMemory, rows: RowTable
) -> None:
    """Put the blocks that a step filled into the prefix cache, before its tokens are appended."""
    if not memory.cache.enabled:
        return
    num_decode, errors = launched.plan.num_decode, result.errors
    done = [(num_decode + index, chunk.stop) for index, chunk in enumerate(launched.chunks)]
    for row, stop in launched.filled + done:
        sequence = launched.sequences[row]
        if not launched.is_stale(sequence) and row not in errors:
            # What sampled nothing will compute its last token again: that block is not done yet.
            stop -= row in result.unsampled
            changed = memory.commit_settled(sequence, stop, rows)
            if changed is not None:
                rows.write_blocks(sequence, changed)


def forget_unwritten(
    launched: LaunchedStep,
    in_flight: Iterable[LaunchedStep],
    result: StepResult,
    cache: PrefixCache,
) -> bool:
    """Take the blocks out of the cache that failed rows were to write; whether there were any.

    Args:
        launched: the step with the failed rows.
        in_flight: the steps launched after it.
        result: says which rows failed.
        cache: what may hold their blocks.
    """
    nodes = [node for row, node in launched.inserted.items() if row in result.errors]
    # A block may have been begun by this step and completed by a later one.
    hurt = {launched.sequences[row].seq_id for row in result.errors}
    for later in in_flight:
        for row, node in later.inserted.items():
            sequence = later.sequences[row]
            if sequence.seq_id in hurt and sequence.since <= result.step_id:
                nodes.append(node)
    for node in nodes:
        cache.fail(node)
    return bool(nodes)
