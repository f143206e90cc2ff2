"""A scripted device for scheduler tests: steps settle as late as the test likes.

It runs the plans on `ScriptedLauncher`, whose tokens depend on what a sequence reads back through
its own block table, and keeps its own books of who may touch which block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from aengine.batch import TokenLogprobs
from aengine.config import SchedulerConfig
from aengine.policy.scheduler import RowUpdate, Scheduler, Work
from aengine.request import FinishReason, Request, SamplingParams
from aengine.testing.scripted import Faults, ScriptedLauncher, arithmetic_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aengine.batch import BlockCopy, StepPlan, StepResult

VOCAB = 50
SCRIPT = arithmetic_script(VOCAB)


def solo(
    prompt: Sequence[int], max_tokens: int, end_token_ids: frozenset[int] = frozenset()
) -> list[int]:
    """What the scripted model says to this prompt alone."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(SCRIPT(tokens))
        if tokens[-1] in end_token_ids:
            break
    return tokens[len(prompt) :]


def logprob(history: Sequence[int], token: int) -> TokenLogprobs:
    """The scripted model's opinion of a token."""
    return TokenLogprobs(token_id=token, logprob=-float(SCRIPT(history)), rank=1)


def request(seq_id: int, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> Request:
    """A request; fields that are not the request's own go to its sampling parameters."""
    own = {"end_token_ids", "priority", "deadline", "cache_salt", "arrival"}
    params = {name: value for name, value in fields.items() if name not in own}
    return Request(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        **{name: value for name, value in fields.items() if name in own},
    )


@dataclass
class Launched:
    """A step on the scripted device."""

    plan: StepPlan
    result: StepResult
    work: Work
    blocks: set[int] = field(default_factory=set)


@dataclass
class Copying:
    """A copy of blocks on the scripted device; `ran`: it has moved its bytes already."""

    copy: BlockCopy
    ran: bool


class Bench:
    """A scheduler and a scripted device under it."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_model_len: int = 256,
        faults: Faults | None = None,
        num_host_blocks: int = 0,
        **config: object,
    ) -> None:
        settings = {
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_steps_in_flight": 2,
            "swap_min_tokens": 1,
        }
        self.config = SchedulerConfig(**{**settings, **config})
        self.scheduler = Scheduler(
            self.config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_host_blocks=num_host_blocks,
        )
        self.launcher = ScriptedLauncher(
            SCRIPT,
            vocab_size=VOCAB,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            faults=faults,
            num_host_blocks=num_host_blocks,
        )
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.copies: list[Copying] = []
        self.num_copied = 0
        self.copy_is_early: Callable[[], bool] = lambda: False
        self.held: set[int] = set()
        self.lanes: list[Work] = [Work.ALL]
        self.late: Callable[[int], bool] = lambda seq_id: False
        self.now = 0.0
        self.in_flight: deque[Launched] = deque()
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.forced: set[tuple[int, int]] = set()
        self.updates: list[RowUpdate] = []
        self.ended: dict[int, FinishReason] = {}

    def add(self, request: Request) -> None:
        """Submit."""
        self.scheduler.add(request, self.now)
        self.requests[request.seq_id] = request
        self.tokens[request.seq_id] = []

    def launch(self, work: Work = Work.ALL, *, fails: bool = False) -> StepPlan | None:
        """One `schedule()`, run on the device at once, settled later.

        A step that fails leaves rubbish where it should have written.
        """
        plan = self.scheduler.schedule(self.now, work)
        self.check_books()
        if plan is not None:
            self.check_plan(plan)
        self.launch_copies(plan)
        if plan is None:
            return None
        self.check_lanes(plan, work)
        result = self._sample(plan)
        if fails:
            self._spoil(plan)
            error = RuntimeError("the step failed")
            result.errors = dict.fromkeys(range(plan.num_rows), error)
        result.prompt_logprobs = {row: self._speak(plan, row) for row in plan.prompt_logprob_rows}
        self.in_flight.append(Launched(plan, result, work, self._touched(plan)))
        return plan

    def _sample(self, plan: StepPlan) -> StepResult:
        """Run the plan; constrained rows whose mask is late sample nothing and are held."""
        begun = self.launcher.begin(plan)
        rows = []
        for row in plan.constrained:
            if self.late(plan.seq_ids[row]):
                self.scheduler.hold(plan.seq_ids[row])
                self.held.add(plan.seq_ids[row])
            else:
                rows.append(row)
        everything = np.full((len(rows), -(-VOCAB // 32)), -1, dtype=np.int32)
        return self.launcher.finish(begun, rows, everything).to_host()

    def unhold_all(self) -> None:
        """Every mask is there, and no further one will be late."""
        self.late = lambda seq_id: False
        for seq_id in sorted(self.held):
            self.scheduler.unhold(seq_id)
        self.held.clear()

    def launch_copies(self, beside: StepPlan | None = None) -> None:
        """Take the copies that were decided; each runs at once or when it is settled."""
        for copy in self.scheduler.take_copies():
            self.check_copy(copy, beside)
            launched = Copying(copy, ran=self.copy_is_early())
            if launched.ran:
                self.launcher.copy_blocks(copy)
            self.copies.append(launched)

    def settle_copy(self, index: int = 0, *, ok: bool = True) -> None:
        """A copy ends. One that fails leaves rubbish where it should have written."""
        launched = self.copies.pop(index)
        self.num_copied += 1
        copy = launched.copy
        if not ok:
            kv = self.launcher._host_kv if copy.to_host else self.launcher._kv
            kv[list(copy.host_blocks if copy.to_host else copy.device_blocks)] = VOCAB + 1
        elif not launched.ran:
            self.launcher.copy_blocks(copy)
        self.scheduler.copied(copy.copy_id, ok=ok)
        self.check_books()
        self.launch_copies()

    def _spoil(self, plan: StepPlan) -> None:
        for row in range(plan.num_rows):
            start, length = int(plan.starts[row]), int(plan.lengths[row])
            for position in range(start, start + length):
                index, offset = divmod(position, self.config.block_size)
                self.launcher._kv[plan.block_tables[row, index], offset] = VOCAB + 1
            self.launcher._future_map[plan.slots[row]] = VOCAB + 1

    def _speak(self, plan: StepPlan, row: int) -> list[TokenLogprobs]:
        """Log-probabilities of prompt tokens that depend on everything before them in the cache."""
        prompt = self.requests[plan.seq_ids[row]].prompt_token_ids
        start, stop = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
        table = plan.block_tables[row, : plan.num_blocks[row]]
        seen = self.launcher._kv[table].reshape(-1).tolist()
        last = min(stop, len(prompt) - 1)
        return [logprob(seen[: p + 1], prompt[p + 1]) for p in range(start, last)]

    def force(self, seq_id: int, token_ids: list[int]) -> bool:
        """Append tokens without sampling."""
        at = len(self.tokens[seq_id])
        if not self.scheduler.append_forced(seq_id, token_ids):
            return False
        self.tokens[seq_id] += token_ids
        self.forced |= {(seq_id, at + i) for i in range(len(token_ids))}
        return True

    def settle(self, work: Work | None = None) -> list[RowUpdate]:
        """Settle the oldest launched step, or the oldest of a lane."""
        step = next(step for step in self.in_flight if work in (None, step.work))
        self.in_flight.remove(step)
        updates = self.scheduler.update(step.result, self.now)
        self.check_books()
        for update in updates:
            assert update.seq_id not in self.ended, "a sequence went on after its end"
            self.tokens[update.seq_id] += update.token_ids
            if update.finish_reason is not None:
                self.ended[update.seq_id] = update.finish_reason
        self.updates += updates
        self.launch_copies()
        return updates

    def finish(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence from outside."""
        ended = self.scheduler.finish(seq_id, reason)
        if ended:
            self.ended[seq_id] = reason
        self.check_books()
        return ended

    def step(self) -> StepPlan | None:
        """Launch what can be launched in every lane, settle down to one step in flight."""
        plans = [self.launch(work) for work in self.lanes]
        plan = next((plan for plan in plans if plan is not None), None)
        if plan is None and not self.in_flight and self.copies:
            self.settle_copy()
        while len(self.in_flight) >= self.config.max_steps_in_flight or (
            plan is None and self.in_flight
        ):
            self.settle()
        return plan

    def run(self, most_steps: int = 2_000) -> None:
        """Go on until nothing is left to do."""
        for _ in range(most_steps):
            idle, ended = not self.in_flight and not self.copies, self.num_copied
            plan = self.step()
            if plan is None and idle and ended == self.num_copied:
                stats = self.scheduler.stats()
                assert not self.scheduler.has_work, f"nothing goes on, nothing comes: {stats}"
                return
            self.now += 0.01
        raise AssertionError(f"no end after {most_steps} steps: {self.scheduler.stats()}")

    # -- oracles -------------------------------------------------------------------------------

    def check_books(self) -> None:
        """free + cached + leased + used == total, and no count is below zero."""
        stats = self.scheduler.stats()
        parts = (stats.free_blocks, stats.cached_blocks, stats.leased_blocks, stats.used_blocks)
        assert min(parts) >= 0
        assert sum(parts) == stats.total_blocks == self.num_blocks
        host = (stats.host_free_blocks, stats.host_leased_blocks, stats.swapped_blocks)
        assert min(host) >= 0
        assert sum(host) == stats.host_total_blocks == self.num_host_blocks

    def check_copy(self, copy: BlockCopy, beside: StepPlan | None) -> None:
        """What a copy reads nobody writes, and what it writes nobody touches, until it has ended.

        `beside`: the plan that was decided with it, which is not in flight yet.
        """
        device, host = set(copy.device_blocks), set(copy.host_blocks)
        assert len(device) == len(host) == len(copy.device_blocks) == len(copy.host_blocks) > 0
        assert device <= set(range(1, self.num_blocks + 1))
        assert host <= set(range(1, self.num_host_blocks + 1))
        plans = [step.plan for step in self.in_flight] + ([beside] if beside else [])
        for plan in plans:
            assert not self._written(plan) & device
            assert copy.to_host or not self._touched(plan) & device
        for other in self.copies:
            both = set(other.copy.device_blocks) & device
            assert not both or (copy.to_host and other.copy.to_host)
            assert not set(other.copy.host_blocks) & host

    def check_plan(self, plan: StepPlan) -> None:
        """What every plan promises, and that no block is written that a launched step may touch."""
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(set(plan.seq_ids)) == plan.num_rows <= self.config.max_num_seqs
        assert len(set(plan.slots.tolist())) == plan.num_rows
        assert 1 <= plan.slots.min() <= plan.slots.max() <= self.config.max_num_seqs
        assert len(plan.prefill_token_ids) == plan.lengths[plan.num_decode :].sum()
        assert (plan.lengths[: plan.num_decode] == 1).all()
        assert plan.lengths.min() >= 1
        for step in self.in_flight:
            owners_then = dict(zip(step.plan.slots.tolist(), step.plan.seq_ids, strict=True))
            for slot, seq_id in zip(plan.slots.tolist(), plan.seq_ids, strict=True):
                assert owners_then.get(slot, seq_id) == seq_id, "a slot changed hands too early"
        size = self.config.block_size
        for launched in self.copies:
            device = set(launched.copy.device_blocks)
            assert not self._written(plan) & device, "writes what a copy touches"
            assert launched.copy.to_host or not self._touched(plan) & device, "not there yet"
        written: set[int] = set()
        for row in range(plan.num_rows):
            start, stop = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            count = int(plan.num_blocks[row])
            table = plan.block_tables[row].tolist()
            assert stop <= count * size
            assert all(1 <= block <= self.num_blocks for block in table[:count])
            assert len(set(table[:count])) == count
            assert not any(table[count:])
            for position in range(start, stop):
                written.add(table[position // size])
        owners: dict[int, int] = {}
        for row in range(plan.num_rows):
            start, stop = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            for index in range(start // size, (stop - 1) // size + 1):
                block = int(plan.block_tables[row, index])
                assert owners.setdefault(block, plan.seq_ids[row]) == plan.seq_ids[row]
        for step in self.in_flight:
            for row in range(step.plan.num_rows):
                table = step.plan.block_tables[row, : step.plan.num_blocks[row]].tolist()
                mine = step.plan.seq_ids[row] in plan.seq_ids
                shared = written.intersection(table)
                owner = {owners[block] for block in shared}
                assert not shared or (mine and owner == {step.plan.seq_ids[row]}), (
                    f"blocks {shared} are written while step {step.plan.step_id} may touch them"
                )

    def check_outputs(self) -> None:
        """Every token is what the model says after the tokens before it; every end has a cause."""
        for seq_id, tokens in self.tokens.items():
            request = self.requests[seq_id]
            history = list(request.prompt_token_ids)
            for index, token in enumerate(tokens):
                if (seq_id, index) not in self.forced:
                    assert token == SCRIPT(history), f"token {index} of sequence {seq_id}"
                history.append(token)
            reason = self.ended.get(seq_id)
            if reason is FinishReason.STOP:
                assert tokens[-1] in request.end_token_ids
                assert len(tokens) >= request.params.min_tokens
            elif reason is FinishReason.LENGTH:
                assert len(tokens) == request.max_tokens
            for index, token in enumerate(tokens[:-1]):
                sampled = (seq_id, index) not in self.forced
                if sampled and index + 1 >= request.params.min_tokens:
                    assert token not in request.end_token_ids or request.params.ignore_eos
        for update in self.updates:
            request = update.request
            if update.first and request.params.prompt_logprobs is not None:
                prompt = request.prompt_token_ids
                wanted = [logprob(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
                assert update.prompt_logprobs == (None, *wanted)

    def check_lanes(self, plan: StepPlan, work: Work) -> None:
        """Lanes run in any order: what one writes, another must not read or write meanwhile."""
        assert not (work is Work.PREFILL and plan.num_decode)
        assert not (work is Work.DECODE and len(plan.prefill_token_ids))
        touched = self._touched(plan)
        for step in self.in_flight:
            if step.work is not work:
                assert not set(step.plan.slots.tolist()) & set(plan.slots.tolist())
                assert not self._written(step.plan) & touched, "reads what another lane writes"
                assert not self._written(plan) & step.blocks, "writes what another lane touches"

    def _touched(self, plan: StepPlan) -> set[int]:
        rows = range(plan.num_rows)
        return {int(b) for row in rows for b in plan.block_tables[row, : plan.num_blocks[row]]}

    def _written(self, plan: StepPlan) -> set[int]:
        size, found = self.config.block_size, set()
        for row in range(plan.num_rows):
            start, stop = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            found |= set(plan.block_tables[row, start // size : (stop - 1) // size + 1].tolist())
        return found

    def check_empty(self) -> None:
        """Nothing lives: all blocks are free or cached."""
        stats = self.scheduler.stats()
        assert stats.used_blocks == stats.leased_blocks == 0
        assert stats.running == stats.waiting == stats.steps_in_flight == 0
        assert stats.copies_in_flight == stats.swapped_blocks == stats.host_leased_blocks == 0
        assert stats.free_blocks + stats.cached_blocks == self.num_blocks
