"""What `aengine bench` counts, on a fake engine."""

from __future__ import annotations

import pytest

from aengine import ContextLengthError
from aengine.serve.bench import Load, describe, measure
from aengine.testing import fake_engine


async def test_it_counts_what_it_asked_for() -> None:
    async with fake_engine() as engine:
        load = Load(requests=5, concurrency=2, prompt_tokens=7, output_tokens=6)
        found = await measure(engine, load)
        stats = await engine.stats()
    assert found["prompt_tokens"] == 35
    assert found["completion_tokens"] == 30
    assert stats.generation_tokens == 30 + 2  # and the one that warms up
    assert found["ttft_s"]["median"] <= found["ttft_s"]["p95"] <= found["ttft_s"]["max"]
    said = describe(found)
    assert "5 requests, 2 at once" in said
    assert "time to first token: median" in said


async def test_one_token_has_nothing_between() -> None:
    async with fake_engine() as engine:
        load = Load(requests=1, concurrency=9, prompt_tokens=1, output_tokens=1)
        found = await measure(engine, load)
    assert found["itl_s"] is None
    assert "between tokens" not in describe(found)


async def test_a_load_that_does_not_fit_is_the_engine_s_error() -> None:
    async with fake_engine(max_model_len=64) as engine:
        load = Load(requests=4, concurrency=4, prompt_tokens=65, output_tokens=1)
        with pytest.raises(ContextLengthError):
            await measure(engine, load)
