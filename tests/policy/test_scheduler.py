"""The scheduler's promises, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from aengine.errors import ContextLengthError, EngineOverloadedError, InvalidRequestError
from aengine.policy.scheduler import Work
from aengine.request import FinishReason, StructuredOutput
from aengine.testing.scripted import Faults
from tests.policy.harness import Bench, request, solo

PROMPT = list(range(1, 10))


def test_the_next_step_is_launched_before_the_tokens_are_known() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 5))
    first, second = bench.launch(), bench.launch()
    assert first is not None
    assert second is not None
    assert (first.num_decode, first.num_tokens) == (0, 9)
    assert (second.num_decode, second.starts.tolist()) == (1, [9])
    assert bench.launch() is None, "two steps are in flight and two may be"
    bench.run()
    assert bench.tokens[1] == solo(PROMPT, 5)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_the_end_by_length_is_foreseen(depth: int, max_tokens: int) -> None:
    bench = Bench(max_steps_in_flight=depth)
    bench.add(request(1, PROMPT, max_tokens))
    bench.run()
    assert bench.tokens[1] == solo(PROMPT, max_tokens)
    assert bench.ended == {1: FinishReason.LENGTH}
    assert bench.launcher.launches == max_tokens, "a row beyond the end was launched"


def test_the_token_after_an_end_token_is_dropped_and_its_blocks_wait() -> None:
    bench = Bench(enable_prefix_cache=False)
    end = solo(PROMPT, 3)[2]
    bench.add(request(1, PROMPT, 9, end_token_ids=frozenset({end})))
    while not bench.ended:
        bench.launch()
        if len(bench.in_flight) == 2:
            bench.settle()
    assert bench.in_flight, "the row was in the next step already"
    assert bench.scheduler.stats().leased_blocks > 0
    assert bench.scheduler.stats().free_blocks < bench.num_blocks
    assert bench.settle() == []
    bench.check_empty()
    assert bench.tokens[1] == solo(PROMPT, 3)
    assert bench.ended == {1: FinishReason.STOP}


def test_which_token_stopped_it() -> None:
    token = solo(PROMPT, 2)[1]
    bench = Bench()
    bench.add(request(1, PROMPT, 9, stop_token_ids=(token,)))
    bench.add(request(2, PROMPT, 9, end_token_ids=frozenset({token})))
    bench.add(request(3, PROMPT, 2, end_token_ids=frozenset({token}), ignore_eos=True))
    bench.run()
    last = {update.seq_id: update for update in bench.updates}
    assert (last[1].finish_reason, last[1].stop_reason) == (FinishReason.STOP, token)
    assert (last[2].finish_reason, last[2].stop_reason) == (FinishReason.STOP, None)
    assert (last[3].finish_reason, last[3].stop_reason) == (FinishReason.LENGTH, None)


def test_no_stop_before_min_tokens() -> None:
    everything = frozenset(range(50))
    bench = Bench()
    bench.add(request(1, PROMPT, 9, min_tokens=4, end_token_ids=everything))
    bench.run()
    assert bench.tokens[1] == solo(PROMPT, 4)


def test_long_prompts_go_in_chunks_beside_decoding_rows() -> None:
    bench = Bench(max_num_batched_tokens=8, num_blocks=64)
    bench.add(request(1, [1, 2, 3], 20))
    bench.step()
    bench.add(request(2, list(range(30)), 2))
    plans = [plan for plan in (bench.step() for _ in range(5)) if plan is not None]
    assert [plan.num_decode for plan in plans] == [1, 1, 1, 1, 1]
    assert [plan.num_tokens for plan in plans] == [8, 8, 8, 8, 3]
    assert [plan.samples.tolist() for plan in plans] == [[True, False]] * 4 + [[True, True]]
    bench.run()
    bench.check_outputs()


def test_a_lower_priority_number_goes_first_and_waiting_makes_up_for_it() -> None:
    bench = Bench(max_num_seqs=1, priority_ageing=10.0)
    bench.add(request(1, PROMPT, 1))
    bench.add(request(2, PROMPT, 1, priority=1))
    bench.now = 5.0
    bench.add(request(3, PROMPT, 1))
    bench.now = 11.0
    bench.add(request(4, PROMPT, 1))
    bench.add(request(5, PROMPT, 1, priority=-1))
    bench.run()
    assert list(bench.ended) == [1, 5, 3, 2, 4]


def test_a_stream_of_urgent_requests_cannot_starve_a_patient_one() -> None:
    bench = Bench(max_num_seqs=1, priority_ageing=1.0)
    bench.add(request(1, PROMPT, 2, priority=3))
    arrivals = {}
    for seq_id in range(2, 400):
        bench.add(request(seq_id, PROMPT, 2, priority=0))
        arrivals[seq_id] = bench.now
        bench.now += 0.05
        bench.step()
        if 1 in bench.ended:
            break
    assert 1 in bench.ended
    overtook = set(bench.ended) - {1}
    assert max(arrivals[seq_id] for seq_id in overtook) <= 3.0, "three levels are three seconds"


def test_deadlines_end_waiting_and_running_sequences() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(request(1, PROMPT, 50, deadline=2.0))
    bench.add(request(2, PROMPT, 50, deadline=1.0))
    bench.add(request(3, PROMPT, 2))
    bench.step()
    assert bench.scheduler.next_deadline() == 1.0
    assert bench.scheduler.expire(0.5) == []
    assert bench.scheduler.expire(1.0) == [2]
    assert bench.scheduler.next_deadline() == 2.0
    assert bench.scheduler.expire(9.0) == [1]
    assert bench.scheduler.next_deadline() is None
    bench.ended |= {1: FinishReason.DEADLINE, 2: FinishReason.DEADLINE}
    bench.run()
    assert bench.tokens[3] == solo(PROMPT, 2)


def test_deadlines_of_ended_sequences_are_forgotten() -> None:
    bench = Bench()
    for seq_id in range(1, 1001):
        bench.add(request(seq_id, PROMPT, deadline=1e9))
        bench.finish(seq_id)
    assert len(bench.scheduler._deadlines) < 100
    assert bench.scheduler.next_deadline() is None


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    bench = Bench(num_blocks=4, max_model_len=64)
    with pytest.raises(InvalidRequestError, match=r"17 tokens and needs 5 KV blocks of 4.* has 4"):
        bench.add(request(1, [1] * 17))
    with pytest.raises(ContextLengthError, match=r"64 tokens and the context 64") as caught:
        bench.add(request(1, [1] * 64))
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (64, 64)
    with pytest.raises(InvalidRequestError, match="empty"):
        bench.add(request(1, []))
    for token in (-1, 2**31):
        with pytest.raises(InvalidRequestError, match="from 0 to"):
            bench.add(request(1, [token]))
    bench.add(request(1, [1] * 16, 30))
    with pytest.raises(ValueError, match="in use"):
        bench.scheduler.add(request(1, PROMPT), 0.0)
    bench.run()
    assert bench.tokens[1] == solo([1] * 16, 1), "the pool is full: the output ends there"
    assert bench.ended[1] is FinishReason.LENGTH


def test_the_context_bounds_the_output() -> None:
    bench = Bench(max_model_len=12)
    bench.add(request(1, PROMPT, 30))
    bench.run()
    assert bench.tokens[1] == solo(PROMPT, 3)


def test_a_full_queue_says_when_to_come_back() -> None:
    bench = Bench(max_num_queued_requests=2, max_num_seqs=1)
    bench.add(request(1, PROMPT))
    bench.add(request(2, PROMPT))
    with pytest.raises(EngineOverloadedError) as caught:
        bench.add(request(3, PROMPT))
    assert 0 < caught.value.retry_after <= 60
    bench.finish(2)
    bench.add(request(4, PROMPT))
    bench.run()
    assert bench.tokens[4] == solo(PROMPT, 4)
    assert 3 not in bench.tokens


def test_queued_tokens_are_bounded_too() -> None:
    bench = Bench(max_num_queued_tokens=10)
    bench.add(request(1, PROMPT + PROMPT))
    with pytest.raises(EngineOverloadedError, match="18 prompt tokens wait; 9 more would pass 10"):
        bench.add(request(2, PROMPT))
    bench.run()
    bench.add(request(2, PROMPT))
    bench.run()
    bench.check_outputs()


def test_ended_waiters_leave_no_trace_in_the_queue() -> None:
    bench = Bench()
    for seq_id in range(1, 1001):
        bench.add(request(seq_id, PROMPT))
        bench.finish(seq_id)
    assert bench.scheduler.num_waiting == 0
    assert len(bench.scheduler._queue._heap) < 100
    bench.check_empty()


def test_held_sequences_stay_out_and_come_back() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 6))
    bench.add(request(2, PROMPT, 6))
    bench.step()
    bench.scheduler.hold(1)
    plans = [bench.step() for _ in range(3)]
    assert all(plan is not None and plan.seq_ids == [2] for plan in plans)
    bench.scheduler.unhold(1)
    bench.scheduler.unhold(1)
    bench.run()
    bench.check_outputs()


def test_a_held_waiter_does_not_hold_up_the_others() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 2))
    bench.add(request(2, PROMPT, 2))
    bench.scheduler.hold(1)
    plan = bench.step()
    assert plan is not None
    assert plan.seq_ids == [2]
    bench.scheduler.unhold(1)
    bench.run()
    bench.check_outputs()


def test_forced_tokens_are_computed_and_sampling_goes_on_after_them() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add(request(1, PROMPT[:3], 12))
    bench.launch()
    assert not bench.force(1, [5]), "a step of it is in flight"
    bench.settle()
    assert not bench.force(1, [5] * 11), "no room for a sampled token"
    assert bench.force(1, [40, 41, 42, 43, 44, 45])
    plan = bench.launch()
    assert plan is not None
    assert [(forced.slot, forced.token_ids) for forced in plan.forced] == [
        (plan.slots[0], (40, 41, 42, 43, 44, 45))
    ]
    assert plan.prefill_token_ids.tolist() == [bench.tokens[1][0], 40, 41, 42]
    plan = bench.launch()
    assert plan is not None
    assert plan.forced == []
    bench.run()
    assert len(bench.tokens[1]) == 12
    bench.check_outputs()


def test_forced_tokens_reach_a_sequence_that_just_gave_way() -> None:
    """What a grammar forces is appended whether or not memory was short in that very step."""
    bench = Bench(num_blocks=4, max_num_seqs=2, enable_prefix_cache=False)
    bench.add(request(1, PROMPT[:5], 6))
    bench.add(request(2, PROMPT[:5], 8))
    while bench.scheduler.stats().preemptions == 0:
        plan = bench.launch()
        if plan is not None and 2 in plan.seq_ids:
            bench.scheduler.hold(2)
        else:
            bench.settle()
            if not bench.scheduler.stats().preemptions:
                bench.scheduler.unhold(2)
    before = len(bench.tokens[2])
    assert before
    assert bench.force(2, [40, 41, 42])
    bench.scheduler.unhold(2)
    bench.run()
    assert bench.tokens[2][before : before + 3] == [40, 41, 42]
    assert len(bench.tokens[2]) == 8
    bench.check_outputs()
    bench.check_empty()


def test_constrained_rows_are_named_when_they_sample() -> None:
    bench = Bench(max_num_batched_tokens=6)
    structured = StructuredOutput.regex("a+")
    bench.scheduler.add(request(1, PROMPT, 3, structured=structured), 0.0)
    first, second = bench.scheduler.schedule(0.0), bench.scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    assert (first.constrained, second.constrained) == ([], [0])


@pytest.mark.parametrize("length", [5, 7, 8, 9])
def test_a_late_mask_costs_one_token_computed_again(length: int) -> None:
    bench = Bench(max_num_batched_tokens=6)
    prompt = list(range(length))
    bench.add(request(1, prompt, 6, structured=StructuredOutput.regex("a+")))
    late = {1, 3}
    bench.late = lambda seq_id: bench.launcher.launches in late
    for _ in range(40):
        bench.step()
        if bench.held and bench.in_flight:
            # The mask comes before the step that went on without it has settled.
            held, bench.held = bench.held, set()
            for seq_id in held:
                bench.scheduler.unhold(seq_id)
    bench.run()
    assert bench.tokens[1] == solo(prompt, 6)
    bench.check_empty()


def test_plans_are_copies() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 9))
    plan = bench.launch()
    assert plan is not None
    arrays = (plan.slots, plan.starts, plan.lengths, plan.block_tables, plan.num_blocks)
    before = [array.copy() for array in arrays]
    bench.run()
    bench.add(request(2, [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], 9))
    bench.run()
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_results_settle_in_order() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 5))
    bench.launch()
    bench.launch()
    bench.in_flight.reverse()
    with pytest.raises(ValueError, match=r"result of step 2; in flight, in order, are \[1, 2\]"):
        bench.settle()


def test_lanes_settle_on_their_own_and_a_row_changes_lanes_when_it_has_settled() -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    bench.add(request(1, PROMPT, 6))
    bench.launch(Work.PREFILL)
    assert bench.launch(Work.DECODE) is None, "its prefill is in flight in the other lane"
    bench.settle()
    bench.add(request(2, list(range(30)), 3))
    long = bench.launch(Work.PREFILL)
    assert long is not None
    assert long.num_decode == 0
    assert long.num_tokens == 16
    for _ in range(3):
        plan = bench.launch(Work.DECODE)
        assert plan is not None
        assert plan.seq_ids == [1]
        bench.settle(Work.DECODE)
    assert len(bench.tokens[1]) == 4, "decode went on beside one long prefill step"
    bench.lanes = [Work.PREFILL, Work.DECODE]
    bench.run()
    bench.check_outputs()


def test_a_prompt_waits_for_blocks_that_another_lane_is_writing() -> None:
    bench = Bench(max_num_batched_tokens=64)
    stem = list(range(16))
    bench.add(request(1, [*stem, 20], 2))
    bench.launch(Work.ALL)
    bench.add(request(2, [*stem, 21], 2))
    assert bench.launch(Work.PREFILL) is None
    bench.settle()
    plan = bench.launch(Work.PREFILL)
    assert plan is not None
    assert plan.starts.tolist() == [16]
    bench.lanes = [Work.PREFILL, Work.DECODE]
    bench.run()
    bench.check_outputs()


def test_two_prompts_admitted_in_one_step_share_their_beginning() -> None:
    bench = Bench(max_num_batched_tokens=64)
    stem = list(range(16))
    bench.add(request(1, [*stem, 20], 4))
    bench.add(request(2, [*stem, 21], 4))
    plan = bench.launch()
    assert plan is not None
    assert plan.lengths.tolist() == [17, 1]
    assert plan.block_tables[0, :4].tolist() == plan.block_tables[1, :4].tolist()
    bench.run()
    bench.check_outputs()
    cached = {update.seq_id: update.cached_tokens for update in bench.updates if update.first}
    assert cached == {1: 0, 2: 16}


def test_the_same_prompt_again_computes_its_last_token_only_up_to_a_block() -> None:
    bench = Bench()
    for seq_id in (1, 2):
        bench.add(request(seq_id, list(range(16)), 2))
        bench.run()
    first = [update.cached_tokens for update in bench.updates if update.first]
    assert first == [0, 12], "the last block is computed again: its last token has to be"
    bench.check_outputs()


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 12))
    bench.run()
    bench.add(request(2, [*PROMPT, *bench.tokens[1], 3, 3], 2))
    bench.run()
    cached = [update.cached_tokens for update in bench.updates if update.first]
    # 9 + 12 tokens, of which the last has no keys and values: 20 are five whole blocks.
    assert cached == [0, 20]
    bench.check_outputs()


def test_prompt_logprobs_are_right_and_come_once_with_the_first_token() -> None:
    bench = Bench(max_num_batched_tokens=6)
    bench.add(request(1, PROMPT, 2))
    bench.run()
    bench.add(request(2, PROMPT, 2, prompt_logprobs=0))
    bench.run()
    found = [u for u in bench.updates if u.seq_id == 2 and u.prompt_logprobs is not None]
    assert [update.first for update in found] == [True]
    assert found[0].cached_tokens == 0
    bench.check_outputs()


def test_one_row_fails_alone() -> None:
    error = ValueError("a processor")
    bench = Bench(faults=Faults(row_errors={2: error}))
    for seq_id in (1, 2, 3):
        bench.add(request(seq_id, PROMPT, 4))
    bench.run()
    failed = [update for update in bench.updates if update.error is not None]
    assert [(u.seq_id, u.error, u.finish_reason) for u in failed] == [
        (2, error, FinishReason.ERROR)
    ]
    assert bench.tokens[1] == bench.tokens[3] == solo(PROMPT, 4)
    bench.check_empty()


def test_who_shared_a_failed_beginning_computes_it_again() -> None:
    bench = Bench(max_steps_in_flight=3, max_num_batched_tokens=64)
    stem = list(range(16))
    bench.add(request(1, [*stem, 20], 4))
    bench.launch(fails=True)
    bench.add(request(2, [*stem, 21], 4))
    plan = bench.launch()
    assert plan is not None
    assert plan.starts.tolist()[-1] == 16, "it shares what the first step is writing"
    bench.run()
    assert bench.ended == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert bench.tokens[2] == solo([*stem, 21], 4)
    bench.check_empty()


def test_preemption_waits_for_results_and_goes_on_exactly() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2, max_steps_in_flight=3)
    preempted = []
    original = bench.scheduler._residents.pressure._preempt

    def watch(sequence: object) -> None:
        in_flight = [seq_id for step in bench.in_flight for seq_id in step.plan.seq_ids]
        assert sequence.seq_id not in in_flight
        preempted.append(sequence.seq_id)
        original(sequence)

    bench.scheduler._residents.pressure._preempt = watch
    bench.add(request(1, [1, 2, 3], 24))
    bench.add(request(2, [4, 5, 6], 24))
    bench.run()
    assert preempted
    assert set(preempted) == {2}, "the less urgent one gives way"
    assert bench.tokens == {1: solo([1, 2, 3], 24), 2: solo([4, 5, 6], 24)}


def test_a_resumed_sequence_brings_its_output_along() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2, enable_prefix_cache=False)
    bench.add(request(1, [1, 2, 3], 24))
    bench.add(request(2, [4, 5, 6], 24))
    bench.run()
    resumed = [
        init for plan in bench.launcher.plans for init in plan.slot_inits if init.output_token_ids
    ]
    assert resumed
    for init in resumed:
        assert bench.tokens[init.request.seq_id][: len(init.output_token_ids)] == list(
            init.output_token_ids
        )


def test_prompt_positions_that_want_logprobs_are_bounded_a_step() -> None:
    """Each takes logits of the whole vocabulary, so a large budget must not be all theirs."""
    long = [1 + i % 40 for i in range(900)]
    bench = Bench(
        num_blocks=900, max_model_len=2048, max_num_batched_tokens=4096, enable_prefix_cache=False
    )
    bench.add(request(1, long, 2, prompt_logprobs=0))
    bench.add(request(2, long[1:], 2, prompt_logprobs=0))
    bench.add(request(3, long[2:], 2))
    wanted = []
    while (plan := bench.launch()) is not None:
        wanted.append(int(plan.lengths[plan.prompt_logprob_rows].sum()))
        bench.settle()
    bench.run()
    bench.check_outputs()
    assert wanted[:4] == [512, 512, 512, 263]
    assert all(len(bench.tokens[i]) == 2 for i in (1, 2, 3))
