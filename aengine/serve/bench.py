"""`aengine bench`: how fast a model is on this machine, seen from a program that embeds it."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aengine.request import SamplingParams

if TYPE_CHECKING:
    from aengine.engine.front import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the engine: greedy requests with random prompts that share nothing.

    Args:
        requests: how many in all.
        concurrency: how many at once.
        prompt_tokens, output_tokens: of each.
        seed: of the prompts.
    """

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0


@dataclass(slots=True)
class _Times:
    """Seconds, as the reading program saw them."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)


async def measure(engine: Engine, load: Load) -> dict[str, Any]:
    """Run a load on a started engine.

    Returns:
        Token counts, seconds, tokens a second, and the median, 95th percentile and maximum of time
        to first token, inter-token latency and request duration.

    Raises:
        AEngineError: a request failed.
    """
    rng = random.Random(load.seed)
    vocabulary = engine.parts.codec.vocab_size
    prompts = [
        [rng.randrange(vocabulary) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]
    params = SamplingParams(max_tokens=load.output_tokens, temperature=0, ignore_eos=True)
    await engine.generate(prompts[0][:1], SamplingParams(max_tokens=2))  # what is lazy is made
    times, waiting = _Times(), iter(prompts)
    completion_tokens = 0

    async def client() -> None:
        nonlocal completion_tokens
        for prompt in waiting:
            tokens = await _one(engine, prompt, params, times)
            completion_tokens += tokens  # after the await: others add meanwhile

    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, load.requests)):
                group.create_task(client())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # one is enough to know
    seconds = time.perf_counter() - start
    return {
        "requests": load.requests,
        "concurrency": load.concurrency,
        "prompt_tokens": load.requests * load.prompt_tokens,
        "completion_tokens": completion_tokens,
        "seconds": seconds,
        "completion_tokens_per_s": completion_tokens / seconds,
        "total_tokens_per_s": (load.requests * load.prompt_tokens + completion_tokens) / seconds,
        "ttft_s": _spread(times.ttft),
        "itl_s": _spread(times.itl),
        "e2e_s": _spread(times.e2e),
    }


async def _one(engine: Engine, prompt: list[int], params: SamplingParams, times: _Times) -> int:
    start = last = time.perf_counter()
    tokens = 0
    async for chunk in engine.generate(prompt, params):
        now = time.perf_counter()
        if chunk.token_ids:
            if tokens:
                # A chunk may carry several tokens: they came together.
                times.itl.extend([(now - last) / len(chunk.token_ids)] * len(chunk.token_ids))
            else:
                times.ttft.append(now - start)
            tokens, last = tokens + len(chunk.token_ids), now
    times.e2e.append(time.perf_counter() - start)
    return tokens


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
    }


def describe(found: dict[str, Any]) -> str:
    """The findings as lines for people."""
    lines = [
        f"{found['requests']} requests, {found['concurrency']} at once: "
        f"{found['prompt_tokens']} prompt and {found['completion_tokens']} output tokens "
        f"in {found['seconds']:.2f} s",
        f"{found['completion_tokens_per_s']:.1f} output tokens/s, "
        f"{found['total_tokens_per_s']:.1f} tokens/s in all",
    ]
    names = {"ttft_s": "time to first token", "itl_s": "between tokens", "e2e_s": "whole request"}
    for key, name in names.items():
        if (spread := found[key]) is not None:
            figures = ", ".join(f"{label} {value * 1e3:.1f} ms" for label, value in spread.items())
            lines.append(f"{name}: {figures}")
    return "\n".join(lines)
