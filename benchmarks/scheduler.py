"""What the scheduler costs on the host: `python -m benchmarks.scheduler`.

No device: a step's tokens are made up as soon as it is launched, and settled one step later, as
with `max_steps_in_flight=2`. Times are those of the calls, on one core.

1. `schedule()` + `update()` with N running and 1,000 waiting requests, and the slope over N.
2. Lookup of a 4,096-token prompt in a prefix cache of 100,000 nodes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque

import numpy as np

from aengine.batch import StepResult
from aengine.config import SchedulerConfig
from aengine.policy.block_pool import BlockPool, BlockTable
from aengine.policy.prefix_cache import PrefixCache
from aengine.policy.scheduler import Scheduler
from aengine.policy.sequence import pack
from aengine.request import Request, SamplingParams

BLOCK = 16


def request(seq_id: int, prompt: list[int], max_tokens: int) -> Request:
    """A greedy request that ends by length only."""
    return Request(
        seq_id=seq_id,
        request_id=str(seq_id),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        max_tokens=max_tokens,
        end_token_ids=frozenset({2}),
    )


def percentiles(seconds: list[float]) -> str:
    """p50 and p99 in microseconds; p5 shows what is left when nothing else disturbs the core."""
    p5, p50, p99 = np.percentile(np.array(seconds) * 1e6, [5, 50, 99])
    return f"p5 {p5:7.1f}   p50 {p50:7.1f}   p99 {p99:7.1f} µs"


def steady(running: int, waiting: int, *, context: int, steps: int) -> list[float]:
    """Times of one schedule() + update() while `running` sequences decode."""
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=8192, block_size=BLOCK, max_steps_in_flight=2
    )
    blocks = running * ((context + steps + 200) // BLOCK + 2)
    scheduler = Scheduler(config, num_blocks=blocks, max_model_len=131_072)
    rng = random.Random(0)
    for seq_id in range(1, running + waiting + 1):
        # Lengths differ, so that rows cross block boundaries in different steps.
        length = context + rng.randrange(BLOCK)
        prompt = [rng.randrange(3, 30_000) for _ in range(length)]
        scheduler.add(request(seq_id, prompt, steps + 400), 0.0)
    made_up = [[rng.randrange(3, 30_000) for _ in range(running)] for _ in range(32)]
    in_flight: deque[StepResult] = deque()
    times: list[float] = []
    while len(times) < steps:
        started = time.perf_counter()
        plan = scheduler.schedule(0.0)
        spent = time.perf_counter() - started
        if plan is not None:
            tokens = made_up[plan.step_id % len(made_up)]
            in_flight.append(StepResult(step_id=plan.step_id, token_ids=tokens))
        if len(in_flight) == config.max_steps_in_flight or plan is None:
            result = in_flight.popleft()
            started = time.perf_counter()
            scheduler.update(result, 0.0)
            spent += time.perf_counter() - started
        if plan is not None and plan.num_decode == running:
            times.append(spent)
    return times[steps // 10 :]


def lookup(nodes: int, tokens: int, repeats: int) -> list[float]:
    """Times of a full-length match in a cache of `nodes` nodes."""
    pool = BlockPool(nodes)
    cache = PrefixCache(pool, block_size=BLOCK)
    rng = random.Random(1)
    prompts = []
    while cache.num_nodes < nodes:
        length = min(tokens // BLOCK, nodes - cache.num_nodes)
        prompt = pack([rng.randrange(30_000) for _ in range(length * BLOCK)])
        table = BlockTable()
        pool.extend(table, length)
        node = cache.root(None)
        for index in range(length):
            key = prompt[4 * BLOCK * index : 4 * BLOCK * (index + 1)]
            node = cache.insert(node, key, table[index], 0)
        pool.release(table, 0)
        cache.touch(node)
        if length == tokens // BLOCK:
            prompts.append(prompt)
    times = []
    for _ in range(repeats):
        prompt = rng.choice(prompts)
        started = time.perf_counter()
        match = cache.match(None, prompt, tokens)
        times.append(time.perf_counter() - started)
        if len(match.blocks) != tokens // BLOCK:
            raise AssertionError("a cached prompt was not found")
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of the running")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    sizes = [16, 64, 128, 256, 512]
    medians = []
    for running in sizes:
        times = steady(running, options.waiting, context=options.context, steps=options.steps)
        medians.append(float(np.median(times)) * 1e6)
        print(
            f"schedule+update, {running:4d} running, {options.waiting} waiting: "
            f"{percentiles(times)}"
        )
    slope, offset = np.polyfit(sizes, medians, 1)
    print(f"slope: {slope:.3f} µs per running request, offset {offset:.1f} µs")
    print(f"prefix lookup, 4,096 of 100,000 nodes: {percentiles(lookup(100_000, 4096, 400))}")


if __name__ == "__main__":
    main()
