"""Long prompts beside decoding streams on one GPU, by the policy that shares the device out.

Random weights in Llama-3.1-8B's shape, bfloat16, prefix cache off. 32 background streams (prompts
of 512 tokens) decode all the time; prompts of 8,192 tokens with 64 outputs arrive as a Poisson
process. Measured at the consumers: the background's inter-token latency (ITL) and tokens a second
while prompts arrive, and the long prompts' time to first token (TTFT).

    python benchmarks/pdmux.py [--policies P ...] [--rates R ...] [--seconds S] [--json PATH]

Policies: slo:MS (`SloFeedback` with this target), priority, plain, green:N (always the split that
gives decode at least N SMs), chunk:N (`ChunkedOnly`, one loop). `--table` measures instead what
each partition does to both sides; `--frontier MS ...` finds the highest rate at which each policy
keeps the 99th percentile of the ITL under a target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from aengine import Engine, SamplingParams
from aengine.batch import LaneKind
from aengine.policy.mux import ChunkedOnly, PriorityStreams
from aengine.policy.mux_slo import SloFeedback
from benchmarks.gpu import Stream, follow, model_folder, ms, percentile, prompts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aengine.batch import SmPartition
    from aengine.policy.mux import MuxLoad, MuxPolicy

BACKGROUND = 32
LONG, OUTPUTS = 8192, 64
LONGEST = 16_384


class Switch:
    """Another policy for each measurement, in one engine."""

    def __init__(self) -> None:
        self.policy: MuxPolicy = PriorityStreams()
        self.lanes: Any = None

    def select(self, load: MuxLoad) -> SmPartition:
        self.lanes = load.lanes
        return self.policy.select(load)


class Always:
    """One partition whenever there is work for both lanes."""

    def __init__(self, name: str, sms: int = 0) -> None:
        self._name, self._sms = name, sms

    def select(self, load: MuxLoad) -> SmPartition:
        if not load.contended:
            return load.lanes.plain
        return load.lanes.for_decode(self._sms) if self._name == "green" else load.lanes.plain


def policy_of(text: str) -> MuxPolicy:
    name, _, number = text.partition(":")
    if name == "slo":
        return SloFeedback(float(number) / 1e3)
    if name == "priority":
        return PriorityStreams()
    return Always(name, int(number or 0))


@asynccontextmanager
async def serving(folder: Path, args: argparse.Namespace, mux: Any) -> AsyncIterator[Engine]:
    engine = Engine(
        str(folder),
        device="cuda",
        load_format="dummy",
        max_model_len=LONGEST,
        max_num_seqs=128,
        max_num_batched_tokens=args.batched_tokens,
        enable_prefix_cache=False,
        kv_cache_fraction=0.75,
        mux=mux,
    )
    began = time.perf_counter()
    async with engine:
        print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
        for _ in range(2):
            await asyncio.gather(*[follow(engine, p, 4) for p in prompts(4, LONG, 1)])
        yield engine


async def background(engine: Engine, prompt: list[int], stream: Stream) -> None:
    params = SamplingParams(max_tokens=LONGEST - 600, temperature=0, ignore_eos=True)
    async for chunk in engine.generate(prompt, params):
        stream.times.append(time.perf_counter())
        stream.counts.append(len(chunk.token_ids))


@asynccontextmanager
async def decoding(engine: Engine) -> AsyncIterator[list[Stream]]:
    """The background, once all of it decodes."""
    streams = [Stream(time.perf_counter()) for _ in range(BACKGROUND)]
    tasks = [
        asyncio.create_task(background(engine, prompt, stream))
        for prompt, stream in zip(prompts(BACKGROUND, 512, 2), streams, strict=True)
    ]
    while not all(len(stream.times) > 20 for stream in streams):  # noqa: ASYNC110  # whoever
        await asyncio.sleep(0.01)
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def gaps_between(streams: list[Stream], begin: float, end: float) -> list[float]:
    return [
        b - a
        for stream in streams
        for a, b in zip(stream.times, stream.times[1:], strict=False)
        if begin <= a and b <= end
    ]


def tokens_between(streams: list[Stream], begin: float, end: float) -> int:
    return sum(
        count
        for stream in streams
        for at, count in zip(stream.times, stream.counts, strict=True)
        if begin <= at <= end
    )


async def mixed(engine: Engine, rate: float, seconds: float) -> dict[str, Any]:
    """Long prompts at `rate` a second for `seconds`, beside the background."""
    chance = random.Random(round(rate * 1000))
    arrivals: list[float] = []
    at = chance.expovariate(rate)
    while at < seconds:
        arrivals.append(at)
        at += chance.expovariate(rate)
    long = prompts(len(arrivals), LONG, 4)

    async def arrive(prompt: list[int], at: float) -> Stream:
        await asyncio.sleep(at)
        return await follow(engine, prompt, OUTPUTS)

    async with decoding(engine) as streams:
        begin = time.perf_counter()
        arriving = [arrive(prompt, at) for prompt, at in zip(long, arrivals, strict=True)]
        done = asyncio.gather(*arriving)
        await asyncio.sleep(seconds)
        end = time.perf_counter()
        found = await done
    gaps = gaps_between(streams, begin, end)
    firsts = [stream.first for stream in found]
    return {
        "itl_p50_ms": ms(statistics.median(gaps)),
        "itl_p99_ms": ms(percentile(gaps, 0.99)),
        "itl_max_ms": ms(max(gaps)),
        "ttft_p50_ms": ms(statistics.median(firsts)),
        "ttft_p99_ms": ms(percentile(firsts, 0.99)),
        "background_tokens_per_s": round(tokens_between(streams, begin, end) / (end - begin)),
        "prompts": len(firsts),
    }


async def side_by_side(engine: Engine, count: int = 3) -> dict[str, Any]:
    """Decode steps while long prompts are computed one after the other, and how long these take."""
    async with decoding(engine) as streams:
        spans = []
        for prompt in prompts(count, LONG, 6):
            began = time.perf_counter()
            stream = await follow(engine, prompt, 1)
            spans.append((began, stream.times[0]))
            await asyncio.sleep(0.1)
        quiet = time.perf_counter()
        await asyncio.sleep(0.3)
        alone = gaps_between(streams, quiet, time.perf_counter())
    gaps = [gap for begin, end in spans for gap in gaps_between(streams, begin, end)]
    return {
        "prefill_ms": ms(statistics.median(end - begin for begin, end in spans)),
        "decode_p50_ms": ms(statistics.median(gaps)) if gaps else None,
        "decode_max_ms": ms(max(gaps)) if gaps else None,
        "decode_alone_ms": ms(statistics.median(alone)),
    }


async def table(engine: Engine, switch: Switch) -> dict[str, Any]:
    """What each partition does to both sides."""
    found: dict[str, Any] = {}
    switch.policy = PriorityStreams()
    await follow(engine, prompts(1, 512, 0)[0], 4)
    names = ["plain", "priority"]
    names += [f"green:{p.decode}" for p in switch.lanes.all if p.kind is LaneKind.GREEN]
    for name in names:
        switch.policy = policy_of(name)
        found[name] = await side_by_side(engine)
        print(name, json.dumps(found[name]), flush=True)
    return found


async def frontier(engine: Engine, switch: Any, text: str, target: float) -> dict[str, Any]:
    """The highest rate, in steps of a quarter, that keeps the ITL's p99 under `target` ms."""
    best, rate, tries = 0.0, 2.0, {}
    step = 1.0
    while step >= 0.25:
        if switch is not None:
            switch.policy = policy_of(f"slo:{target:g}" if text == "slo" else text)
        result = await mixed(engine, rate, 8.0)
        tries[rate] = result["itl_p99_ms"], result["ttft_p50_ms"]
        good = result["itl_p99_ms"] <= target and result["ttft_p99_ms"] < 5000
        best = max(best, rate) if good else best
        rate += step if good else -step
        step /= 2
    return {"rate": best, "tries": tries}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    chunked = [text for text in args.policies if text.startswith("chunk")]
    lanes = [text for text in args.policies if text not in chunked]
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name), args.layers)
        if lanes or args.table:
            switch = Switch()
            async with serving(folder, args, switch) as engine:
                if args.table:
                    found["table"] = await table(engine, switch)
                for text in lanes:
                    await rows(found, engine, switch, text, args)
                found["mux"] = dict((await engine.stats()).mux)
                print(json.dumps(found["mux"], default=str), flush=True)
        for text in chunked:
            policy = ChunkedOnly(int(text.partition(":")[2]))
            async with serving(folder, args, policy) as engine:
                await rows(found, engine, None, text, args)
    return found


async def rows(
    found: dict[str, Any], engine: Engine, switch: Switch | None, text: str, args: Any
) -> None:
    """One policy at every rate, and its frontier."""
    for rate in args.rates:
        if switch is not None:
            switch.policy = policy_of(text)
        key = f"{text} at {rate:g}/s"
        found[key] = await mixed(engine, rate, args.seconds)
        print(key, json.dumps(found[key]), flush=True)
    for target in args.frontier:
        key = f"{text} frontier {target:g} ms"
        found[key] = await frontier(engine, switch, text.partition(":")[0], target)
        print(key, json.dumps(found[key]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="*", default=["slo:18", "priority", "chunk:512"])
    parser.add_argument("--rates", nargs="*", type=float, default=[1.0, 3.0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--frontier", nargs="*", type=float, default=[])
    parser.add_argument("--batched-tokens", type=int, default=LONG)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = uvloop.run(measure(args))
    if args.json:
        args.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    sys.exit(main())
