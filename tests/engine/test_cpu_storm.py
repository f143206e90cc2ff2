"""The storm on the CPU model: whatever the weather, a finished request says what it says alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import DeadlineExceededError, Engine, FinishReason, SamplingParams, StructuredOutput
from aengine.engine import loading
from aengine.kernels import native
from aengine.model.files import LoadedFiles, open_model
from aengine.model.tensors import TensorTable

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 2
LONGEST = 64
"""Tokens of the longest sequence."""
MOST_OUT = 16

GRAMMARS = (
    StructuredOutput.regex("[a-z]{2,12}( [a-z]{1,8})*"),
    StructuredOutput.json({"type": "object", "properties": {"a": {"type": "integer"}}}),
    StructuredOutput.choice(["yes", "no", "perhaps tomorrow"]),
)


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> LoadedFiles:
    """The real file's first layers, its vocabulary and its tokenizer."""
    whole = open_model(smollm2_gguf)
    assert whole.weights is not None
    kept = {
        name: whole.weights[name]
        for name in whole.weights
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    config = replace(whole.config, num_layers=LAYERS)
    return replace(whole, config=config, weights=TensorTable("the cut file", kept))


@pytest.fixture(params=["int8", "float32"])
def dtype(
    request: pytest.FixtureRequest, files: LoadedFiles, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The kernels' mode; engines opened meanwhile get the cut file."""
    if not native.available():
        pytest.skip("the CPU kernels are not built")
    monkeypatch.setattr(loading, "_open", lambda config, on_progress: files)
    return str(request.param)


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

    def __init__(self, dtype: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.solo: dict[Wish, Any] = {}
        self.stems = [[self.rng.randrange(1000, 40000) for _ in range(40)] for _ in range(3)]
        self.preemptions = self.compared = self.cut_short = self.cached = 0

    def wish(self, capacity: int) -> Wish:
        rng = self.rng
        tail = [rng.randrange(1000, 40000) for _ in range(rng.randint(1, 6))]
        longest = min(capacity, LONGEST) - 2
        prompt = (rng.choice(self.stems)[: rng.randrange(40)] + tail)[-longest:]
        room = min(capacity, LONGEST) - len(prompt)
        return Wish(
            prompt=tuple(prompt),
            max_tokens=rng.randint(1, min(room, MOST_OUT)),
            logprobs=rng.choice([None, None, None, 0, 2]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
            grammar=rng.choice([*GRAMMARS, *[None] * 9]),
            stop=tuple(rng.sample(range(1000, 40000), 3)),
        )

    async def run(self, requests: int, *, tight: bool = False) -> None:
        """One engine's storm, then the solo runs, then the comparison.

        `tight`: all arrive at once, and many may run in a pool for two, so that preemption does not
        depend on how fast the machine is.
        """
        rng = self.rng
        block_size = rng.choice([1, 2, 2, 4, 16])
        num_blocks = rng.randint(8, 64)
        max_num_seqs = rng.randint(1, 8)
        if tight:
            block_size, num_blocks, max_num_seqs = 2, 24, 8
        capacity = num_blocks * block_size
        per_block = LAYERS * 2 * block_size * 3 * 64 * 4
        wishes = [self.wish(capacity) for _ in range(requests)]
        engine = Engine(
            "cut",
            device="cpu",
            dtype=self.dtype,
            max_model_len=min(capacity, LONGEST),
            kv_cache_memory=num_blocks * per_block,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.randint(max_num_seqs, 40),
            max_steps_in_flight=rng.randint(1, 3),
            enable_prefix_cache=tight or rng.random() < 0.8,
            loop=rng.choice(["own", "caller"]),
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
            "cut",
            device="cpu",
            dtype=self.dtype,
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
            assert result.logprobs == right.logprobs[:count]
        if result.finish_reason in (FinishReason.ABORT, FinishReason.DEADLINE):
            self.cut_short += 1
            return
        self.compared += 1
        assert result.finish_reason is right.finish_reason
        assert result.token_ids == right.token_ids
        assert result.text == right.text
        assert result.prompt_logprobs == right.prompt_logprobs


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
            if not (stats.running or stats.waiting or stats.steps_in_flight):
                break
            await asyncio.sleep(0.001)
    assert stats.kv_blocks_in_use == 0
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    return stats


def test_storm_on_the_cpu_model(dtype: str) -> None:
    storm = Storm(dtype, 3)

    async def several() -> None:
        await storm.run(18)
        await storm.run(18, tight=True)

    asyncio.run(several())
    assert storm.preemptions, "these storms put no pressure on memory"
    assert storm.compared > 15
    assert storm.cut_short
    assert storm.cached


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_storm_on_the_cpu_model_for_minutes(dtype: str) -> None:
    until = time.monotonic() + 150

    async def many() -> None:
        for seed in itertools.count(1000):
            storm = Storm(dtype, seed)
            try:
                await storm.run(40)
            except BaseException:
                print(f"seed {seed}")  # noqa: T201
                raise
            if time.monotonic() > until:
                break

    asyncio.run(many())
