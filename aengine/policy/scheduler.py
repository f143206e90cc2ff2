"""`Scheduler`: which tokens of which sequences the next step computes, and what a result means.

Two calls make the loop: `schedule()` returns a plan, which counts as launched; `update()` takes the
result of a plan. Several plans may be in flight, so the next one is made before the tokens of the
one before are known: lengths are counted ahead, a sequence that ended by an end token may have one
more row in flight whose token is dropped, and every block, slot and table of a launched step stays
as it is until the step has settled.

Memory: the most urgent running sequence always gets its next block, if need be from the least
urgent (see `memory_pressure`), so the whole always makes progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aengine.batch import SlotInit
from aengine.policy.admission import WaitingQueue
from aengine.policy.block_pool import NEVER
from aengine.policy.committing import forget_unwritten, keep_computed
from aengine.policy.deadlines import Deadlines
from aengine.policy.kv_memory import KVMemory
from aengine.policy.planning import Chunk, Draft, LaunchedStep, Work, launch
from aengine.policy.residents import Residents
from aengine.policy.row_table import RowTable
from aengine.policy.sequence import RowUpdate, Sequence
from aengine.policy.settling import settle
from aengine.policy.stats import SchedulerStats, WorkAhead, snapshot, work_ahead
from aengine.policy.swap_space import SwapSpace
from aengine.request import FinishReason, RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from aengine.batch import BlockCopy, StepPlan, StepResult
    from aengine.config import SchedulerConfig
    from aengine.request import Request

__all__ = ["RowUpdate", "Scheduler", "SchedulerStats", "Work"]


class Scheduler:
    """Decides steps. Pure: it never waits, reads no clock and touches no device.

    Args:
        config: bounds, block size, budget.
        num_blocks: usable KV blocks, ids 1 .. num_blocks; block 0 is the padding block.
        max_model_len: longest prompt plus output, tokens.
        num_host_blocks: KV blocks of host memory for sequences that give way.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        num_host_blocks: int = 0,
    ) -> None:
        self._config = config
        block_size = config.tokens_per_block
        self._memory = KVMemory(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self._queue = WaitingQueue(config, num_blocks=num_blocks, max_model_len=max_model_len)
        widest = min(num_blocks, -(-max_model_len // block_size))
        self._rows = RowTable(config.max_num_seqs, block_size=block_size, widest=widest)
        self._swap = SwapSpace(
            self._memory,
            self._rows,
            num_blocks=num_host_blocks,
            block_size=block_size,
            min_tokens=config.swap_min_tokens,
        )
        self._residents = Residents(self._memory, self._rows, self._queue, self._swap)
        self._live: dict[int, Sequence] = {}
        self._in_flight: dict[int, LaunchedStep] = {}
        self._deadlines = Deadlines(self._live)
        self.chunk_beside_decode = config.max_num_batched_tokens
        """Most tokens of prompts in a step that decodes too."""
        self._epoch = 0
        self._blocked: tuple[int, int] | None = None

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Begin to wait for a slot.

        Raises:
            ContextLengthError: the prompt leaves no room for output in the model's context.
            InvalidRequestError: the prompt can never fit the KV pool; the message has the numbers.
            EngineOverloadedError: the queue is full; `retry_after` says when to try again.
            ValueError: the sequence id is in use.
        """
        if request.seq_id in self._live:
            raise ValueError(f"sequence id {request.seq_id} is in use")
        sequence = self._queue.accept(request, now)
        self._live[request.seq_id] = sequence
        self._queue.push(sequence)
        if request.deadline is not None:
            self._deadlines.add(request.seq_id, request.deadline)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence, in whatever phase it is. False: it has ended already.

        What no launched step can touch is free at once, the rest when those steps have settled.
        """
        sequence = self._live.pop(seq_id, None)
        if sequence is None:
            return False
        if sequence.state is RequestState.RUNNING:
            self._residents.leave(sequence)
        else:
            self._queue.discard(sequence)
        self._swap.drop(sequence)
        sequence.state = RequestState.FINISHED
        sequence.finish_reason = reason
        return True

    def expire(self, now: float) -> list[int]:
        """End every sequence whose deadline has passed; their ids, earliest deadline first."""
        due = self._deadlines.take_due(now)
        for seq_id in due:
            self.finish(seq_id, FinishReason.DEADLINE)
        return due

    def next_deadline(self) -> float | None:
        """The earliest deadline of a live sequence."""
        return self._deadlines.soonest()

    def hold(self, seq_id: int) -> None:
        """Keep a sequence out of the next steps, for example until its grammar mask is there."""
        sequence = self._live.get(seq_id)
        if sequence is not None:
            sequence.held = True
            if sequence.slot:
                self._rows.decoding[sequence.slot] = False

    def unhold(self, seq_id: int) -> None:
        """Let a held sequence go on."""
        sequence = self._live.get(seq_id)
        if sequence is None or not sequence.held:
            return
        sequence.held = False
        if sequence.state is not RequestState.RUNNING:
            self._queue.unhold(sequence)
        elif not (sequence.parked or sequence.copying or sequence in self._residents.prefilling):
            self._rows.decoding[sequence.slot] = True

    def append_forced(self, seq_id: int, token_ids: Seq[int]) -> bool:
        """Append output tokens that need no sampling: the grammar leaves no choice.

        They are computed like a piece of prompt, and the next token is sampled after them. False,
        and nothing happens, while a step of this sequence is in flight, before its first token, or
        if they would leave no room for a sampled token.
        """
        sequence = self._live.get(seq_id)
        if sequence is None or sequence.parked or not (token_ids and sequence.output):
            return False
        slot = sequence.slot
        settled = not self._rows.pending[slot] and sequence not in self._residents.prefilling
        if not settled or sequence.num_known + len(token_ids) >= sequence.limit:
            return False
        sequence.output += token_ids
        if not slot:  # it gave way, and comes back with all that is known
            self._queue.lengthened(len(token_ids))
            return True
        sequence.forced += token_ids
        self._rows.known[slot] = sequence.num_known
        self._rows.decoding[slot] = False
        self._residents.add_prefilling(sequence)
        return True

    # -- steps ---------------------------------------------------------------------------------

    def schedule(self, now: float, work: Work = Work.ALL) -> StepPlan | None:
        """The next step, which counts as launched. None: there is nothing to launch now.

        Args:
            now: seconds on the caller's clock.
            work: what the step may hold. Each kind of work is a lane: its steps run one after the
                other, at most `max_steps_in_flight` of them. A sequence changes lanes only when its
                steps in the old one have settled, so lanes need no order between them.
        """
        in_lane = sum(step.work is work for step in self._in_flight.values())
        if in_lane >= self._config.max_steps_in_flight:
            return None
        elsewhere = in_lane < len(self._in_flight)
        all_served = self._residents.pressure.reserve(self._residents.prefilling)
        rows = self._rows
        draft = Draft(self._memory.pool.next_step, work, np.zeros(0, dtype=np.int32))
        if work is not Work.PREFILL:
            going = rows.decoding & (rows.known < rows.limit) & (rows.computed < rows.capacity)
            if elsewhere:
                going &= rows.free_for(work)
            draft.decode_slots = np.flatnonzero(going).astype(np.int32)
        budget = self._config.max_num_batched_tokens - len(draft.decode_slots)
        if len(draft.decode_slots):
            budget = min(budget, self.chunk_beside_decode)
        if work is not Work.DECODE:
            budget = self._continue_prefills(draft, budget)
            if all_served:
                self._admit(draft, budget, now)
        plan = self._launch(draft) if len(draft.decode_slots) or draft.chunks else None
        self._swap.bring_back(draft.returning)
        return plan

    def _continue_prefills(self, draft: Draft, budget: int) -> int:
        """Chunks of the sequences that have begun, most urgent first; the budget that is left."""
        rows = self._rows
        for sequence in tuple(self._residents.prefilling):
            if budget <= 0:
                break
            slot = sequence.slot
            if sequence.held or sequence.parked or rows.known[slot] > rows.capacity[slot]:
                continue
            if rows.pending[slot] and rows.lane[slot] != draft.work:
                continue
            if draft.room(sequence, budget) <= 0:
                continue
            budget -= self._add_chunk(draft, sequence, budget)
        return budget

    def _admit(self, draft: Draft, budget: int, now: float) -> None:
        """Give slots and blocks to waiting sequences, strictly in order of urgency."""
        memory, rows = self._memory, self._rows
        steps = self._in_flight.items()
        others = {step_id for step_id, step in steps if step.work is not draft.work}
        while budget > 0 and rows.num_free:
            sequence = self._queue.peek()
            if sequence is None or sequence.copying or draft.room(sequence, budget) <= 0:
                return
            attempt = (sequence.seq_id, memory.pool.returns)
            if attempt == self._blocked:
                return
            if not memory.admit(sequence, alone=self.num_running == 0):
                self._blocked = attempt
                return
            if others and memory.is_written_by(sequence, others):
                # It found blocks that another lane is writing: next time they are written.
                memory.release(sequence, NEVER)
                return
            self._queue.admit(sequence, now)
            if self._residents.enter(sequence, draft):
                budget -= self._add_chunk(draft, sequence, budget)

    def _add_chunk(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Put the next tokens of a prefill into the step; how many."""
        rows, slot = self._rows, sequence.slot
        if sequence.unannounced:
            sequence.unannounced = False
            output = tuple(sequence.output)
            draft.slot_inits.append(
                SlotInit(slot=slot, request=sequence.request, output_token_ids=output)
            )
        start = int(rows.computed[slot])
        length = min(draft.room(sequence, budget), int(rows.known[slot]) - start)
        chunk = Chunk(sequence, start, length)
        node = self._memory.commit_launched(sequence, chunk.committable, draft.step_id)
        if node is not None:
            draft.inserted[len(draft.chunks)] = node
        draft.take(chunk)
        if chunk.samples:
            self._residents.prefilling.remove(sequence)
            rows.decoding[slot] = True
        return chunk.length

    def _launch(self, draft: Draft) -> StepPlan:
        size, track = self._config.tokens_per_block, self._memory.cache.enabled
        launched = launch(draft, self._rows, block_size=size, track_filled=track)
        self._memory.pool.launch(draft.step_id)
        self._in_flight[draft.step_id] = launched
        return launched.plan

    def update(self, result: StepResult, now: float) -> list[RowUpdate]:
        """Settle the oldest step of a lane: what it means for each sequence that still lives.

        Rows of sequences that ended or were preempted since the launch are dropped. The step's
        leases end here: it must have completed on the device.

        Raises:
            ValueError: the result is not that of the oldest launched step of its lane.
        """
        launched = self._in_flight.get(result.step_id)
        steps = self._in_flight.items()
        lane = [i for i, step in steps if launched is None or step.work is launched.work]
        if launched is None or lane[0] != result.step_id:
            raise ValueError(f"result of step {result.step_id}; in flight, in order, are {lane}")
        del self._in_flight[result.step_id]
        self._memory.pool.complete(result.step_id)
        self._rows.settle(launched.runs)
        if result.errors and forget_unwritten(
            launched, self._in_flight.values(), result, self._memory.cache
        ):
            self._residents.restart_sharers(launched, result, self._live.values())
        keep_computed(launched, result, self._memory, self._rows)
        settled = settle(launched, result)
        for row in result.unsampled:
            if not launched.is_stale(launched.sequences[row]):
                self._residents.rewind(launched.sequences[row])
        for sequence, reason in settled.ended:
            self.finish(sequence.seq_id, reason)
        self._residents.pressure.preempt_settled()
        return settled.updates

    # -- memory --------------------------------------------------------------------------------

    def take_copies(self) -> list[BlockCopy]:
        """Copies of blocks to and from the host: to be launched before anything else is decided."""
        return self._swap.take()

    def copied(self, copy_id: int, *, ok: bool) -> None:
        """A copy has ended. If it did not go `ok`, its sequence is computed anew."""
        self._residents.copied(copy_id, ok=ok)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running sequences go on, and cache nothing more."""
        self._memory.cache.invalidate()

    def invalidate(self, epoch: int) -> None:
        """What is cached was computed with other weights than those of `epoch`: forget it."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._memory.cache.invalidate()

    # -- what is going on ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a sequence lives or a step or a copy is in flight."""
        return bool(self._live) or bool(self._in_flight) or bool(self._swap.in_flight)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._live) - len(self._queue)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._queue)

    def stats(self) -> SchedulerStats:
        """A snapshot of counts."""
        return snapshot(
            self._memory,
            self._swap,
            running=self.num_running,
            waiting=self.num_waiting,
            steps_in_flight=len(self._in_flight),
            preemptions=self._residents.preemptions,
        )

    def ahead(self, now: float) -> WorkAhead:
        """What there is to do for each lane."""
        return work_ahead(self._rows, self._residents.prefilling, self._queue, Work.DECODE, now)
