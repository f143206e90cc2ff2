"""What the prefix cache saves: time to first token of a prompt whose beginning was seen before.

    python benchmarks/prefix_cache.py [--model smollm2-135m] [--device cpu] [--rounds 3]

A cold prompt of 4,096 tokens, then another that shares its first 4,000.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics

from aengine import Engine, SamplingParams

LENGTH, SHARED = 4096, 4000


def ids(seed: int, length: int) -> list[int]:
    return [100 + (seed * 7919 + i * 104729 + i * i * seed) % 48000 for i in range(length)]


async def ttft(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how much of the prompt came from the cache."""
    result = await engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
    assert result.metrics.ttft is not None
    return result.metrics.ttft, result.usage.cached_tokens


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seeds = itertools.count(1)
    cold, warm = [], []
    async with Engine(args.model, device=args.device, dtype=args.dtype) as engine:
        await ttft(engine, ids(0, 600))
        for _ in range(args.rounds):
            prompt = ids(next(seeds), LENGTH)
            cold.append((await ttft(engine, prompt))[0])
            seconds, cached = await ttft(
                engine, prompt[:SHARED] + ids(1000 + next(seeds), LENGTH - SHARED)
            )
            assert cached == SHARED // 16 * 16
            warm.append(seconds)
    first, second = statistics.median(cold), statistics.median(warm)
    print(
        f"cold {first * 1e3:.0f} ms, {SHARED} of {LENGTH} tokens cached {second * 1e3:.0f} ms: "
        f"{second / first:.3f} of the cold time"
    )


if __name__ == "__main__":
    asyncio.run(main())
