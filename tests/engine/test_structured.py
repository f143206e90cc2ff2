"""Structured output in the engine: faults that users of other engines reported, and its own.

S# is sgl-project/sglang, V# vllm-project/vllm.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from aengine import (
    Engine,
    FinishReason,
    GenerationError,
    GrammarError,
    GrammarTimeoutError,
    SamplingParams,
    StructuredOutput,
)
from aengine.engine import delayed
from aengine.grammar import llguidance
from aengine.testing import Faults, arithmetic_script, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

SCRIPT = arithmetic_script(256)
WORD = StructuredOutput.regex("[a-z]{30}")
ONE_PATH = StructuredOutput.regex('\\{"name": "zoë", "tags": \\["a", "a"\\]\\}')
ONLY_TEXT = '{"name": "zoë", "tags": ["a", "a"]}'
HOSTILE = StructuredOutput.json(
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
        "minProperties": 1,
        "additionalProperties": False,
    }
)
"""57 KB of schema that the library would compile for minutes."""


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def params(max_tokens: int = 80, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0} | options)


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


async def kept(engine: Engine) -> int:
    """Compiled grammars in the cache. Nothing may be live; every block must be back."""
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0)
    cache: Any = engine.parts.grammars._cache
    return int(cache.statistics().entries)


@pytest.mark.parametrize("jumps", [True, False], ids=["jumps", "token by token"])
@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_v26292_v29379_with_one_legal_path_no_fragment_comes_twice_or_is_lost(
    jumps: bool, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script always wants something else."""
    if not jumps:
        monkeypatch.setattr(delayed, "SHORTEST_JUMP", 10**6)
    options: dict[str, Any] = {"max_steps_in_flight": depth, "block_size": 4, "num_blocks": 40}
    async with scripted_engine(faults=Faults(delay=0.0002), **options) as engine:
        bound = [engine.generate([i], params(structured=ONE_PATH)) for i in range(6)]
        free = [engine.generate([i], params()) for i in range(3)]
        results = await asyncio.gather(*bound)
        others = await asyncio.gather(*free)
    assert {result.text for result in results} == {ONLY_TEXT}
    assert {result.finish_reason for result in results} == {FinishReason.STOP}
    assert [result.token_ids for result in others] == [expected([i], 80) for i in range(3)]


async def test_s25388_the_first_token_advances_the_matcher_before_the_first_decode_mask(
    loop_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    advance, fill = llguidance.LLGuidanceMatcher.advance, llguidance.LLGuidanceBackend.fill_bitmasks

    def told(self: Any, token: int) -> None:
        calls.append("advance")
        advance(self, token)

    def filled(self: Any, matchers: Any, bitmask: Any) -> Any:
        calls.append("fill")
        return fill(self, matchers, bitmask)

    monkeypatch.setattr(llguidance.LLGuidanceMatcher, "advance", told)
    monkeypatch.setattr(llguidance.LLGuidanceBackend, "fill_bitmasks", filled)
    async with scripted_engine(loop=loop_mode, max_num_batched_tokens=64) as engine:
        # Two chunks of prompt: the first samples nothing.
        result = await engine.generate([7] * 100, params(5, structured=WORD))
    assert len(result.text) == 5
    assert calls == ["fill", "advance"] * 5


class Broken:
    """Makes the third mask or token of one row in the next batch fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.error = GenerationError("the grammar failed: too many states")

    def advance(self) -> None:
        original = llguidance.LLGuidanceMatcher.advance
        marked: list[Any] = []
        seen: dict[int, int] = {}

        def advance(matcher: Any, token: int) -> None:
            seen[id(matcher)] = seen.get(id(matcher), 0) + 1
            if seen[id(matcher)] == 3 and not marked:
                marked.append(matcher)
                raise self.error
            original(matcher, token)

        self.monkeypatch.setattr(llguidance.LLGuidanceMatcher, "advance", advance)

    def mask(self) -> None:
        original = llguidance.LLGuidanceBackend.fill_bitmasks
        calls: list[int] = []

        def fill(
            backend: Any, matchers: Sequence[Any], bitmask: npt.NDArray[np.int32]
        ) -> Mapping[int, GenerationError]:
            failed = dict(original(backend, matchers, bitmask))
            calls.append(1)
            if len(calls) == 3:
                failed[len(matchers) - 1] = self.error
            return failed

        self.monkeypatch.setattr(llguidance.LLGuidanceBackend, "fill_bitmasks", fill)


@pytest.mark.parametrize("what", ["advance", "mask"])
async def test_s21171_a_matcher_that_fails_ends_its_stream_alone_and_its_kv_comes_back(
    what: str, loop_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_engine(loop=loop_mode, block_size=4) as engine:
        healthy = [await engine.generate([i], params(20, structured=WORD)) for i in range(4)]
        assert await kept(engine) == 1
        getattr(Broken(monkeypatch), what)()
        bound = [engine.generate([i], params(20, structured=WORD)) for i in range(4)]
        free = engine.generate([9], params(60))
        outcomes = await asyncio.gather(*bound, return_exceptions=True)
        failed = [o for o in outcomes if isinstance(o, BaseException)]
        assert [type(o) for o in failed] == [GenerationError]
        assert "too many states" in str(failed[0])
        for outcome, alone in zip(outcomes, healthy, strict=True):
            if not isinstance(outcome, BaseException):
                assert outcome.token_ids == alone.token_ids
        assert (await free).token_ids == expected([9], 60)
        assert await kept(engine) == 0, "what failed may be spoilt for the next request"
        again = await engine.generate([2], params(20, structured=WORD))
        assert again.token_ids == healthy[2].token_ids
        assert await kept(engine) == 1


async def test_v_pr_47312_a_compiler_that_breaks_fails_one_request(
    loop_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        await engine.generate([1], params(3, structured=WORD))
        compile_, broken = llguidance.LLGuidanceBackend.compile, StructuredOutput.regex("b+")

        def compiles(self: Any, source: Any) -> Any:
            if "b+" in source.text:
                raise MemoryError("no room for the automaton")
            return compile_(self, source)

        monkeypatch.setattr(llguidance.LLGuidanceBackend, "compile", compiles)
        free = engine.generate([9], params(60))
        with pytest.raises(GenerationError, match="no room"):
            await engine.generate([1], params(structured=broken))
        other = await engine.generate([1], params(structured=StructuredOutput.regex("c{3}")))
        assert other.text == "ccc"
        assert (await free).token_ids == expected([9], 60)
        assert await kept(engine) == 2


async def test_v54003_s39125_a_hostile_schema_is_stopped_while_others_stream(
    loop_mode: str,
) -> None:
    limits: dict[str, Any] = {"grammar_compile_seconds": 0.7, "grammar_max_heavy": 1}
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.001), **limits) as engine:
        hostile = asyncio.ensure_future(_outcome(engine, HOSTILE))
        answered = 0
        while not hostile.done():
            result = await engine.generate([answered % 200], params(20))
            assert result.token_ids == expected([answered % 200], 20)
            bound = await engine.generate([1], params(20, structured=WORD))
            assert len(bound.text) == 20
            answered += 1
        assert answered > 3
        assert isinstance(await hostile, GrammarTimeoutError)
        assert await kept(engine) == 1
        compiler: Any = engine.parts.grammars._compiler
        assert compiler.workers.process_ids == ()
        dropped = engine.generate([1], params(structured=HOSTILE))
        await asyncio.sleep(0.05)
        dropped.abort()
        assert (await dropped).finish_reason is FinishReason.ABORT


async def _outcome(engine: Engine, structured: StructuredOutput) -> Any:
    try:
        return await engine.generate([1], params(structured=structured))
    except Exception as error:
        return error


async def test_limits_are_options() -> None:
    async with scripted_engine(grammar_max_spec_bytes=40, grammar_cache_bytes=1) as engine:
        with pytest.raises(GrammarError, match="40"):
            await engine.generate([1], params(structured=StructuredOutput.regex("a" * 60)))
        result = await engine.generate([1], params(structured=StructuredOutput.regex("a{3}")))
        assert result.text == "aaa"
        assert await kept(engine) == 0


async def test_masks_that_are_never_in_time_lose_nothing(loop_mode: str) -> None:
    """A patience so short that nearly every mask is late."""
    async with scripted_engine(loop=loop_mode, grammar_mask_patience=1e-9) as engine:
        bound = [engine.generate([i], params(structured=ONE_PATH)) for i in range(4)]
        free = engine.generate([9], params(60))
        assert {r.text for r in await asyncio.gather(*bound)} == {ONLY_TEXT}
        assert (await free).token_ids == expected([9], 60)
        assert await kept(engine) == 1


@pytest.mark.parametrize("tokens", [3, 10, 33])
async def test_a_cut_answer_says_so(tokens: int) -> None:
    async with scripted_engine() as engine:
        result = await engine.generate([1], params(tokens, structured=ONE_PATH))
    assert result.finish_reason is FinishReason.LENGTH
    assert ONLY_TEXT.encode().startswith(bytes(result.token_ids))


async def test_nothing_of_a_finished_request_stays() -> None:
    async with scripted_engine() as engine:
        for index in range(4):
            schema = {"type": "object", "properties": {"a": {"enum": [index]}}, "required": ["a"]}
            wanted = params(400, structured=StructuredOutput.json(schema))
            stream = engine.generate([index], wanted)
            if index % 2:
                await anext(stream)
                stream.abort()
                await stream
            else:
                assert json.loads((await stream).text) == {"a": index}
        made: Any = engine._service._delayed
        left = (made._matchers, made._grammars, made._ready, made._jumping, made._may_jump)
        assert [len(each) for each in left] == [0] * 5
        assert await kept(engine) == 4
