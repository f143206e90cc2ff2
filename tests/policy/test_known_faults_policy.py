"""Faults that users of other engines reported about KV, batches, preemption and prefixes.

Each test is named after the report: S# is sgl-project/sglang, V# vllm-project/vllm.
"""

from __future__ import annotations

import random

import pytest

from aengine.errors import EngineOverloadedError
from aengine.request import FinishReason
from tests.policy.harness import VOCAB, Bench, request, solo

PROMPT = list(range(1, 10))


def test_s11210_finish_and_abort_storm_with_canary_blocks() -> None:
    rng = random.Random(11210)
    bench = Bench(num_blocks=16, max_num_seqs=6, max_steps_in_flight=4, max_num_batched_tokens=12)
    for seq_id in range(1, 120):
        bench.add(request(seq_id, [rng.randrange(VOCAB)] * rng.randint(1, 9), rng.randint(1, 9)))
        for _ in range(rng.randint(0, 3)):
            bench.launch()
        if bench.in_flight and rng.random() < 0.6:
            bench.settle()
        live = sorted(set(bench.tokens) - set(bench.ended))
        if live and rng.random() < 0.3:
            bench.finish(rng.choice(live))
    bench.run()
    bench.check_empty()
    bench.check_outputs()


def test_s14972_overlap_and_retraction_on_a_tiny_pool_lose_nothing() -> None:
    bench = Bench(num_blocks=9, max_num_seqs=4, max_steps_in_flight=3, max_num_batched_tokens=8)
    for seq_id in range(1, 9):
        bench.add(request(seq_id, [seq_id, seq_id + 1], 30))
    bench.run()
    assert bench.scheduler.stats().preemptions > 0
    for seq_id in range(1, 9):
        assert bench.tokens[seq_id] == solo([seq_id, seq_id + 1], 30)


def test_s28702_s18694_blocks_are_never_freed_twice() -> None:
    bench = Bench(max_steps_in_flight=3)
    bench.add(request(1, PROMPT, 9))
    bench.launch()
    bench.launch()
    assert bench.finish(1)
    assert not bench.finish(1)
    assert not bench.scheduler.finish(1, FinishReason.STOP)
    bench.settle()
    bench.settle()
    bench.check_empty()


def test_s22518_s35537_the_queue_moves_on_after_every_saturation() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=2)
    for wave in range(3):
        for seq_id in range(1, 9):
            bench.add(request(10 * wave + seq_id, [wave, seq_id, 1], 12))
        bench.step()
        assert bench.scheduler.num_waiting > 0
        bench.run()
        assert bench.scheduler.num_waiting == 0
    bench.check_outputs()


def test_mini_sglang_89_102_blocks_keep_their_owner_while_a_step_runs() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2, max_steps_in_flight=3, enable_prefix_cache=False)
    bench.add(request(1, [1] * 20, 4))
    bench.launch()
    bench.launch()
    bench.finish(1)
    bench.add(request(2, [2] * 20, 4))
    assert bench.launch() is None, "five of six blocks may still be touched"
    bench.settle()
    assert bench.launch() is None, "the second step is in flight"
    bench.settle()
    plan = bench.launch()
    assert plan is not None
    assert plan.seq_ids == [2]
    bench.run()
    bench.check_outputs()


def test_v30142_v47900_late_results_of_an_earlier_stay_are_dropped() -> None:
    bench = Bench(max_steps_in_flight=4, max_num_batched_tokens=64)
    stem = list(range(16))
    bench.add(request(1, [*stem, 20], 4))
    bench.launch(fails=True)
    bench.add(request(2, [*stem, 21], 6))
    bench.launch()
    bench.launch()
    bench.settle()
    again = bench.launch()
    assert again is not None
    assert again.slot_inits[0].request.seq_id == 2, "it came back before its late results did"
    assert bench.settle() == []
    assert bench.settle() == []
    bench.run()
    assert bench.tokens[2] == solo([*stem, 21], 6)


def test_vllm_ascend_16315_no_preemption_thrash() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=4, max_steps_in_flight=3)
    for seq_id in range(1, 5):
        bench.add(request(seq_id, [seq_id] * 6, 28))
    idle = 0
    while bench.scheduler.has_work:
        before = sum(map(len, bench.tokens.values()))
        bench.step()
        idle = 0 if sum(map(len, bench.tokens.values())) > before else idle + 1
        assert idle < 12, "steps go by and no token comes"
    tokens = sum(map(len, bench.tokens.values()))
    computed = sum(plan.num_tokens for plan in bench.launcher.plans)
    assert computed < 3 * tokens, "most of the work is done over again"
    bench.check_outputs()


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_v_pr_7111_cancelled_in_any_phase_all_blocks_come_back(phase: str) -> None:
    bench = Bench(max_num_seqs=2, max_num_batched_tokens=4)
    for seq_id in range(1, 5):  # n = 4 of one prompt
        bench.add(request(seq_id, PROMPT, 9))
    for _ in range({"queued": 0, "prefilling": 1, "decoding": 6}[phase]):
        bench.launch()
        if len(bench.in_flight) == 2:
            bench.settle()
    for seq_id in range(1, 5):
        bench.finish(seq_id)
    assert bench.launch() is None, "something cancelled is launched all the same"
    while bench.in_flight:
        assert bench.settle() == []
    bench.check_empty()
    bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.stats().free_blocks == bench.num_blocks


def test_s6778_s36475_no_leak_at_idle() -> None:
    bench = Bench(num_blocks=12)
    for round_ in range(20):
        for seq_id in range(3):
            bench.add(request(3 * round_ + seq_id, [round_, seq_id, *PROMPT[:6]], 7))
        bench.run()
        bench.check_empty()


def test_v2901_v18826_a_flood_is_refused_and_the_rest_is_served() -> None:
    bench = Bench(max_num_queued_requests=16)
    for seq_id in range(16):
        bench.add(request(seq_id, PROMPT, 2))
    for seq_id in range(16, 200):
        with pytest.raises(EngineOverloadedError) as caught:
            bench.add(request(seq_id, PROMPT, 2))
        assert caught.value.retry_after > 0
    bench.run()
    bench.check_outputs()


def test_v16391_waiting_has_a_deadline() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(request(1, PROMPT, 40))
    bench.add(request(2, PROMPT, 4, deadline=1.0))
    bench.step()
    assert bench.scheduler.expire(1.0) == [2]
    assert bench.scheduler.num_waiting == 0


def test_v17103_v16234_new_weights_make_the_cache_forget() -> None:
    bench = Bench()
    bench.add(request(1, PROMPT, 20))
    bench.step()
    bench.scheduler.invalidate(1)
    # What runs on mixes old and new: it must not come back into the cache.
    bench.run()
    assert bench.scheduler.stats().cache_nodes == 0
    bench.add(request(2, PROMPT, 2))
    bench.run()
    bench.scheduler.invalidate(1)
    bench.add(request(3, PROMPT, 2))
    bench.run()
    cached = {update.seq_id: update.cached_tokens for update in bench.updates if update.first}
    assert cached == {1: 0, 2: 0, 3: 8}, "the same epoch forgets nothing"


def test_tensorrt_llm_10810_abort_with_prompt_logprobs_pending() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add(request(1, PROMPT, 4, prompt_logprobs=0))
    bench.add(request(2, PROMPT, 4, prompt_logprobs=0))
    bench.launch()
    bench.launch()
    bench.finish(1)
    bench.run()
    bench.check_outputs()
    bench.check_empty()


def test_nnsight_641_one_row_of_eight_raises() -> None:
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=80)
    bench.launcher.faults.row_errors = {4: ZeroDivisionError("a processor")}
    for seq_id in range(1, 9):
        bench.add(request(seq_id, [seq_id, *PROMPT], 6))
    bench.run()
    assert bench.ended.pop(4) is FinishReason.ERROR
    assert set(bench.ended.values()) == {FinishReason.LENGTH}
    for seq_id in bench.ended:
        assert bench.tokens[seq_id] == solo([seq_id, *PROMPT], 6)
