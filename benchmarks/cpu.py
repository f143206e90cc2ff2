"""The embedded default on a CPU beside llama.cpp, in one run.

    python benchmarks/cpu.py --llama-python PATH [--llama-model FILE] [--dtype auto] [--rounds 3]
                             [--host] [--switch-interval SECONDS]

Each engine serves the same work in turns, so that a noisy machine disturbs both alike: 1, 8 and 32
streams of greedy tokens after short prompts, one stream after a long prompt, and the prefill of 512
tokens. aengine is measured through `Engine.generate`, every stream read by a coroutine of its own.
llama.cpp is measured by `llama_worker.py` through llama-cpp-python's batch API (a benchmark-only
dependency in an interpreter of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aengine import Engine, SamplingParams
from aengine.model.hub import resolve


@dataclass(frozen=True)
class Job:
    name: str
    kind: str
    streams: int
    prompt: int
    output: int


JOBS = (
    Job("1 stream", "generate", 1, 32, 128),
    Job("8 streams", "generate", 8, 32, 128),
    Job("32 streams", "generate", 32, 32, 128),
    Job("1 stream, context 1,000", "generate", 1, 940, 64),
    Job("prefill 512", "prefill", 1, 512, 1),
)

_SEED = itertools.count(1)


def prompt(length: int) -> list[int]:
    """Token ids that mean nothing, and never the same twice: nothing comes from a cache."""
    seed = next(_SEED)
    return [100 + (seed * 7919 + i * 104729 + i * i * seed) % 48000 for i in range(length)]


async def generate(engine: Engine, job: Job) -> float:
    """Tokens a second of all streams together, from when the last stream had its first token."""
    params = SamplingParams(max_tokens=job.output, temperature=0, ignore_eos=True)
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(job.streams)]

    async def one(i: int) -> None:
        async for chunk in engine.generate(prompt(job.prompt), params):
            arrivals[i].append((time.perf_counter(), len(chunk.token_ids)))

    await asyncio.gather(*(one(i) for i in range(job.streams)))
    start = max(times[0][0] for times in arrivals)
    later = [(at, count) for times in arrivals for at, count in times if at > start]
    return sum(count for _, count in later) / (max(at for at, _ in later) - start)


async def prefill(engine: Engine, job: Job) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    await engine.generate(prompt(job.prompt), params)
    return job.prompt / (time.perf_counter() - start)


async def disturbed(engine: Engine, busy: float, seconds: float = 6.0) -> tuple[float, float]:
    """Tokens a second of 32 streams while this loop runs Python for a share of the time, and the
    p99 lag in ms of a 1 ms ticker in it."""
    params = SamplingParams(temperature=0, ignore_eos=True)
    counts, lags, stop = [0], [], time.perf_counter() + seconds + 2

    async def one() -> None:
        async for chunk in engine.generate(prompt(32), params):
            counts[0] += len(chunk.token_ids)
            if time.perf_counter() > stop:
                break

    async def ticker() -> None:
        while time.perf_counter() < stop:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(1e3 * (time.perf_counter() - before - 0.001))

    async def host() -> None:
        while time.perf_counter() < stop:
            until = time.perf_counter() + 0.01 * busy
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0 if busy >= 1 else 0.01 * (1 - busy))

    tasks = [asyncio.create_task(c) for c in (*(one() for _ in range(32)), ticker())]
    if busy:
        tasks.append(asyncio.create_task(host()))
    await asyncio.sleep(2)
    first, start = counts[0], time.perf_counter()
    lags.clear()
    await asyncio.gather(*tasks)
    rate = (counts[0] - first) / (time.perf_counter() - start)
    return rate, sorted(lags)[int(0.99 * len(lags))]


class LlamaCpp:
    """The worker process."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        worker = Path(__file__).with_name("llama_worker.py")
        self.process = subprocess.Popen(
            [python, str(worker), model, str(threads), "1100"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, job: Job) -> float:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(vars(job)) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--llama-model", help="default: the same file")
    parser.add_argument("--host", action="store_true", help="measure beside a busy host loop too")
    parser.add_argument("--switch-interval", type=float, help="seconds; as of the engine")
    args = parser.parse_args()
    llama = None
    if args.llama_python:
        llama = LlamaCpp(
            args.llama_python, args.llama_model or str(resolve(args.model)), args.threads
        )
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "cpu_threads": args.threads,
        "switch_interval": args.switch_interval,
    }
    begin = time.perf_counter()
    async with Engine(args.model, device="cpu", max_model_len=2048, **options) as engine:
        await engine.generate(prompt(8), SamplingParams(max_tokens=1))
        print(f"{cpu_name()}, {args.threads} threads, dtype={args.dtype}")
        print(f"start to first token {time.perf_counter() - begin:.2f} s")
        print("| work | aengine tok/s | llama.cpp tok/s | ratio |\n|---|---|---|---|")
        for job in JOBS if args.rounds else ():
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(await (generate if job.kind == "generate" else prefill)(engine, job))
                if llama:
                    theirs.append(await asyncio.to_thread(llama.run, job))
            mine = statistics.median(ours)
            if theirs:
                other = statistics.median(theirs)
                print(f"| {job.name} | {mine:.0f} | {other:.0f} | {mine / other:.2f} |", flush=True)
            else:
                print(f"| {job.name} | {mine:.0f} | | |", flush=True)
        if args.host:
            rows = {busy: await disturbed(engine, busy) for busy in (0.0, 0.5, 1.0)}
            for busy, (rate, lag) in rows.items():
                print(
                    f"host {busy:.0%} busy: {rate:.0f} tok/s, {rate / rows[0.0][0]:.2f} of "
                    f"undisturbed; 1 ms ticker p99 lag {lag:.2f} ms"
                )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak resident memory {peak:.0f} MiB")
    if llama:
        llama.close()


if __name__ == "__main__":
    asyncio.run(main())
