"""From decisions to a `StepPlan`: copies of the running sequences' numbers for one step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from aengine.batch import ForcedTokens, SlotInit, StepPlan
from aengine.policy.runs import Runs
from aengine.request import RequestState

if TYPE_CHECKING:
    from aengine.batch import IntArray
    from aengine.policy.prefix_cache import Node
    from aengine.policy.row_table import RowTable
    from aengine.policy.sequence import Sequence


MOST_LOGPROB_POSITIONS = 512
"""Prompt positions of one step whose log-probabilities are wanted: each needs logits of the whole
vocabulary, so this bounds what a step takes however large its token budget is."""


class Work(enum.IntEnum):
    """What a step may hold, and with it the lane that it runs in."""

    ALL = 0
    PREFILL = 1
    """Host-known tokens only: prompts, sequences that come back, forced tokens."""
    DECODE = 2
    """Rows whose token is in the FutureMap only."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of host-known tokens of one sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def committable(self) -> int:
        """Tokens whose blocks may be shared from the launch on.

        The last token of a constrained sequence may have to be computed again, if its mask is late;
        and what is shared is never written again.
        """
        constrained = self.sequence.request.params.structured is not None
        return self.stop - 1 if constrained and self.samples else self.stop

    @property
    def samples(self) -> bool:
        """Whether it reaches the end of what is known, so that the next token can be sampled."""
        return self.stop == self.sequence.num_known


@dataclass(slots=True, eq=False)
class Draft:
    """What a step will do, while it is being decided."""

    step_id: int
    work: Work
    decode_slots: IntArray
    chunks: list[Chunk] = field(default_factory=list)
    slot_inits: list[SlotInit] = field(default_factory=list)
    inserted: dict[int, Node] = field(default_factory=dict)
    """Chunk index -> the first cache node whose block this step writes."""
    logprob_positions: int = 0
    returning: list[Sequence] = field(default_factory=list)
    """Took a slot, and wait for what they have computed to be copied back."""

    def room(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of a prefill the step can take, of the `budget` that is left."""
        if not sequence.wants_prompt_logprobs:
            return budget
        return min(budget, MOST_LOGPROB_POSITIONS - self.logprob_positions)

    def take(self, chunk: Chunk) -> None:
        """One more chunk."""
        self.chunks.append(chunk)
        if chunk.sequence.wants_prompt_logprobs:
            self.logprob_positions += chunk.length


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """What is remembered of a plan until its result comes."""

    plan: StepPlan
    work: Work
    sequences: list[Sequence]
    """By row."""
    runs: Runs
    """Of the plan's slots."""
    chunks: list[Chunk]
    inserted: dict[int, Node]
    """Row -> the first cache node whose block this step writes."""
    filled: list[tuple[int, int]]
    """Decode rows whose token fills a block, and how many tokens have keys and values then."""

    def is_stale(self, sequence: Sequence) -> bool:
        """Whether a sequence ended, or left its slot, since this step was launched."""
        running = sequence.state is RequestState.RUNNING
        return not running or sequence.since > self.plan.step_id


def launch(draft: Draft, rows: RowTable, *, block_size: int, track_filled: bool) -> LaunchedStep:
    """Make the plan and count it in `rows` as launched.

    Args:
        draft: at least one row.
        rows: the running sequences.
        block_size: tokens per block.
        track_filled: whether the caller wants to know which rows fill a block.
    """
    decode, chunks = draft.decode_slots, draft.chunks
    num_decode = len(decode)
    slots = decode
    if chunks:
        chunk_slots = np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int32)
        slots = np.concatenate([decode, chunk_slots])
    runs = Runs(slots.tolist())
    starts = runs.take(rows.computed)
    lengths = np.ones(len(slots), dtype=np.int32)
    samples = np.ones(len(slots), dtype=np.bool_)
    if chunks:
        lengths[num_decode:] = [chunk.length for chunk in chunks]
        samples[num_decode:] = [chunk.samples for chunk in chunks]
    num_blocks = runs.take(rows.capacity) // block_size
    plan = StepPlan(
        step_id=draft.step_id,
        num_decode=num_decode,
        seq_ids=runs.take(rows.seq_ids).tolist(),
        slots=slots,
        starts=starts,
        lengths=lengths,
        prefill_token_ids=_tokens(chunks),
        block_tables=rows.tables_of(runs, int(num_blocks.max())),
        num_blocks=num_blocks,
        samples=samples,
        slot_inits=draft.slot_inits,
        constrained=_constrained(rows, slots, samples),
        prompt_logprob_rows=[
            num_decode + index
            for index, chunk in enumerate(chunks)
            if chunk.sequence.wants_prompt_logprobs and chunk.start + 1 < chunk.sequence.num_prompt
        ],
        forced=[_forced(chunk.sequence) for chunk in chunks if chunk.sequence.forced],
    )
    after = starts + lengths
    runs.put(rows.computed, after)
    runs.add(rows.known, samples)
    runs.add(rows.pending, 1)
    runs.put(rows.last_step, draft.step_id)
    runs.put(rows.lane, int(draft.work))
    filled: list[tuple[int, int]] = []
    if track_filled:
        full = np.flatnonzero(after[:num_decode] % block_size == 0)
        filled = list(zip(full.tolist(), after[full].tolist(), strict=True))
    return LaunchedStep(
        plan=plan,
        work=draft.work,
        sequences=rows.sequences_of(slots),
        runs=runs,
        chunks=chunks,
        inserted={num_decode + index: node for index, node in draft.inserted.items()},
        filled=filled,
    )


def _tokens(chunks: list[Chunk]) -> IntArray:
    tokens = chain.from_iterable(c.sequence.tokens(c.start, c.stop) for c in chunks)
    return np.fromiter(tokens, dtype=np.int32, count=sum(c.length for c in chunks))


def _constrained(rows: RowTable, slots: IntArray, samples: np.ndarray) -> list[int]:
    if not rows.num_constrained:
        return []
    found: list[int] = np.flatnonzero(rows.constrained[slots] & samples).tolist()
    return found


def _forced(sequence: Sequence) -> ForcedTokens:
    tokens, sequence.forced = tuple(sequence.forced), []
    return ForcedTokens(slot=sequence.slot, token_ids=tokens)
