"""What structured output costs a batch, and what a step of many streams costs its host in Python.

python benchmarks/overlap.py [--rounds 3] [--seconds 10] [--model smollm2-135m] [--profile]

Prints, for the CPU model:

- 64 streams, all free and all constrained by a nested JSON schema, by turns: tokens/s and their
  ratio, with what the grammar forces appended (as it is by default) and with every token sampled;
- 32 free + 32 constrained: tokens/s of the free half against the same half of 64 free streams.

Streams are replaced as they end; the first two seconds do not count. Then, with a scripted model
and 256 streams: CPU time a step of the engine's thread, the part of it that makes text and posts
it, and of the thread that reads. `--profile` shows where the first goes (and adds to it).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import threading
import time
from collections import Counter
from typing import Any

import uvloop

from aengine import Engine, SamplingParams, StructuredOutput
from aengine.engine import delayed
from aengine.testing import Faults, scripted_engine

STREAMS = 64
TOKENS = 96
"""Each answer is cut here: the schema asks for more."""
PROMPT = "The order of customer number {}, as JSON: "
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 30},
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["DE", "FR", "JP", "US"]},
    },
    "required": ["street", "city", "country"],
    "additionalProperties": False,
}
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "quantity", "price", "tags"],
    "additionalProperties": False,
}
ORDER = StructuredOutput.json(
    {
        "type": "object",
        "properties": {
            "customer": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 30}, "address": ADDRESS},
                "required": ["name", "address"],
                "additionalProperties": False,
            },
            "items": {"type": "array", "items": ITEM, "minItems": 20, "maxItems": 40},
        },
        "required": ["customer", "items"],
        "additionalProperties": False,
    }
)


async def keep_streaming(
    engine: Engine, number: int, structured: StructuredOutput | None, done: Counter[bool]
) -> None:
    """One request after another; counts its tokens under whether they are constrained."""
    while True:
        params = SamplingParams(
            max_tokens=TOKENS,
            temperature=0.8,
            seed=number,
            ignore_eos=structured is None,
            structured=structured,
        )
        async for chunk in engine.generate(PROMPT.format(number), params):
            done[structured is not None] += len(chunk.token_ids)
        number += STREAMS


async def rates(engine: Engine, constrained: int, seconds: float) -> tuple[float, float]:
    """Tokens/s of the free and of the constrained streams; the first ones are constrained."""
    done: Counter[bool] = Counter()
    tasks = [
        asyncio.create_task(keep_streaming(engine, i, ORDER if i < constrained else None, done))
        for i in range(STREAMS)
    ]
    await asyncio.sleep(2.0)
    before, began = done.copy(), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    counted = done[False] - before[False], done[True] - before[True]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return counted[0] / took, counted[1] / took


async def structured(args: argparse.Namespace) -> None:
    kinds: dict[str, tuple[int, int]] = {
        "free": (0, delayed.SHORTEST_JUMP),
        "constrained": (STREAMS, delayed.SHORTEST_JUMP),
        "constrained, no jumps": (STREAMS, 10**9),
        "half": (STREAMS // 2, delayed.SHORTEST_JUMP),
    }
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": STREAMS, "max_model_len": 256}
    async with Engine(args.model, **options) as engine:
        for _ in range(args.rounds):
            for kind, (constrained, shortest) in kinds.items():
                delayed.SHORTEST_JUMP = shortest
                found[kind].append(await rates(engine, constrained, args.seconds))
    free = statistics.median(a for a, _ in found["free"])
    half = statistics.median(a for a, _ in found["half"])
    print(f"{STREAMS} free streams: {free:.0f} tokens/s ({spread(found['free'])})")
    for kind in ("constrained", "constrained, no jumps"):
        rate = statistics.median(b for _, b in found[kind])
        print(f"{STREAMS} {kind}: {rate:.0f} tokens/s, {rate / free:.2f} ({spread(found[kind])})")
    print(f"{STREAMS // 2} free beside as many constrained: {half:.0f} tokens/s", end=", ")
    print(f"{2 * half / free:.2f} of half of all free ({spread(found['half'])})")


def spread(pairs: list[tuple[float, float]]) -> str:
    return "rounds " + ", ".join(f"{a + b:.0f}" for a, b in pairs)


async def host(args: argparse.Namespace) -> None:
    """CPU time a step of the engine's thread and, apart from it, of the thread that reads."""
    streams = 256
    engine = scripted_engine(
        lambda tokens: ord("x"),
        faults=Faults(delay=0.02),
        max_num_seqs=streams,
        max_num_batched_tokens=512,
        num_blocks=streams * 16,
        max_model_len=256,
    )
    told = 0.0
    clocks: list[int] = []
    profile = cProfile.Profile()

    async def read(i: int) -> None:
        async for _ in engine.generate([i % 256], params):
            pass

    params = SamplingParams(max_tokens=200, temperature=0)
    async with engine:
        core: Any = engine._service._core
        settle = core.settle

        def timed(updates: Any) -> None:
            nonlocal told
            if not clocks:
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
                if args.profile:
                    profile.enable()
            began = time.thread_time()
            settle(updates)
            told += time.thread_time() - began

        core.settle = timed
        await engine.generate([0], SamplingParams(max_tokens=2))
        before, told = await engine.stats(), 0.0
        engine_cpu, reader_cpu = time.clock_gettime(clocks[0]), time.thread_time()
        await asyncio.gather(*[read(i) for i in range(streams)])
        reader_cpu = time.thread_time() - reader_cpu
        engine_cpu = time.clock_gettime(clocks[0]) - engine_cpu
        steps = (await engine.stats()).steps - before.steps
    total, text, reading = (1e3 * each / steps for each in (engine_cpu, told, reader_cpu))
    print(
        f"{streams} streams, {steps} steps: {total:.2f} ms of the engine's thread a step", end=", "
    )
    print(f"of which {text:.2f} ms make text and post it; {reading:.2f} ms of the readers' thread")
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(f"load of the machine before: {os.getloadavg()[0]:.2f}")
    uvloop.run(structured(args))
    uvloop.run(host(args))


if __name__ == "__main__":
    main()
