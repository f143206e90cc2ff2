"""What swapping saves: requests that outgrow the KV cache, computed again or copied back.

    python -m benchmarks.kv_swap [--model smollm2-135m] [--device cpu] [--requests 12] ...

All requests start at once, with prompts of their own; by default the cache has room for about half
of what they grow to (SmolLM2-135M in float32).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from aengine import Engine, SamplingParams


def ids(seed: int, length: int) -> list[int]:
    return [100 + (seed * 7919 + i * 104729 + i * i * seed) % 48000 for i in range(length)]


async def batch(args: argparse.Namespace, **options: Any) -> dict[str, float]:
    """Seconds and what happened, for all requests together."""
    params = SamplingParams(max_tokens=args.output, temperature=0, ignore_eos=True)
    engine = Engine(
        args.model,
        device=args.device,
        load_format=args.load_format,
        max_model_len=args.prompt + args.output,
        max_num_seqs=args.requests,
        kv_cache_memory=args.kv_memory << 20,
        enable_prefix_cache=False,
        **options,
    )
    async with engine:
        await engine.generate(ids(99, args.prompt), SamplingParams(max_tokens=8, temperature=0))
        began = time.perf_counter()
        asked = [engine.generate(ids(i, args.prompt), params) for i in range(args.requests)]
        await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        stats = await engine.stats()
    tokens = args.requests * args.output
    return {
        "seconds": seconds,
        "tokens/s": tokens / seconds,
        "preempted": stats.preemptions,
        "swapped": stats.swapped_in,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--kv-memory", type=int, default=150, help="MiB on the device")
    parser.add_argument("--swap-space", type=int, default=1024, help="MiB on the host")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ways = {"computed again": 0, "swapped": args.swap_space << 20}
    for name, space in ways.items():
        found = [await batch(args, swap_space=space) for _ in range(args.rounds)]
        best = min(found, key=lambda each: each["seconds"])
        told = ", ".join(f"{key} {value:.4g}" for key, value in best.items())
        print(f"{name:15s} best of {args.rounds}: {told}")


if __name__ == "__main__":
    asyncio.run(main())
