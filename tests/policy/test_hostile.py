"""Absurd settings and requests: a typed error that names the value or right tokens, no hang."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.config import EngineConfig, SchedulerConfig
from aengine.errors import ConfigError, ContextLengthError, InvalidRequestError
from aengine.policy.scheduler import Scheduler
from aengine.request import FinishReason
from tests.policy.harness import VOCAB, Bench, request, solo

ABSURD: list[Any] = [0, -1, -(10**30), 10**30, 2.5, math.nan, math.inf, True, "7", None, [3], b"1"]


def finish(bench: Bench) -> None:
    bench.run()
    bench.check_outputs()
    bench.check_empty()


@pytest.mark.parametrize(
    "name",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "max_steps_in_flight",
        "priority_ageing",
        "swap_min_tokens",
        "kv_cache_memory",
        "kv_cache_fraction",
        "max_model_len",
    ],
)
@pytest.mark.parametrize("value", ABSURD, ids=repr)
def test_absurd_settings_are_refused_by_name(name: str, value: Any) -> None:
    meaningful = {
        # None is the default of these, and these have no upper bound of their own: what does not
        # fit the device is refused when the model is loaded, with the numbers.
        "block_size": [None],
        "kv_cache_memory": [None, 10**30],
        "kv_cache_fraction": [None],
        "max_model_len": [None, 10**30],
        "swap_min_tokens": [10**30],
        "priority_ageing": [2.5, 10**30],
    }
    if any(value is each or value == each for each in meaningful.get(name, [])):
        EngineConfig.from_options("m", {name: value})
        return
    with pytest.raises(ConfigError, match=name) as caught:
        EngineConfig.from_options("m", {name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


@given(
    num_blocks=st.integers(1, 4),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 3),
    more_budget=st.integers(0, 3),
    depth=st.integers(1, 4),
    max_model_len=st.sampled_from([2, 3, 7, 20, 10**9]),
    cache=st.booleans(),
    host=st.sampled_from([0, 1, 9]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_smallest_pools_and_budgets_serve_all_that_fits(
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    more_budget: int,
    depth: int,
    max_model_len: int,
    cache: bool,
    host: int,
    data: st.DataObject,
) -> None:
    """A pool of one block, one slot, a budget of one token, a context much longer than the pool."""
    bench = Bench(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + more_budget,
        max_steps_in_flight=depth,
        max_model_len=max_model_len,
        enable_prefix_cache=cache,
        num_host_blocks=host,
    )
    room = num_blocks * block_size
    lengths = data.draw(st.lists(st.integers(1, room + 2), min_size=1, max_size=6))
    for seq_id, length in enumerate(lengths, start=1):
        prompt = [1 + i % 3 for i in range(length)]
        asked = request(seq_id, prompt, data.draw(st.integers(1, 9)), prompt_logprobs=0)
        if length >= max_model_len:
            with pytest.raises(ContextLengthError):
                bench.add(asked)
        elif length > room:
            with pytest.raises(InvalidRequestError, match=f"has {num_blocks} "):
                bench.add(asked)
        else:
            bench.add(asked)
    bench.run()
    bench.check_empty()
    for seq_id, tokens in bench.tokens.items():
        asked = bench.requests[seq_id]
        length = len(asked.prompt_token_ids)
        most = min(asked.max_tokens, max_model_len - length, room + 1 - length)
        assert tokens == solo(asked.prompt_token_ids, most)
        assert bench.ended[seq_id] is FinishReason.LENGTH


def test_a_prompt_of_exactly_the_context_is_refused_and_one_less_gets_one_token() -> None:
    bench = Bench(max_model_len=20)
    with pytest.raises(ContextLengthError) as caught:
        bench.add(request(1, [5] * 20, 4))
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (20, 20)
    bench.add(request(2, [5] * 19, 4))
    bench.run()
    assert bench.tokens[2] == solo([5] * 19, 1)


def test_a_prompt_of_exactly_the_pool_gets_one_token() -> None:
    bench = Bench(num_blocks=5, max_model_len=100)
    with pytest.raises(InvalidRequestError, match="never run"):
        bench.add(request(1, [5] * 21, 4))
    bench.add(request(2, [5] * 20, 4))
    bench.run()
    assert bench.tokens[2] == solo([5] * 20, 1)


@pytest.mark.parametrize("length", [8, 9, 11, 12])
@pytest.mark.parametrize("first_wants", [True, False])
def test_prompt_logprobs_of_a_prompt_that_is_cached_as_a_whole(
    length: int, first_wants: bool
) -> None:
    prompt = [3 + i % 7 for i in range(length)]
    bench = Bench()
    bench.add(request(1, prompt, 6, prompt_logprobs=0 if first_wants else None))
    bench.run()
    bench.add(request(2, prompt, 3, prompt_logprobs=0))
    bench.add(request(3, prompt, 3))
    finish(bench)
    told = {u.seq_id for u in bench.updates if u.prompt_logprobs is not None}
    assert told == ({1, 2} if first_wants else {2})


@pytest.mark.parametrize("host", [0, 30])
@pytest.mark.parametrize("cache", [True, False])
def test_siblings_that_share_a_prompt_give_way_and_come_back(host: int, cache: bool) -> None:
    """n = 4: one prompt, four continuations, a pool for one and a half."""
    prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    bench = Bench(num_blocks=9, num_host_blocks=host, enable_prefix_cache=cache)
    for seq_id in range(1, 5):
        bench.add(request(seq_id, prompt, 20))
    finish(bench)
    stats = bench.scheduler.stats()
    assert stats.preemptions > 0
    assert bool(stats.swapped_in) is bool(host)
    assert all(bench.tokens[i] == solo(prompt, 20) for i in range(1, 5))


@pytest.mark.parametrize(
    "priority",
    [math.nan, math.inf, -math.inf, 2**31, -(10**400), 1.5, None],
    ids=lambda value: str(value)[:9],
)
def test_priorities_that_cannot_be_compared_are_refused(priority: Any) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError, match="priority") as caught:
        bench.add(request(1, [1, 2], 3, priority=priority))
    assert caught.value.param == "priority"
    bench.add(request(1, [1, 2], 3))
    finish(bench)


def test_the_largest_priorities_keep_their_order() -> None:
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=8)
    bench.add(request(1, [1], 2))
    bench.launch()
    most = 2**31 - 1
    for seq_id, priority in ((2, most), (3, -most - 1), (4, most), (5, 0)):
        bench.add(request(seq_id, [seq_id], 2, priority=priority))
    finish(bench)
    assert list(bench.ended) == [1, 3, 5, 2, 4]


@pytest.mark.parametrize("deadline", [-1.0, 0.0, -math.inf])
def test_a_deadline_that_is_over_ends_the_request_at_once(deadline: float) -> None:
    bench = Bench()
    bench.add(request(1, [1, 2, 3], 5, deadline=deadline))
    assert bench.scheduler.expire(0.0) == [1]
    bench.ended[1] = FinishReason.DEADLINE
    finish(bench)


def test_endless_deadlines_never_come() -> None:
    bench = Bench()
    bench.add(request(1, [1, 2, 3], 5, deadline=math.inf))
    assert bench.scheduler.expire(1e300) == []
    finish(bench)
    assert bench.tokens[1] == solo([1, 2, 3], 5)


@pytest.mark.parametrize("ids", [(), (-1,), (2**31,), (1, 2**63)])
def test_bad_prompts_are_refused_and_the_next_is_served(ids: tuple[int, ...]) -> None:
    bench = Bench()
    with pytest.raises(InvalidRequestError):
        bench.add(request(1, ids, 3))
    bench.add(request(2, [1], 3))
    finish(bench)


def test_a_sequence_id_in_use_changes_nothing() -> None:
    bench = Bench()
    bench.add(request(1, [1, 2], 3))
    with pytest.raises(ValueError, match="in use"):
        bench.scheduler.add(request(1, [3, 4], 3), 0.0)
    finish(bench)
    assert bench.tokens[1] == solo([1, 2], 3)


def test_a_huge_pool_costs_nothing_that_is_not_used() -> None:
    """Tables are as wide as what runs, however long a sequence might get."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, block_size=1)
    scheduler = Scheduler(config, num_blocks=1_000_000, max_model_len=10**12)
    scheduler.add(request(1, [1] * 5, 3), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.block_tables.shape == (1, 5)
    assert scheduler._rows._tables.shape[1] <= 64


def test_more_output_than_anybody_can_want_is_bounded_by_the_pool() -> None:
    bench = Bench(num_blocks=4, max_model_len=10**9)
    bench.add(request(1, [1, 2, 3], 10**18))
    bench.run()
    assert bench.tokens[1] == solo([1, 2, 3], 4 * 4 + 1 - 3)


@given(priorities=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=8))
@settings(deadline=None)
def test_any_priorities_finish(priorities: list[int]) -> None:
    bench = Bench(num_blocks=6, max_num_seqs=3, num_host_blocks=6)
    for seq_id, priority in enumerate(priorities, start=1):
        prompt = [(seq_id + i) % VOCAB for i in range(5)]
        bench.add(request(seq_id, prompt, 7, priority=priority))
    finish(bench)
