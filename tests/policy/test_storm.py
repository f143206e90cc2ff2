"""The storm: random everything on a small pool, seed by seed; every seed can be run again alone."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from aengine.policy.scheduler import Work
from aengine.request import FinishReason, StructuredOutput
from tests.policy.harness import VOCAB, Bench, request


def storm(seed: int, *, swap: bool = False) -> Bench:
    """One storm to its end, all oracles on."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    num_blocks = rng.randint(8, 64)
    max_num_seqs = rng.randint(1, 8)
    bench = Bench(
        num_blocks=num_blocks,
        max_model_len=128,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 40),
        max_steps_in_flight=rng.randint(1, 4),
        enable_prefix_cache=rng.random() < 0.8,
        num_host_blocks=swap and rng.choice([2, num_blocks // 2, 4 * num_blocks]),
        swap_min_tokens=rng.choice([1, 1, 9]),
    )
    bench.copy_is_early = lambda: rng.random() < 0.5
    capacity = min(num_blocks * block_size, 127)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    # One lane for everything, two lanes side by side, or all of them in turn.
    bench.lanes = rng.choice(
        [[Work.ALL], [Work.ALL], [Work.PREFILL, Work.DECODE], [Work.ALL, Work.PREFILL, Work.DECODE]]
    )
    bench.late = lambda seq_id: rng.random() < 0.2
    for seq_id in range(1, rng.randint(10, 30)):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))]
        prompt = (rng.choice(stems)[: rng.randrange(40)] + tail)[-capacity:]
        room = min(capacity + 1, 128) - len(prompt)
        bench.add(
            request(
                seq_id,
                prompt,
                min(rng.randint(1, 30), room),
                priority=rng.randint(0, 2),
                deadline=bench.now + rng.uniform(0.5, 3) if rng.random() < 0.2 else None,
                end_token_ids=frozenset(rng.sample(range(VOCAB), rng.randint(0, 3))),
                prompt_logprobs=0 if rng.random() < 0.1 else None,
                structured=StructuredOutput.regex("a") if rng.random() < 0.3 else None,
            )
        )
        for _ in range(rng.randrange(12)):
            _weather(bench, rng)
    bench.unhold_all()
    bench.run()
    assert set(bench.ended) == set(bench.tokens)
    bench.check_empty()
    bench.check_outputs()
    return bench


def _weather(bench: Bench, rng: random.Random) -> None:
    """One thing that happens."""
    live = sorted(set(bench.tokens) - set(bench.ended))
    bench.now += 0.02
    for seq_id in bench.scheduler.expire(bench.now):
        bench.ended[seq_id] = FinishReason.DEADLINE
    if bench.copies and rng.random() < 0.4:
        bench.settle_copy(rng.randrange(len(bench.copies)), ok=rng.random() < 0.9)
    roll = rng.random()
    if roll < 0.45:
        bench.launch(rng.choice(bench.lanes), fails=rng.random() < 0.02)
    elif roll < 0.85:
        if bench.in_flight:
            bench.settle(rng.choice(list(bench.in_flight)).work)
    elif roll < 0.89 and live:
        bench.finish(rng.choice(live))
    elif roll < 0.92 and live:
        bench.held.add(rng.choice(live))
        for seq_id in bench.held:
            bench.scheduler.hold(seq_id)
    elif roll < 0.95 and bench.held:
        seq_id = rng.choice(sorted(bench.held))
        bench.held.discard(seq_id)
        bench.scheduler.unhold(seq_id)
    elif live and rng.random() < 0.5:
        bench.force(rng.choice(live), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))])


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_storm(first: int) -> None:
    preemptions = sum(
        storm(seed).scheduler.stats().preemptions for seed in range(first, first + 20)
    )
    assert preemptions, "these storms put no pressure on memory"


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_storm_with_blocks_swapped_to_the_host(first: int) -> None:
    stats = [
        storm(seed, swap=True).scheduler.stats() for seed in range(10_000 + first, 10_020 + first)
    ]
    assert sum(each.swapped_out for each in stats) > 5
    assert sum(each.swapped_in for each in stats) > 5
    assert sum(each.preemptions - each.swapped_out for each in stats) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_storm_for_five_minutes() -> None:
    until = time.monotonic() + 300
    for seed in itertools.count(1000):
        storm(seed, swap=seed % 2 == 0)
        if time.monotonic() > until:
            break
