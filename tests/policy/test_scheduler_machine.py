"""The scheduler under everything at once; the scripted device tells what is true."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from aengine.request import FinishReason
from tests.policy.harness import Bench, request

# Few different beginnings, so that prompts share prefixes of all lengths.
PROMPTS = st.builds(
    lambda stem, keep, tail: (list(range(1, 13)) if stem else [7] * 12)[:keep] + tail,
    st.booleans(),
    st.integers(0, 12),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go in every phase; steps settle late."""

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1
        self.held: set[int] = set()

    @initialize(
        num_blocks=st.sampled_from([8, 11, 16, 64]),
        block_size=st.sampled_from([1, 3, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([5, 8, 24]),
        depth=st.integers(1, 3),
        cache=st.booleans(),
        host=st.sampled_from([0, 0, 3, 40]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        depth: int,
        cache: bool,
        host: int,
    ) -> None:
        self.room = num_blocks * block_size
        self.bench = Bench(
            num_blocks=num_blocks,
            max_model_len=64,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_steps_in_flight=depth,
            enable_prefix_cache=cache,
            num_host_blocks=host,
        )

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 2),
        deadline=st.none() | st.floats(0.1, 5.0),
        ends=st.frozensets(st.integers(0, 49), max_size=8),
        salt=st.sampled_from([None, None, "salt"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        min_tokens=st.integers(0, 3),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        deadline: float | None,
        ends: frozenset[int],
        salt: str | None,
        prompt_logprobs: int | None,
        min_tokens: int,
    ) -> None:
        prompt = prompt[: self.room]
        max_tokens = min(max_tokens, self.room + 1 - len(prompt))
        self.bench.add(
            request(
                self.next_id,
                prompt,
                max_tokens,
                priority=priority,
                deadline=None if deadline is None else self.bench.now + deadline,
                end_token_ids=ends,
                cache_salt=salt,
                prompt_logprobs=prompt_logprobs,
                min_tokens=min(min_tokens, max_tokens),
            )
        )
        self.next_id += 1

    @rule()
    def launch(self) -> None:
        self.bench.launch()

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def settle(self) -> None:
        self.bench.settle()

    @precondition(lambda self: self.bench.copies)
    @rule(data=st.data(), ok=st.booleans())
    def a_copy_ends(self, data: st.DataObject, ok: bool) -> None:
        self.bench.settle_copy(data.draw(st.integers(0, len(self.bench.copies) - 1)), ok=ok)

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds: float) -> None:
        bench = self.bench
        bench.now += seconds
        for seq_id in bench.scheduler.expire(bench.now):
            bench.ended[seq_id] = FinishReason.DEADLINE
            assert bench.requests[seq_id].deadline <= bench.now
        soonest = bench.scheduler.next_deadline()
        assert soonest is None or soonest > bench.now
        bench.check_books()

    def draw_live(self, data: st.DataObject) -> int | None:
        live = sorted(set(self.bench.tokens) - set(self.bench.ended))
        return data.draw(st.sampled_from(live)) if live else None

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_id = self.draw_live(data)
        if seq_id is not None:
            assert self.bench.finish(seq_id)
            assert not self.bench.finish(seq_id)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        seq_id = self.draw_live(data)
        if seq_id is not None:
            self.bench.scheduler.hold(seq_id)
            self.held.add(seq_id)
            plan = self.bench.launch()
            assert plan is None or seq_id not in plan.seq_ids

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(seq_id)
        self.bench.scheduler.unhold(seq_id)

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 49), min_size=1, max_size=9))
    def force(self, data: st.DataObject, tokens: list[int]) -> None:
        seq_id = self.draw_live(data)
        if seq_id is not None and self.bench.force(seq_id, tokens):
            in_flight = [step.plan.seq_ids for step in self.bench.in_flight]
            assert not any(seq_id in seq_ids for seq_ids in in_flight)

    @rule(data=st.data())
    def row_fails(self, data: st.DataObject) -> None:
        seq_id = self.draw_live(data)
        if seq_id is not None:
            self.bench.launcher.faults.row_errors = {seq_id: ValueError("this row alone")}
            self.bench.launch()
            self.bench.launcher.faults.row_errors = {}

    @rule()
    def forget_prefixes(self) -> None:
        self.bench.scheduler.reset_prefix_cache()
        self.bench.check_books()

    @rule(epoch=st.integers(0, 1))
    def new_weights(self, epoch: int) -> None:
        self.bench.scheduler.invalidate(epoch)
        self.bench.check_books()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for seq_id in self.held:
            self.bench.scheduler.unhold(seq_id)
        self.bench.run()
        assert set(self.bench.ended) == set(self.bench.tokens)
        self.bench.check_empty()
        self.bench.check_outputs()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
