"""Jump-forward: what a grammar forces is appended, not sampled token by token."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from aengine import Engine, FinishReason, SamplingParams, StructuredOutput
from aengine.engine import delayed
from aengine.testing import scripted_engine

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.testing.scripted import ScriptedLauncher

TEXTS = {"alphabet soup is served", "zebras cross the long road"}
CHOICE = StructuredOutput.choice(sorted(TEXTS))
SCHEMA = {
    "type": "object",
    "properties": {
        "identification_number_of_the_article_in_the_catalogue": {
            "type": "integer",
            "minimum": 0,
            "maximum": 99,
        },
        "is_currently_available_in_at_least_one_of_the_shops": {"type": "boolean"},
    },
    "required": [
        "identification_number_of_the_article_in_the_catalogue",
        "is_currently_available_in_at_least_one_of_the_shops",
    ],
    "additionalProperties": False,
}


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def launcher(engine: Engine) -> ScriptedLauncher:
    made: Any = engine.parts.launcher
    return made


def params(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, structured=CHOICE, **options)


async def test_a_forced_text_takes_few_forwards(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, block_size=4) as engine:
        result = await engine.generate([3], params(60))
        launches = launcher(engine).launches
    assert result.text in TEXTS
    assert result.finish_reason is FinishReason.STOP
    assert len(result.token_ids) == len(result.text) + 1, "a byte a token, and the end"
    assert launches < 10, launches


async def test_free_rows_beside_it_see_nothing(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, block_size=4) as engine:
        free = SamplingParams(max_tokens=80, ignore_eos=True)
        alone = [await engine.generate([i], free) for i in range(4)]
        bound = [engine.generate([i], params(60)) for i in range(6)]
        others = [engine.generate([i], free) for i in range(4)]
        texts = {(await each).text for each in bound}
        assert [(await each).token_ids for each in others] == [r.token_ids for r in alone]
    assert texts <= TEXTS


@pytest.mark.parametrize("tokens", range(1, 30))
async def test_a_jump_never_goes_beyond_max_tokens(tokens: int) -> None:
    async with scripted_engine(block_size=4) as engine:
        result = await engine.generate([3], params(tokens))
        await engine.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.token_ids) <= tokens
    text = result.text
    assert any(choice.startswith(text) for choice in TEXTS)
    whole = text in TEXTS and len(result.token_ids) == len(text) + 1
    assert result.finish_reason is (FinishReason.STOP if whole else FinishReason.LENGTH)
    assert whole or len(result.token_ids) == tokens


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 1},
        {"stop": ("soup", "long")},
        {"bad_words": ("zebras",)},
        {"logit_bias": {97: -100}},
        {"allowed_token_ids": range(257)},
        {"logits_processors": [lambda outputs, logits: logits]},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_not_where_each_token_counts(options: dict[str, Any]) -> None:
    async with scripted_engine(block_size=4) as engine:
        result = await engine.generate([3], params(60, **options))
        assert launcher(engine).launches >= len(result.token_ids)
    if "stop" in options:
        assert result.text in ("alphabet ", "zebras cross the ")
        assert result.stop_reason in ("soup", "long")


async def test_in_a_pool_too_small_for_all(loop_mode: str) -> None:
    """Jumps, preemptions and prefix hits together."""
    async with scripted_engine(loop=loop_mode, block_size=4, num_blocks=18) as engine:
        bound = [engine.generate([7, 7, 7, i], params(60)) for i in range(6)]
        texts = [(await each).text for each in bound]
        stats = await engine.stats()
        assert stats.kv_blocks_in_use == 0
    assert set(texts) <= TEXTS


async def test_a_cancelled_jump_leaves_nothing_held() -> None:
    async with scripted_engine(block_size=4) as engine:
        for after in range(1, 8):
            stream = engine.generate([3], params(60))
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == after:
                    break
            await stream.aclose()
        assert (await engine.generate([3], params(60))).text in TEXTS
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0)


@pytest.mark.parametrize(
    "options", [{}, {"presence_penalty": 0.6, "repetition_penalty": 1.1}], ids=["plain", "counts"]
)
async def test_the_real_model_jumps_over_names(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, smollm2_gguf: Path
) -> None:
    """Forced text has the tokenizer's own tokens; a model may spell it otherwise under a mask, so
    with and without jumps answers may differ. Alone and in a batch they may not."""
    wanted = SamplingParams(
        max_tokens=100, temperature=0, structured=StructuredOutput.json(SCHEMA), **options
    )
    prompts = ["A book in the library:", "The status of the order is"]
    async with Engine(str(smollm2_gguf), device="cpu", dtype="float32") as engine:
        alone = [await engine.generate(prompt, wanted) for prompt in prompts]
        steps = (await engine.stats()).steps
        together = await asyncio.gather(*[engine.generate(p, wanted) for p in prompts])
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
        monkeypatch.setattr(delayed, "SHORTEST_JUMP", 10**6)
        before = (await engine.stats()).steps
        slow = [await engine.generate(prompt, wanted) for prompt in prompts]
        slow_steps = (await engine.stats()).steps - before
    for result in (*alone, *slow):
        assert result.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(result.text), SCHEMA)
    assert steps < 0.8 * slow_steps, (steps, slow_steps)
