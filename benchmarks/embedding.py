"""What an engine costs its host's event loop, and a busy host the engine. Fake model, one uvloop.

python benchmarks/embedding.py [--streams 256] [--rate 50] [--seconds 5]

Prints, for loop="own" and loop="caller":

- quiet: streams read by as many coroutines. CPU time of the host's thread a step, and how late a
  1 ms ticker in the host's loop is (p50, p99, worst); the ticker's own time is taken off;
- blocking: the same while the host blocks its loop for 20 ms every 100 ms; steps a second against
  the quiet run;
- prompt: how late the ticker is while a 5 MB prompt is refused (by a tokenizer of bytes in pure
  Python, which holds the interpreter longer at a time than a real one).

With loop="caller" the host thread's time holds the engine's own work too.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field

import uvloop

from aengine import AEngineError, Engine, SamplingParams
from aengine.testing import Faults, scripted_engine

PROMPT_BYTES = 5_000_000


@dataclass(slots=True)
class Ticker:
    """How late a timer of 1 ms is, in seconds, while the body of the `async with` runs."""

    lags: list[float] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.lags.append(max(0.0, time.perf_counter() - due))

    def __str__(self) -> str:
        lags = sorted(self.lags)
        p50, p99 = (lags[int(len(lags) * share)] * 1e3 for share in (0.5, 0.99))
        return f"lag p50 {p50:.2f} p99 {p99:.2f} worst {lags[-1] * 1e3:.2f} ms"


def same(_: object) -> int:
    return ord("x")


def make(mode: str, args: argparse.Namespace) -> Engine:
    return scripted_engine(
        same,
        loop=mode,
        faults=Faults(delay=1 / args.rate),
        max_num_seqs=args.streams,
        max_num_batched_tokens=max(512, args.streams),
        num_blocks=args.streams * 64 + 64,
        max_model_len=1024,
    )


async def block_now_and_then() -> None:
    while True:
        time.sleep(0.020)  # noqa: ASYNC251  # a host that misbehaves is what is measured
        await asyncio.sleep(0.080)


async def read_all(engine: Engine, args: argparse.Namespace) -> None:
    async def read(i: int) -> None:
        async for _ in engine.generate([i % 256], params):
            pass

    params = SamplingParams(max_tokens=int(args.rate * args.seconds), temperature=0)
    await asyncio.gather(*[read(i) for i in range(args.streams)])


async def streams(mode: str, args: argparse.Namespace, *, blocking: bool) -> float:
    async with make(mode, args) as engine:
        blocker = asyncio.create_task(block_now_and_then()) if blocking else None
        before, began, cpu = await engine.stats(), time.perf_counter(), time.thread_time()
        async with Ticker() as ticker:
            await read_all(engine, args)
        cpu, took = time.thread_time() - cpu, time.perf_counter() - began
        steps = (await engine.stats()).steps - before.steps
        if blocker is not None:
            blocker.cancel()
            await asyncio.wait([blocker])
    name = "blocking" if blocking else "quiet"
    each = (cpu - args.ticker_cost * took) / steps * 1e3
    print(f"{mode:7} {name:9} {steps / took:6.1f} steps/s  host {each:.3f} ms a step  {ticker}")
    return steps / took


async def ticker_alone(seconds: float) -> float:
    """CPU seconds a second that the ticker itself takes: to subtract from the host's time."""
    cpu = time.thread_time()
    async with Ticker() as ticker:
        await asyncio.sleep(seconds)
    cpu = (time.thread_time() - cpu) / seconds
    print(f"nothing but the ticker: {cpu * 1e3:.1f} ms a second  {ticker}")
    return cpu


async def prompt(mode: str, args: argparse.Namespace) -> None:
    text = "x" * PROMPT_BYTES
    async with make(mode, args) as engine, Ticker() as ticker:
        await asyncio.sleep(0.05)
        try:
            await engine.generate(text, SamplingParams(max_tokens=1))
        except AEngineError as error:
            print(f"{mode:7} 5 MB prompt: {error.code}", end="  ")
        await asyncio.sleep(0.05)
    print(ticker)


async def main(args: argparse.Namespace) -> None:
    args.ticker_cost = await ticker_alone(2.0)
    for mode in ("own", "caller"):
        quiet = await streams(mode, args, blocking=False)
        blocked = await streams(mode, args, blocking=True)
        print(f"{mode:7} a blocking host leaves {blocked / quiet:.3f} of the steps")
        await prompt(mode, args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second")
    parser.add_argument("--seconds", type=float, default=5.0)
    uvloop.run(main(parser.parse_args()))
