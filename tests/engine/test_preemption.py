"""A request that gives way in the middle goes on as if nothing had happened, whatever it asked for.

On a small random model, with and without the prefix cache, computed again or copied back; beside
short requests that come and go, and one more urgent that takes the blocks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from aengine import Engine, FinishReason, SamplingParams, StructuredOutput
from aengine.policy.mux import PriorityStreams
from aengine.testing import Replies, scripted_engine
from aengine.testing.scripted import TOKEN_BYTES
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aengine import RequestOutput

    Alone = Callable[[SamplingParams], RequestOutput]

BLOCK = 4
NUM_BLOCKS = 18
BYTES_PER_TOKEN = 2 * 2 * 16 * 4
VICTIM, URGENT = list(range(40, 60)), list(range(100, 124))
AT = 8
"""Tokens of the victim after which the urgent request comes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@dataclass(frozen=True)
class Way:
    """How a sequence that gave way comes back, and beside what."""

    swap: int = 0
    """Blocks on the host."""
    cache: bool = True
    lanes: bool = False

    def options(self, bytes_per_token: int) -> dict[str, Any]:
        lanes = {"mux": PriorityStreams(), "cpu_threads": 2} if self.lanes else {"cpu_threads": 1}
        return {
            "swap_space": self.swap * BLOCK * bytes_per_token,
            "swap_min_tokens": 1,
            "enable_prefix_cache": self.cache,
            **lanes,
        }


WAYS = {
    "recompute": Way(cache=False),
    "recompute, cached": Way(),
    "swap, cached": Way(swap=64),
    "swap, lanes": Way(swap=64, cache=False, lanes=True),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def small(model: Path, way: Way) -> Engine:
    """An engine with room for one long request and a bit."""
    return Engine(
        str(model),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        block_size=BLOCK,
        loop="caller",  # so that the urgent request comes when it should
        kv_cache_memory=NUM_BLOCKS * BLOCK * BYTES_PER_TOKEN,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        **way.options(BYTES_PER_TOKEN),
    )


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 36, "temperature": 0, "ignore_eos": True} | options)


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[[SamplingParams], RequestOutput]:
    """What a request is answered that nothing disturbs."""
    known: dict[str, RequestOutput] = {}

    async def ask(asked: SamplingParams) -> RequestOutput:
        options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "cpu_threads": 1}
        async with Engine(str(model), **options) as engine:
            return await engine.generate(VICTIM, asked)

    def answer(asked: SamplingParams) -> RequestOutput:
        if repr(asked) not in known:
            known[repr(asked)] = asyncio.run(ask(asked))
        return known[repr(asked)]

    return answer


async def disturbed(engine: Engine, asked: SamplingParams) -> tuple[Any, str]:
    """The request's result and its streamed text, preempted in the middle; all blocks are back."""
    urgent: list[Any] = []
    text, count, stream = "", 0, engine.generate(VICTIM, asked)
    async for chunk in stream:
        text += chunk.text
        count += len(chunk.token_ids)
        if count >= AT and not urgent:
            urgent.append(engine.generate(URGENT, params(max_tokens=24), priority=-100))
            urgent += [
                engine.generate([i, i], params(max_tokens=1 + i, seed=i, temperature=1.0))
                for i in range(5)
            ]
    result = await stream
    assert result.metrics.preemptions > 0, "it was not disturbed"
    for other in urgent:
        await other
    stats = await engine.stats()
    assert stats.kv_blocks_in_use == stats.swap_blocks_in_use == 0
    return result, text


KINDS: dict[str, dict[str, Any]] = {
    "penalties": {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.3,
        "temperature": 0.0,
    },
    "seeds": {"temperature": 1.2, "seed": 11, "top_p": 0.95},
    "seeds and penalties": {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.5, "min_p": 0.01},
    "bad words and bias": {"bad_words": ("a", "bc"), "logit_bias": {7: 4.0}, "min_tokens": 30},
    "stop tokens after min_tokens": {"stop_token_ids": tuple(range(128)), "min_tokens": 30},
}


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_goes_on_exactly_through_preemption(
    kind: str, model: Path, alone: Alone, way: Way
) -> None:
    """Penalties under churn and preemption, seeds, rules that count tokens: as alone."""
    asked = params(**KINDS[kind])

    right = alone(asked)

    async def ask() -> None:
        async with small(model, way) as engine:
            result, text = await disturbed(engine, asked)
            stats = await engine.stats()
        assert result.token_ids == right.token_ids
        assert result.text == right.text == text
        assert result.finish_reason is right.finish_reason
        assert bool(stats.swapped_in) is bool(way.swap)

    asyncio.run(ask())


def test_logprobs_go_on_through_preemption(model: Path, alone: Alone, way: Way) -> None:
    asked = params(logprobs=2, prompt_logprobs=1, presence_penalty=0.5)

    right = alone(asked)

    async def ask() -> None:
        async with small(model, way) as engine:
            result, _ = await disturbed(engine, asked)
        for mine, theirs in (
            (result.logprobs, right.logprobs),
            (result.prompt_logprobs[1:], right.prompt_logprobs[1:]),
        ):
            assert [each.token_id for each in mine] == [each.token_id for each in theirs]
            assert [each.rank for each in mine] == [each.rank for each in theirs]
            assert [each.logprob for each in mine] == pytest.approx(
                [each.logprob for each in theirs], abs=1e-4
            )

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("grammar", "options"),
    [
        (StructuredOutput.regex("(ab|cde|[f-k]{3}){11,12}"), {}),
        (StructuredOutput.regex("(ab|cde|[f-k]{3}){11,12}"), {"temperature": 1.0, "seed": 2}),
    ],
    ids=["greedy", "seeded"],
)
def test_grammar_state_goes_on_through_preemption(
    grammar: StructuredOutput, options: dict[str, Any], model: Path, alone: Alone, way: Way
) -> None:
    asked = params(structured=grammar, ignore_eos=False, max_tokens=40, **options)

    right = alone(asked)

    async def ask() -> None:
        async with small(model, way) as engine:
            result, text = await disturbed(engine, asked)
        assert result.token_ids == right.token_ids
        assert result.text == right.text == text
        assert result.finish_reason is FinishReason.STOP

    asyncio.run(ask())


TEXTS = {
    "emoji": "👩‍👩‍👧‍👦 a family, e\u0301tude",
    "cjk": "漢字かな交じり文の長い文",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("stop", [None, "y, e", "の長"])
async def test_streamed_text_goes_on_through_preemption(
    text: str, stop: str | None, way: Way
) -> None:
    """No character is broken or told twice, and what may begin a stop string is held back."""
    engine = scripted_engine(
        Replies(text),
        num_blocks=NUM_BLOCKS,
        max_model_len=128,
        block_size=BLOCK,
        loop="caller",  # so that the urgent request comes when it should
        max_num_seqs=4,
        **way.options(TOKEN_BYTES),
    )
    right = text
    if stop is not None and stop in text:
        right = text[: text.index(stop)]
    async with engine:
        asked = SamplingParams(stop=() if stop is None else (stop,))
        result, streamed = await disturbed(engine, asked)
    assert streamed == result.text == right
