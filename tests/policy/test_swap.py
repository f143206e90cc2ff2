"""Sequences that give way leave their blocks on the host and come back without computing anew."""

from __future__ import annotations

import pytest

from aengine.request import FinishReason, StructuredOutput
from tests.policy.harness import Bench, request, solo

FIRST, SECOND = list(range(1, 10)), list(range(20, 28))


def crowded(**options: object) -> Bench:
    """Two sequences in a pool of five blocks of four, where one of them must give way."""
    bench = Bench(
        **{"num_blocks": 5, "num_host_blocks": 8, "enable_prefix_cache": False, **options}
    )
    bench.add(request(1, FIRST, 8))
    bench.add(request(2, SECOND, 8))
    return bench


def until_copying(bench: Bench, *, to_host: bool) -> None:
    """Steps, until a copy of this direction has been launched. Copies do not end by themselves."""
    for _ in range(60):
        if bench.copies and bench.copies[0].copy.to_host is to_host:
            return
        if bench.copies:
            bench.settle_copy()
        bench.launch()
        if bench.in_flight:
            bench.settle()
    raise AssertionError("no such copy")


def finish(bench: Bench) -> None:
    bench.run()
    bench.check_outputs()
    bench.check_empty()


def computed(bench: Bench, seq_id: int) -> int:
    """Tokens of a sequence that steps have computed, again included."""
    total = 0
    for plan in bench.launcher.plans:
        if seq_id in plan.seq_ids:
            total += int(plan.lengths[plan.seq_ids.index(seq_id)])
    return total


def test_nothing_is_computed_twice() -> None:
    bench = crowded()
    finish(bench)
    stats = bench.scheduler.stats()
    assert stats.swapped_out == stats.swapped_in == stats.preemptions > 0
    for seq_id, prompt in ((1, FIRST), (2, SECOND)):
        assert bench.tokens[seq_id] == solo(prompt, 8)
        # The last token is never computed.
        assert computed(bench, seq_id) == len(prompt) + 8 - 1


def test_without_swap_space_it_is_computed_again() -> None:
    bench = crowded(num_host_blocks=0)
    finish(bench)
    assert bench.scheduler.stats().preemptions > 0
    assert bench.scheduler.stats().swapped_out == 0
    assert computed(bench, 2) > len(SECOND) + 7


@pytest.mark.parametrize(
    "options", [{"swap_min_tokens": 100}, {"num_host_blocks": 1}], ids=["short", "no room"]
)
def test_what_is_not_worth_it_or_has_no_room_is_computed_again(options: dict[str, int]) -> None:
    bench = crowded(**options)
    finish(bench)
    stats = bench.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.swapped_out == 0


def test_its_blocks_are_leased_until_the_copy_has_ended() -> None:
    bench = crowded()
    until_copying(bench, to_host=True)
    copy = bench.copies[0].copy
    for _ in range(3):  # the other one needs a block, and waits for it
        bench.launch()
        while bench.in_flight:
            bench.settle()
    stats = bench.scheduler.stats()
    assert stats.leased_blocks == len(copy.device_blocks)
    assert stats.swapped_blocks == len(copy.host_blocks)
    assert bench.launch() is None
    bench.settle_copy()
    assert bench.scheduler.stats().leased_blocks == 0
    assert bench.launch() is not None
    finish(bench)


def test_it_takes_part_only_when_the_copy_back_has_ended() -> None:
    bench = crowded()
    until_copying(bench, to_host=False)
    assert bench.scheduler.stats().running >= 1
    launched = [bench.launch() for _ in range(2)]
    assert all(plan is None or 2 not in plan.seq_ids for plan in launched)
    while bench.in_flight:
        bench.settle()
    bench.settle_copy()
    plan = bench.launch()
    assert plan is not None
    row = plan.seq_ids.index(2)
    assert [init.request.seq_id for init in plan.slot_inits] == [2]
    assert plan.slot_inits[0].output_token_ids == tuple(bench.tokens[2])
    assert int(plan.lengths[row]) == 1
    finish(bench)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_that_fails_costs_a_recompute(to_host: bool) -> None:
    bench = crowded()
    until_copying(bench, to_host=to_host)
    bench.settle_copy(ok=False)
    assert bench.scheduler.stats().swapped_blocks == 0
    finish(bench)
    assert computed(bench, 2) > len(SECOND) + 7


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
@pytest.mark.parametrize("phase", ["leaving", "away", "returning"])
@pytest.mark.parametrize("ok", [True, False])
def test_it_may_end_while_it_is_swapped(phase: str, reason: FinishReason, ok: bool) -> None:
    bench = crowded()
    until_copying(bench, to_host=phase != "returning")
    if phase == "away":
        bench.settle_copy()
        assert bench.scheduler.stats().swapped_blocks > 0
    assert bench.finish(2, reason)
    stats = bench.scheduler.stats()
    assert stats.swapped_blocks == 0
    # The host's blocks are leased to the copy that touches them, like the device's.
    assert (stats.host_leased_blocks > 0) is (phase != "away")
    if phase != "away":
        bench.settle_copy(ok=ok)
    finish(bench)
    assert bench.tokens[1] == solo(FIRST, 8)


def test_a_deadline_passes_while_it_is_swapped() -> None:
    bench = crowded()
    bench.finish(2)
    bench.add(request(3, SECOND, 8, deadline=5.0))
    until_copying(bench, to_host=True)
    bench.now = 6.0
    assert bench.scheduler.expire(bench.now) == [3]
    bench.ended[3] = FinishReason.DEADLINE
    finish(bench)


def test_who_gives_way_on_the_way_back_is_on_the_host_still() -> None:
    bench = crowded(num_blocks=6)
    until_copying(bench, to_host=False)
    outs = bench.scheduler.stats().swapped_out
    # Somebody more urgent needs the blocks meanwhile.
    bench.add(request(9, SECOND, 4, priority=-5))
    sequence = bench.scheduler._live[2]
    bench.scheduler._residents.pressure._park(sequence)
    bench.settle_copy()
    assert sequence.slot == 0
    assert sequence.swapped > 0
    assert bench.scheduler.stats().swapped_out == outs
    finish(bench)
    assert computed(bench, 2) == len(SECOND) + 7


def test_what_the_cache_has_still_is_not_copied() -> None:
    bench = crowded(enable_prefix_cache=True)
    until_copying(bench, to_host=True)
    out = bench.copies[0].copy
    until_copying(bench, to_host=False)
    back = bench.copies[0].copy
    assert back.host_blocks == out.host_blocks[len(out.host_blocks) - len(back.host_blocks) :]
    assert len(back.host_blocks) < len(out.host_blocks)
    finish(bench)


def test_held_and_unheld_on_the_way_back() -> None:
    bench = crowded()
    until_copying(bench, to_host=False)
    bench.scheduler.hold(2)
    bench.settle_copy()
    while (plan := bench.launch()) is not None:
        assert 2 not in plan.seq_ids
        bench.settle()
    bench.scheduler.unhold(2)
    finish(bench)
    assert bench.tokens[2] == solo(SECOND, 8)


def test_unheld_before_the_copy_has_ended() -> None:
    bench = crowded()
    until_copying(bench, to_host=False)
    bench.scheduler.hold(2)
    bench.scheduler.unhold(2)
    plan = bench.launch()
    assert plan is None or 2 not in plan.seq_ids
    finish(bench)


def test_forced_tokens_reach_a_swapped_sequence() -> None:
    bench = Bench(num_blocks=5, num_host_blocks=8, enable_prefix_cache=False)
    bench.add(request(1, FIRST, 8))
    bench.add(request(2, SECOND, 10, structured=StructuredOutput.regex("a")))
    until_copying(bench, to_host=True)
    assert bench.force(2, [3, 4])
    finish(bench)
    assert len(bench.tokens[2]) == 10


def test_prompt_logprobs_of_a_swapped_sequence() -> None:
    bench = Bench(num_blocks=8, num_host_blocks=16, max_num_batched_tokens=6)
    bench.add(request(1, FIRST, 20))
    bench.add(request(2, list(range(30, 46)), 9, prompt_logprobs=0))
    finish(bench)
    assert bench.scheduler.stats().swapped_in > 0
