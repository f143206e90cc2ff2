"""A storm on a real model: random arrivals, lengths and ends in small pools, beside solo runs.

`python -m tests.engine.storm --device cuda` runs it by itself on a tiny random model (so that the
allocator can be chosen by the environment), and says on its last line what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from aengine import DeadlineExceededError, Engine, FinishReason, SamplingParams, StructuredOutput

LONGEST = 64
"""Tokens of the longest sequence."""
MOST_OUT = 16

GRAMMARS = (
    StructuredOutput.regex("[a-z]{2,12}( [a-z]{1,8})*"),
    StructuredOutput.json({"type": "object", "properties": {"a": {"type": "integer"}}}),
    StructuredOutput.choice(["yes", "no", "perhaps tomorrow"]),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A model and a device.

    Args:
        model, device, dtype: options of the engine.
        tokens: ids that prompts are made of.
        bytes_per_token: of the KV cache.
        block_sizes: to choose from.
        options: more options of the engine, each a list to choose from.
        exact: whether log-probabilities are the same numbers alone and in any batch.
    """

    model: str
    device: str
    dtype: str
    tokens: range
    bytes_per_token: int
    block_sizes: tuple[int, ...] = (1, 2, 2, 4, 16)
    options: dict[str, list[Any]] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class Wish:
    """One request of the storm."""

    prompt: tuple[int, ...]
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    grammar: StructuredOutput | None
    stop: tuple[int, ...]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            structured=self.grammar,
            stop_token_ids=self.stop,
        )


class Storm:
    """Requests with random lives in small pools, and each one's solo run to compare with."""

    def __init__(self, place: Place, seed: int) -> None:
        self.rng = random.Random(seed)
        self.place = place
        self.solo: dict[Wish, Any] = {}
        self.stems = [self.tokens(40) for _ in range(3)]
        self.preemptions = self.compared = self.cut_short = self.cached = 0
        self.swapped = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.choice(self.place.tokens) for _ in range(count)]

    def wish(self, capacity: int) -> Wish:
        rng = self.rng
        tail = self.tokens(rng.randint(1, 6))
        longest = min(capacity, LONGEST) - 2
        prompt = (rng.choice(self.stems)[: rng.randrange(40)] + tail)[-longest:]
        room = min(capacity, LONGEST) - len(prompt)
        return Wish(
            prompt=tuple(prompt),
            max_tokens=rng.randint(1, min(room, MOST_OUT)),
            logprobs=rng.choice([None, None, None, 0, 2]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
            grammar=rng.choice([*GRAMMARS, *[None] * 9]),
            stop=tuple(rng.sample(self.place.tokens, 3)),
        )

    async def run(self, requests: int, *, tight: bool = False, swap: bool = False) -> None:
        """One engine's storm, then the solo runs, then the comparison.

        `tight`: all arrive at once, and many may run in a pool for two, so that preemption does not
        depend on how fast the machine is. `swap`: who gives way may leave its blocks on the host.
        """
        rng, place = self.rng, self.place
        block_size = rng.choice(place.block_sizes)
        num_blocks = rng.randint(8, 64)
        max_num_seqs = rng.randint(1, 8)
        if tight:
            block_size, num_blocks, max_num_seqs = min(place.block_sizes[1], 4), 24, 8
            num_blocks = 48 // block_size
        host_blocks = 0
        if swap:
            host_blocks = 4 * num_blocks if tight else rng.choice([4, num_blocks, 4 * num_blocks])
        capacity = num_blocks * block_size
        per_block = place.bytes_per_token * block_size
        wishes = [self.wish(capacity) for _ in range(requests)]
        engine = Engine(
            place.model,
            device=place.device,
            dtype=place.dtype,
            max_model_len=min(capacity, LONGEST),
            kv_cache_memory=num_blocks * per_block,
            swap_space=host_blocks * per_block,
            swap_min_tokens=1 if tight else rng.choice([1, 1, 12]),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.randint(max_num_seqs, 40),
            max_steps_in_flight=rng.randint(1, 3),
            enable_prefix_cache=tight or rng.random() < 0.8,
            loop=rng.choice(["own", "caller"]),
            **{name: rng.choice(values) for name, values in place.options.items()},
        )
        async with engine:
            lives = [
                asyncio.create_task(self.live(engine, wish, 0 if tight else 0.15))
                for wish in wishes
            ]
            results = await asyncio.gather(*lives)
            stats = await drained(engine)
            assert stats.kv_blocks_total <= num_blocks
            self.preemptions += stats.preemptions
            self.swapped += stats.swapped_in
            self.cached += stats.cached_prompt_tokens
        await self.alone([wish for wish in wishes if wish not in self.solo])
        for wish, result in zip(wishes, results, strict=True):
            self.compare(wish, result)

    async def live(self, engine: Engine, wish: Wish, latest: float) -> Any:
        """One request's life and its result; None: there is none."""
        try:
            return await self.some_life(engine, wish, latest)
        except DeadlineExceededError:
            return None

    async def some_life(self, engine: Engine, wish: Wish, latest: float) -> Any:
        """It may wait, be urgent, be dropped early, late or in between."""
        rng = self.rng
        fate, chunks = rng.random(), rng.randrange(6)
        wait, priority = rng.uniform(0, latest), rng.randint(0, 2)
        deadline = rng.uniform(0.01, 0.3) if rng.random() < 0.1 else None
        await asyncio.sleep(wait)
        stream = engine.generate(wish.prompt, wish.params, priority=priority, deadline=deadline)
        if fate < 0.65:
            return await stream
        if fate < 0.75:
            stream.abort()
            return await stream
        if fate < 0.85:
            waiting = asyncio.ensure_future(_result(stream))
            await asyncio.sleep(chunks * 0.01)
            waiting.cancel()
            await asyncio.wait([waiting])
            return None if waiting.cancelled() else waiting.result()
        async with stream:
            async for _ in stream:
                chunks -= 1
                if chunks < 0:
                    stream.abort()
        return await stream

    async def alone(self, wishes: list[Wish]) -> None:
        """Each by itself in an engine with room and without a cache."""
        engine = Engine(
            self.place.model,
            device=self.place.device,
            dtype=self.place.dtype,
            max_model_len=LONGEST,
            enable_prefix_cache=False,
            max_num_seqs=1,
        )
        async with engine:
            for wish in wishes:
                self.solo[wish] = await engine.generate(wish.prompt, wish.params)

    def compare(self, wish: Wish, result: Any) -> None:
        if result is None:
            self.cut_short += 1
            return
        right = self.solo[wish]
        count = len(result.token_ids)
        assert result.token_ids == right.token_ids[:count]
        if result.logprobs is not None:
            self.same(result.logprobs, right.logprobs[:count])
        if result.finish_reason in (FinishReason.ABORT, FinishReason.DEADLINE):
            self.cut_short += 1
            return
        self.compared += 1
        assert result.finish_reason is right.finish_reason
        assert result.token_ids == right.token_ids
        assert result.text == right.text
        self.same(result.prompt_logprobs, right.prompt_logprobs)

    def same(self, mine: Any, right: Any) -> None:
        """Log-probabilities: the same, or where a batch's size shows, nearly the same."""
        if self.place.exact or mine is None:
            assert mine == right
            return
        for one, other in zip(mine, right, strict=True):
            assert (one is None) is (other is None)
            if one is not None:
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


async def _result(stream: Any) -> Any:
    return await stream


async def drained(engine: Engine) -> Any:
    """The statistics when nothing is live; every block is free or cached."""
    with anyio.fail_after(10):
        while True:
            stats = await engine.stats()
            assert (
                stats.kv_blocks_free
                + stats.kv_blocks_cached
                + stats.kv_blocks_leased
                + stats.kv_blocks_in_use
                == stats.kv_blocks_total
            )
            live = stats.running or stats.waiting or stats.steps_in_flight
            if not (live or stats.copies_in_flight):
                break
            await asyncio.sleep(0.001)
    assert stats.kv_blocks_in_use == stats.swap_blocks_in_use == 0
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    return stats


def tiny(folder: Path, device: str) -> Place:
    """A random model of one layer, computed by torch (its weights are not quantised)."""
    from tests.model.test_files import write_gguf

    on_gpu = device != "cpu"
    return Place(
        model=str(write_gguf(folder / "tiny.gguf")),
        device=device,
        dtype="float32",
        tokens=range(256),
        bytes_per_token=2 * 2 * 16 * 4,
        # Each size is a compilation on a GPU.
        block_sizes=(4, 4, 16) if on_gpu else (1, 2, 4, 16),
        options={"cuda_graphs": [True, False]} if on_gpu else {},
        exact=False,
    )


async def for_a_while(place: Place, *, seconds: float, first_seed: int) -> dict[str, int]:
    """Storms, at least two, until the time is over; what they saw."""
    until = time.monotonic() + seconds
    seen = dict.fromkeys(("preemptions", "compared", "cut_short", "cached", "swapped"), 0)
    seen["storms"] = 0
    for seed in itertools.count(first_seed):
        storm = Storm(place, seed)
        try:
            await storm.run(24, tight=seed % 2 == 0, swap=seed % 3 != 2)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen["storms"] += 1
        for name in seen.keys() - {"storms"}:
            seen[name] += getattr(storm, name)
        if seen["storms"] >= 2 and time.monotonic() > until:
            return seen
    raise AssertionError


def main() -> None:
    """Run storms on one device and print, as JSON, what they saw and who allocated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = tiny(Path(folder), options.device)
        seen = asyncio.run(for_a_while(place, seconds=options.seconds, first_seed=options.seed))
    found: dict[str, Any] = dict(seen)
    if options.device != "cpu":
        import torch

        held = torch.zeros(1, device=options.device)
        found["allocator"] = torch.cuda.get_allocator_backend()
        found["expandable"] = False
        if found["allocator"] == "native":
            segments = torch.cuda.memory_snapshot()
            found["expandable"] = any(each["is_expandable"] for each in segments)
        del held
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
