"""Random mixed requests through the engine equal the naive way, token for token.

All at once, in a pool that is too small for them, with shared prefixes, n > 1 and cancels: what a
request is answered must not depend on any of that.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aengine import Engine, FinishReason, GenerationError, SamplingParams, StructuredOutput
from aengine.engine import loading
from aengine.kernels import native
from aengine.model.files import LoadedFiles, open_model
from aengine.model.tensors import TensorTable
from tests.engine.naive import Answer, NaiveModel

if TYPE_CHECKING:
    from pathlib import Path

    import torch

LONGEST = 160
BLOCK = 8
GRAMMARS = (
    StructuredOutput.regex("[a-z]{2,12}( [a-z]{1,8})*"),
    StructuredOutput.json(
        {
            "type": "object",
            "properties": {
                "identification_number_of_the_article_in_the_catalogue": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 99,
                },
                "colour": {"enum": ["red", "green", "blue as the sky"]},
            },
            "required": ["identification_number_of_the_article_in_the_catalogue", "colour"],
            "additionalProperties": False,
        }
    ),
    StructuredOutput.choice(
        ["yes", "no", "perhaps tomorrow, if the weather is fine and nobody minds the walk"]
    ),
    StructuredOutput.json_object(),
)
STEMS = (
    "The quick brown fox jumps over the lazy dog, and then it ",
    "Question: what is the name of the longest river in the world?\nAnswer:",
    "数字一二三四五六七八九十",
)
TAILS = ("", " is", "\n- first", " 🙂", "def f(x):\n    return", " Why?", " SELECT *")
STOPS = ("e", " th", "\n\n", "ing", ".", "é", "the end", " of a", "q")
WORDS = ("the", "of", "river", "New York", "and then it")


class Shifted:
    """A logits processor: what it does depends on the tokens so far."""

    def __call__(self, outputs: Any, logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        changed[sum(outputs) % 1000 :: 1000] += 3.0
        return changed


@dataclass(frozen=True)
class Wish:
    """One request: what is asked, and after how many chunks its reader leaves (None: never)."""

    prompt: str
    params: SamplingParams
    leaves: int | None


def wish(rng: random.Random) -> Wish:
    """A request that uses a few of the parameters, any of them with any other."""
    options: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "temperature": 0.0}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.7]), "seed": rng.randrange(2**40)}
        truncations = {
            "top_k": rng.choice([1, 2, 20, 400]),
            "top_p": rng.choice([0.1, 0.7, 0.95]),
            "min_p": rng.choice([0.01, 0.2]),
        }
        options |= dict(rng.sample(sorted(truncations.items()), rng.choice([0, 0, 1, 1, 2, 3])))
    rules: dict[str, Any] = {
        "presence_penalty": rng.choice([-1.0, 0.7, 2.0]),
        "frequency_penalty": rng.choice([-0.3, 0.5, 1.5]),
        "repetition_penalty": rng.choice([0.8, 1.2, 2.0]),
        "logit_bias": {rng.randrange(49152): rng.choice([-100, 5, 15.5]) for _ in range(4)},
        "allowed_token_ids": sorted(rng.sample(range(49152), rng.choice([1, 30, 3000]))),
        "bad_words": rng.sample(WORDS, 2),
        "min_tokens": rng.randint(1, options["max_tokens"]),
        "logprobs": rng.choice([0, 1, 5]),
        "prompt_logprobs": rng.choice([0, 2]),
        "stop": rng.sample(STOPS, rng.randint(1, 3)),
        "stop_token_ids": rng.sample(range(200, 600), 40),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "structured": rng.choice(GRAMMARS),
        "n": rng.choice([2, 3]),
        "logits_processors": [Shifted()],
        "skip_special_tokens": False,
    }
    common = ["structured", "stop", "logprobs"]
    for name in rng.sample([*rules, *common, *common], rng.choice([0, 1, 2, 2, 3, 5])):
        options[name] = rules[name]
    if "structured" in options:
        options["max_tokens"] = max(options["max_tokens"], rng.choice([8, 70]))
    prompt = rng.choice(STEMS)[: rng.randint(4, 80)] + rng.choice(TAILS)
    return Wish(
        prompt, SamplingParams(**options), rng.randint(0, 6) if rng.random() < 0.1 else None
    )


@dataclass
class Got:
    """What a request brought: per completion tokens, text, logprobs; the error if it failed."""

    tokens: dict[int, list[int]]
    texts: dict[int, str]
    logprobs: dict[int, list[Any]]
    ends: dict[int, Any]
    result: Any = None
    error: Exception | None = None


async def ask(engine: Engine, wanted: Wish, delay: float) -> Got:
    """Stream one request; compare the deltas with the awaited result."""
    await asyncio.sleep(delay)
    got = Got({}, {}, {}, {})
    stream = engine.generate(wanted.prompt, wanted.params)
    try:
        chunks = 0
        async for chunk in stream:
            got.tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
            got.texts[chunk.index] = got.texts.get(chunk.index, "") + chunk.text
            got.logprobs.setdefault(chunk.index, []).extend(chunk.logprobs or ())
            if wanted.params.logprobs is not None:
                assert [each.token_id for each in chunk.logprobs or ()] == list(chunk.token_ids)
            if chunk.finish_reason is not None:
                got.ends[chunk.index] = chunk
            chunks += 1
            if wanted.leaves is not None and chunks > wanted.leaves:
                stream.abort()
        got.result = await stream
    except GenerationError as error:
        got.error = error
    return got


def compare(wanted: Wish, got: Got, right: list[Answer], prompt: list[int]) -> str:
    """Assert that the engine says what the naive way does; what kind of end it was."""
    if got.error is not None:
        assert any(answer.failed for answer in right), got.error
        return "failed"
    cut = False
    for index, answer in enumerate(right):
        tokens, end = got.tokens.get(index, []), got.ends[index]
        assert tokens == answer.token_ids[: len(tokens)]
        check_logprobs(wanted, got.logprobs[index], tokens, answer)
        if end.finish_reason is FinishReason.ABORT:
            assert wanted.leaves is not None
            cut = True
            continue
        assert not answer.failed
        assert tokens == answer.token_ids
        assert got.texts[index] == answer.text
        assert (end.finish_reason, end.stop_reason) == (answer.finish_reason, answer.stop_reason)
        assert end.usage.completion_tokens == len(tokens)
        completion = got.result.completions[index]
        assert completion.token_ids == tuple(tokens)
        assert completion.text == answer.text
        if wanted.params.logprobs is not None:
            assert completion.logprobs == tuple(got.logprobs[index])
    if wanted.params.prompt_logprobs is not None and not cut:
        first, *others = got.result.prompt_logprobs
        assert first is None
        for entry, token, row in zip(others, prompt[1:], right[0].prompt_logprobs, strict=True):
            check_entry(entry, token, row, wanted.params.prompt_logprobs)
    return "cut" if cut else "whole"


def check_logprobs(wanted: Wish, found: list[Any], tokens: list[int], answer: Answer) -> None:
    if wanted.params.logprobs is None:
        assert found == []
        return
    assert len(found) == len(tokens)
    for entry, token, row in zip(found, tokens, answer.logprobs, strict=False):
        check_entry(entry, token, row, wanted.params.logprobs)


def check_entry(entry: Any, token: int, row: Any, top: int) -> None:
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(row[token], abs=1e-4)
    assert entry.rank == (row > row[token]).sum() + 1
    best = np.sort(row)[::-1][:top]
    assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-4)
    assert all(value == pytest.approx(row[t], abs=1e-4) for t, value in entry.top)


async def mixed(
    files: LoadedFiles, dtype: str, count: int, seed: int, *, host_blocks: int = 0
) -> dict[str, int]:
    """`count` random requests at once, then one at a time; how they ended."""
    rng = random.Random(seed)
    wishes = [wish(rng) for _ in range(count)]
    config = files.config
    values = config.num_layers * 2 * BLOCK * config.num_kv_heads * config.head_dim
    block_bytes = values * (4 if dtype == "float32" else 2)
    engine = Engine(
        "smollm2-135m",
        device="cpu",
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        block_size=BLOCK,
        kv_cache_memory=26 * block_bytes,
        swap_space=host_blocks * block_bytes,
        swap_min_tokens=BLOCK,
        debug=True,
    )
    async with engine:
        asks = [ask(engine, wanted, rng.uniform(0, count / 400)) for wanted in wishes]
        answers = await asyncio.gather(*asks)
        stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0)
    tally = {"preempted": stats.preemptions, "cached": stats.cached_prompt_tokens}
    tally["swapped"] = stats.swapped_in
    naive = NaiveModel(files, dtype, LONGEST)
    try:
        for number, (wanted, got) in enumerate(zip(wishes, answers, strict=True)):
            prompt = files.tokenizer.encode(wanted.prompt)
            right = [naive.answer(prompt, wanted.params, i) for i in range(wanted.params.n)]
            try:
                kind = compare(wanted, got, right, prompt)
            except AssertionError as error:
                error.add_note(f"request {number} of seed {seed}: {wanted}")
                raise
            tally[kind] = tally.get(kind, 0) + 1
            tally["forced"] = tally.get("forced", 0) + sum(each.num_forced for each in right)
    finally:
        naive.close()
    return tally


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> LoadedFiles:
    if not native.available():
        pytest.skip("the CPU kernels are not built")
    return open_model(smollm2_gguf)


@pytest.fixture
def cut_files(files: LoadedFiles, monkeypatch: pytest.MonkeyPatch) -> LoadedFiles:
    """The real file's first layers, its vocabulary and its tokenizer; engines open this."""
    assert files.weights is not None
    kept = {
        name: files.weights[name]
        for name in files.weights
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < 2
    }
    config = replace(files.config, num_layers=2)
    cut = replace(files, config=config, weights=TensorTable("the cut file", kept))
    monkeypatch.setattr(loading, "_open", lambda config, on_progress: cut)
    return cut


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_forty_mixed_requests_equal_the_naive_way(cut_files: LoadedFiles, dtype: str) -> None:
    tally = asyncio.run(mixed(cut_files, dtype, 40, seed=5))
    assert tally["whole"] > 20
    assert tally["cached"]
    assert tally["preempted"]
    assert tally["forced"]


def test_forty_mixed_requests_with_swapped_blocks_equal_the_naive_way(
    cut_files: LoadedFiles,
) -> None:
    tally = asyncio.run(mixed(cut_files, "auto", 40, seed=6, host_blocks=200))
    assert tally["whole"] > 20
    assert tally["swapped"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_two_hundred_mixed_requests_equal_the_naive_way(files: LoadedFiles, dtype: str) -> None:
    """The whole model."""
    tally = asyncio.run(mixed(files, dtype, 200, seed=2000))
    assert tally["whole"] > 100
    assert tally["cached"]
    assert tally["preempted"]
    assert tally["failed"]
    assert tally["cut"]
    assert tally["forced"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_mixed_requests_with_swapped_blocks_equal_the_naive_way(
    files: LoadedFiles,
) -> None:
    tally = asyncio.run(mixed(files, "auto", 200, seed=3000, host_blocks=200))
    assert tally["whole"] > 100
    assert tally["swapped"]
