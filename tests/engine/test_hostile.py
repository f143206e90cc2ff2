"""Whatever a caller gives: an error of ours that names it, nothing left behind, and the next
request works."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aengine
from aengine import Engine, SamplingParams, StructuredOutput
from aengine.errors import (
    AEngineError,
    ConfigError,
    EngineClosedError,
    EngineStateError,
    GrammarError,
    InvalidRequestError,
    ReaderConflictError,
    shown,
)
from aengine.testing import Faults, scripted_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def named(value: Any) -> str:
    return shown(value, 30)


SHORT = SamplingParams(max_tokens=2)
LONG = SamplingParams(max_tokens=300, temperature=0)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture(params=["own", "caller"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with scripted_engine(loop=request.param, max_model_len=512) as engine:
        yield engine
        assert (await engine.generate([1], SHORT)).usage.completion_tokens == 2
        for _ in range(200):
            stats = await engine.stats()
            if not (stats.running or stats.waiting or stats.kv_blocks_in_use):
                break
            await asyncio.sleep(0.002)
        assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0)


def message(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


PROMPTS: dict[str, Any] = {
    "none": None,
    "int": 5,
    "bytes": b"a",
    "dict": message("x"),
    "set": {1},
    "generator": (n for n in [1]),
    "array of two dimensions": np.zeros((2, 2), dtype=int),
    "object": Unspeakable(),
    "empty text": "",
    "empty list": [],
    "surrogate": "\ud800",
    "too long": "x" * 5000,
    "nones": [None],
    "bools": [True],
    "negative": [-1],
    "unknown": [257],
    "huge": [2**70],
    "floats": [1.5],
    "nan": [math.nan],
    "texts": ["a"],
    "mixed": [1, "a"],
    "id and message": [1, message("x")],
    "message and id": [message("x"), 1],
    "message and text": [message("x"), "y"],
    "nested": [[1]],
    "objects": [Unspeakable()],
    "late": [1] * 3000 + ["x"],
    "no role": [{"content": "x"}],
    "no content": [{"role": "user"}],
    "empty message": [{}],
    "role of a number": [message("x", 5)],
    "role of a list": [message("x", ["user"])],
    "content of a number": [message(5)],
    "content of an object": [message(Unspeakable())],
    "content with a surrogate": [message("\ud800")],
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_a_bad_prompt(name: str, engine: Engine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await engine.generate(PROMPTS[name], SHORT)
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 400
    assert pickle.loads(pickle.dumps(caught.value)).code == caught.value.code


async def test_good_prompts_of_odd_types(engine: Engine) -> None:
    class Text(str):
        __slots__ = ()

    for prompt in (Text("hello"), range(1, 5), (1, 2), [np.int64(3)], "\x00", memoryview(b"ab")):
        assert (await engine.generate(prompt, SHORT)).finish_reason == "length"  # type: ignore[arg-type]


OPTIONS: list[tuple[str, Any]] = [
    *(("priority", value) for value in (math.nan, 1.5, "1", True, None, 10**30, -(10**30))),
    *(("deadline", value) for value in (-1, 0, math.nan, "1", True, [1])),
    *((name, value) for name in ("request_id", "cache_salt") for value in ("", 5, b"x", ["x"])),
    *(("params", value) for value in ("x", {"max_tokens": 3}, SamplingParams)),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=named)
async def test_a_bad_option_names_its_value(name: str, value: Any, engine: Engine) -> None:
    given: dict[str, Any] = {"params": SHORT} | {name: value}
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate([1], **given)
    assert caught.value.param == name
    assert repr(value) in str(caught.value)


PARAMS: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 129, 1.0, True, "2")),
    *(("max_tokens", value) for value in (0, -1, "5", 1.5, np.int64(3))),
    *(("temperature", value) for value in (-1, math.nan, math.inf, 10**400, "a", None)),
    *(("top_k", value) for value in (-2, 1.5, 10**30)),
    *(("top_p", value) for value in (0, 2, math.nan)),
    *(("seed", value) for value in (2**70, "a", 1.5)),
    *(("stop", value) for value in ("", [""], 5, [5], None, ["\ud800"], (s for s in "ab"))),
    *(("stop_token_ids", value) for value in (["a"], 5, [-1], [10**30], [True])),
    *(("allowed_token_ids", value) for value in ([], [-1], [True], [10**30], 5)),
    *(("logit_bias", value) for value in ({"a": 1}, {-1: 1}, {1: math.nan}, [1], {True: 1})),
    *(("bad_words", value) for value in ([""], ["\ud800"], "abc", 5)),
    *(("logprobs", value) for value in (-1, 21, True)),
    *(("structured", value) for value in ("x", {}, Unspeakable())),
    *(("logits_processors", value) for value in (5, [5])),
    *(("ignore_eos", value) for value in ("yes", None, 1)),
    *(("min_tokens", value) for value in (-1, 1.5)),
    ("max_token", 5),
    ("Temperature", 1),
]


@pytest.mark.parametrize(("name", "value"), PARAMS, ids=named)
def test_a_bad_parameter_is_named_where_it_is_written(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 600
    pickle.loads(pickle.dumps(caught.value))


@pytest.mark.parametrize(
    "params",
    [{"allowed_token_ids": [5, 257]}, {"logit_bias": {10**9: 1}}],
    ids=named,
)
async def test_rules_about_tokens_that_the_model_does_not_have(
    params: dict[str, Any], engine: Engine
) -> None:
    with pytest.raises(InvalidRequestError, match="0 to 256") as caught:
        await engine.generate([1], SamplingParams(max_tokens=2, **params))
    assert caught.value.param in params


async def test_huge_and_many_are_served(engine: Engine) -> None:
    for params in (
        {"stop": ["x" * 10] * 5000},
        {"stop": ["x" * 1_000_000]},
        {"bad_words": ["a"] * 2000},
        {"max_tokens": 10**30, "stop_token_ids": list(range(257))},
    ):
        result = await engine.generate([1], SamplingParams(**({"max_tokens": 2} | params)))
        assert result.finish_reason in ("length", "stop")
    assert (await engine.generate([1], SHORT, request_id="x" * 10_000)).finish_reason == "length"


def cycle() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["self"] = schema
    return schema


@pytest.mark.parametrize(
    "make",
    [
        *(lambda v=v: StructuredOutput.choice(v) for v in ([], None, 5, "ab", [1])),
        *(
            lambda v=v: StructuredOutput.json(v)
            for v in (None, b"{}", [1], int, "{", "[" * 100_000, {"a": object()}, cycle())
        ),
        *(
            lambda v=v: StructuredOutput.structural_tag(v)
            for v in (None, 5, "ab", [], [1], [{"begin": "a", "schema": object(), "end": "b"}])
        ),
        lambda: StructuredOutput.regex(""),
        lambda: StructuredOutput.grammar(None),  # type: ignore[arg-type]
        lambda: StructuredOutput(kind="never", spec="x"),  # type: ignore[arg-type]
        lambda: StructuredOutput(kind="json", spec=5),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_bad_constraint(make: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        make()
    pickle.loads(pickle.dumps(caught.value))


CALLS: dict[str, Any] = {
    "pause": lambda e: e.pause("x"),
    "pause of a list": lambda e: e.pause([]),
    "weights of nothing": lambda e: e.update_weights(None),
    "weights of a number": lambda e: e.update_weights(5),
    "weights that are not there": lambda e: e.update_weights("/nowhere"),
    "close": lambda e: e.aclose(timeout="soon"),
    "many of nothing": lambda e: e.generate_many(None),
    "many of a number": lambda e: e.generate_many(5),
    "many of a text": lambda e: e.generate_many("abc"),
    "many of a mapping": lambda e: e.generate_many({"a": 1}),
    "many, no concurrency": lambda e: e.generate_many([[1]], SHORT, concurrency=0),
    "many, concurrency of a text": lambda e: e.generate_many([[1]], SHORT, concurrency="a"),
    "many, params of a number": lambda e: e.generate_many([[1]], 5),
    "many, params of a generator": lambda e: e.generate_many([[1]], (p for p in [SHORT])),
    "many, too few params": lambda e: e.generate_many([[1], [2]], [SHORT]),
    "many, no callback": lambda e: e.generate_many([[1]], SHORT, on_progress=5),
    "many, a bad prompt": lambda e: e.generate_many([[1], None], SHORT),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_bad_call(name: str, engine: Engine) -> None:
    with pytest.raises((InvalidRequestError, ConfigError)):
        await CALLS[name](engine)


async def test_a_label_that_is_none_is_refused(engine: Engine) -> None:
    for label in (None, 5, b"x", []):
        with pytest.raises(InvalidRequestError, match="request_id="):
            engine.abort(label)  # type: ignore[arg-type]
    engine.abort("nobody")


async def test_a_callback_that_fails_ends_its_batch_alone(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        await engine.generate_many([[1], [2]], SHORT, on_progress=lambda done, total: 1 // 0)  # type: ignore[arg-type, return-value]

    def prompts() -> Any:
        yield [1]
        raise LookupError("no more")

    with pytest.raises(LookupError):
        await engine.generate_many(prompts(), SHORT)


async def test_two_readers(engine: Engine) -> None:
    stream = engine.generate([1], SamplingParams(max_tokens=50))
    outcomes = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [aengine.Chunk, ReaderConflictError]
    assert (await stream).usage.completion_tokens == 50
    assert [chunk async for chunk in stream] == []
    assert (await stream).usage.completion_tokens == 50


async def test_a_reader_in_another_loop(engine: Engine) -> None:
    stream = engine.generate([1], LONG)
    await anext(stream)

    async def read() -> None:
        async for _ in stream:
            pass

    with pytest.raises(ReaderConflictError, match="event loop"):
        await asyncio.to_thread(asyncio.run, read())
    stream.abort()


ENGINES: list[tuple[str, Any]] = [
    *(("model", value) for value in (None, 5, b"x", "", "\x00", [])),
    *(("device", value) for value in (None, 5, "tpu", "cpu:9", "cuda:x", "cuda:-1", "")),
    *(("dtype", value) for value in (None, [], "int3")),
    *(("loop", value) for value in (None, [], "theirs")),
    *(("max_model_len", value) for value in (0, -1, "x", 2.5, True)),
    *(("max_num_seqs", value) for value in (0, 2.0, None)),
    *(("kv_cache_fraction", value) for value in (0, 2, math.nan, "a")),
    *(("kv_cache_dtype", value) for value in (5, "x", None)),
    *(("shutdown_timeout", value) for value in (-1, "x", math.nan, None, math.inf)),
    *(("metrics", value) for value in (5, "yes")),
    *(("on_progress", value) for value in (5, "yes")),
    *(("trace", value) for value in (5, "", "/nowhere/at/all")),
    *(("cuda_graphs", value) for value in ("x", None, 1)),
    *(("enable_prefix_cache", value) for value in ("x", None)),
    *(("seed", value) for value in ("x", 1.5, None)),
    *(("mux", value) for value in (5, "fast", dict)),
    *(("switch_interval", value) for value in (0, -1, "x")),
    *(("grammar_max_depth", value) for value in (0, "x")),
    ("max_num_seq", 5),
]


@pytest.mark.parametrize(("name", "value"), ENGINES, ids=named)
def test_an_engine_that_makes_no_sense(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Engine(**({"model": "smollm2-135m"} | {name: value}))


def test_a_path_is_a_model_and_a_trace(tmp_path: Path) -> None:
    engine = Engine(tmp_path, trace=tmp_path / "trace.json")
    assert engine.config.model == str(tmp_path)
    assert engine.config.trace == str(tmp_path / "trace.json")


async def test_one_engine_in_two_async_withs() -> None:
    async with scripted_engine() as outer:
        async with outer as inner:
            assert inner is outer
            assert (await inner.generate([1], SHORT)).finish_reason == "length"
        with pytest.raises(EngineClosedError):
            outer.generate([1])
    with pytest.raises(EngineClosedError):
        await outer.start()


async def test_requests_of_a_sleeping_engine(engine: Engine) -> None:
    await engine.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate([1])
    with pytest.raises(EngineStateError, match="asleep"):
        await engine.generate_many([[1]])
    with pytest.raises(AEngineError):
        await engine.update_weights("elsewhere")
    await engine.wake()


async def test_weights_that_do_not_exist_while_streams_run(engine: Engine) -> None:
    stream = engine.generate([1], LONG)
    await anext(stream)
    with pytest.raises(ConfigError):
        await engine.update_weights("/nowhere")
    assert (await stream).usage.completion_tokens == 300


async def test_progress_that_fails_does_not_fail_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        calls.append(stage)
        raise ZeroDivisionError

    async def load(config: Any, on_progress: Any) -> Any:
        on_progress("load", 0, 1)
        on_progress("load", 1, 1)
        return await scripted_engine()._service._loader(config, on_progress)

    plain = scripted_engine()
    engine = Engine.from_parts(plain.config, load, report)
    async with engine:
        assert (await engine.generate([1], SHORT)).finish_reason == "length"
    assert calls == ["load"], "it is called once and then not again"
    assert "on_progress failed" in caplog.text


async def test_a_step_that_fails_in_an_odd_way() -> None:
    faults = Faults(raise_at={1: KeyboardInterrupt(), 3: SystemExit(3), 5: StopIteration()})  # type: ignore[dict-item]
    async with scripted_engine(faults=faults) as engine:
        for _ in range(4):
            with pytest.raises(AEngineError):
                await engine.generate([1], LONG)
            if faults.raise_at and engine.parts.launcher.launches > 6:  # type: ignore[attr-defined]
                break
        assert (await engine.generate([1], SHORT)).finish_reason == "length"
