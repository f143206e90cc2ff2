"""Absurd settings and requests of a whole engine: typed errors or right answers; it lives on."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import (
    ConfigError,
    ContextLengthError,
    Engine,
    InvalidRequestError,
    OutOfMemoryError,
    SamplingParams,
)
from aengine.testing import arithmetic_script, scripted_engine
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = arithmetic_script(256)
BYTES_PER_TOKEN = 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def tiny(model: Path, **options: Any) -> Engine:
    return Engine(str(model), device="cpu", dtype="float32", **options)


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)


def solo(prompt: list[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 10**400),
        ("priority", -(2**31) - 1),
        ("priority", math.nan),
        ("priority", True),
        ("deadline", math.nan),
        ("deadline", -math.inf),
        ("deadline", 0),
        ("deadline", "soon"),
    ],
    ids=lambda value: str(value)[:9],
)
async def test_a_bad_option_is_refused_and_the_next_request_served(name: str, value: Any) -> None:
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError, match=name) as caught:
            await engine.generate([1, 2], greedy(3), **{name: value})
        assert caught.value.param == name
        assert (await engine.generate([1, 2], greedy(3))).token_ids == solo([1, 2], 3)


@pytest.mark.parametrize("deadline", [math.inf, 1e308, 10**400], ids=["inf", "float", "int"])
async def test_a_deadline_beyond_all_clocks_never_comes(deadline: float) -> None:
    async with scripted_engine() as engine:
        result = await engine.generate([1, 2], greedy(3), deadline=deadline)
        assert result.token_ids == solo([1, 2], 3)


@pytest.mark.parametrize("swap", [0, 3])
@pytest.mark.parametrize("block_size", [1, 7])
async def test_a_pool_of_one_block_serves_one_after_the_other(block_size: int, swap: int) -> None:
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 3, "swap_min_tokens": 1}
    space = swap * block_size * 8
    async with scripted_engine(
        num_blocks=1, block_size=block_size, max_model_len=10**9, swap_space=space, **options
    ) as engine:
        prompts = [[i] * min(block_size, 1 + i % 3) for i in range(1, 8)]
        with anyio.fail_after(20):
            results = await asyncio.gather(*[engine.generate(p, greedy(None)) for p in prompts])
        with pytest.raises(InvalidRequestError, match="whole pool has 1"):
            await engine.generate([1] * (block_size + 1), greedy(1))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == solo(prompt, block_size + 1 - len(prompt))
        assert result.finish_reason == "length"


async def test_a_prompt_of_exactly_the_context() -> None:
    async with scripted_engine(max_model_len=32) as engine:
        with pytest.raises(ContextLengthError) as caught:
            await engine.generate([7] * 32, greedy(1))
        assert (caught.value.prompt_tokens, caught.value.max_model_len) == (32, 32)
        result = await engine.generate([7] * 31, greedy(None))
        assert result.token_ids == solo([7] * 31, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4096},
        {"block_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"block_size": 128, "max_num_seqs": 1, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1 << 20, "max_num_seqs": 500},
        {"max_model_len": 2, "kv_cache_memory": 16 * BYTES_PER_TOKEN},
    ],
    ids=["huge block", "one of all", "budget below a block", "huge budget", "shortest context"],
)
def test_absurd_sizes_on_a_real_model(options: dict[str, Any], model: Path) -> None:
    async def ask(**settings: Any) -> list[tuple[int, ...]]:
        async with tiny(model, **settings) as engine:
            longest = engine.parts.max_model_len
            prompts = [[5], [9, 8, 7] * 9, [3] * 60]
            fitting = [p for p in prompts if len(p) < longest]
            wish = greedy(min(6, longest - 1))
            asked = [engine.generate(p, wish) for p in fitting]
            return [each.token_ids for each in await asyncio.gather(*asked)]

    with_defaults = asyncio.run(ask())
    found = asyncio.run(ask(**options))
    assert found
    for mine, right in zip(found, with_defaults, strict=False):
        assert mine == right[: len(mine)]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_model_len": 10**6}, ConfigError, "at most 128"),
        ({"kv_cache_memory": 1}, OutOfMemoryError, "kv_cache_memory="),
        ({"kv_cache_fraction": 1e-300}, OutOfMemoryError, "kv_cache_memory="),
        ({"swap_space": 1}, ConfigError, "holds no KV block"),
        ({"swap_space": 10**18}, OutOfMemoryError, "host memory"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else None,
)
def test_what_no_machine_has_is_refused_with_what_would_do(
    options: dict[str, Any], error: type[Exception], said: str, model: Path
) -> None:
    async def start() -> None:
        async with tiny(model, **options):
            pass

    with pytest.raises(error, match=said) as caught:
        asyncio.run(start())
    hint = getattr(caught.value, "hint", "")
    if hint and "swap" not in hint:
        name, value = hint.split("=")
        del options[next(iter(options))]
        options[name] = int(value)
        asyncio.run(start())


@pytest.mark.parametrize("length", [16, 17, 31, 32])
def test_prompt_logprobs_of_a_prompt_that_is_cached_as_a_whole(length: int, model: Path) -> None:
    prompt = [(7 * i) % 250 for i in range(length)]

    async def ask() -> None:
        async with tiny(model, block_size=16) as engine:
            first = await engine.generate(prompt, greedy(3))
            again = await engine.generate(prompt, greedy(3, prompt_logprobs=1))
            assert (await engine.generate(prompt, greedy(3))).usage.cached_tokens >= 16 * (
                (length - 1) // 16
            )
        async with tiny(model, enable_prefix_cache=False) as engine:
            right = await engine.generate(prompt, greedy(3, prompt_logprobs=1))
        assert first.token_ids == again.token_ids == right.token_ids
        assert again.prompt_logprobs is not None
        assert right.prompt_logprobs is not None
        assert again.prompt_logprobs[0] is right.prompt_logprobs[0] is None
        assert len(again.prompt_logprobs) == length
        for mine, theirs in zip(again.prompt_logprobs[1:], right.prompt_logprobs[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)

    asyncio.run(ask())


@pytest.mark.parametrize("swap", [0, 64])
def test_siblings_of_one_prompt_give_way_and_come_back(swap: int, model: Path) -> None:
    """n = 4 with seeds, a shared prompt, and blocks for one and a half of them."""
    prompt = [(11 * i) % 250 for i in range(18)]
    wish = SamplingParams(
        max_tokens=40, temperature=1.0, seed=5, n=4, ignore_eos=True, frequency_penalty=0.5
    )

    async def ask(**options: Any) -> tuple[list[tuple[int, ...]], Any]:
        async with tiny(model, max_model_len=64, **options) as engine:
            result = await engine.generate(prompt, wish)
            return [each.token_ids for each in result.completions], await engine.stats()

    right, _ = asyncio.run(ask(max_num_seqs=1))
    block = 4 * BYTES_PER_TOKEN
    found, stats = asyncio.run(
        ask(
            block_size=4,
            kv_cache_memory=22 * block,
            swap_space=swap * block,
            swap_min_tokens=1,
            max_num_batched_tokens=64,
        )
    )
    assert found == right
    assert len(set(found)) == 4
    assert stats.preemptions > 0
    assert bool(stats.swapped_in) is bool(swap)
    assert stats.kv_blocks_in_use == 0
