"""The engine from its front door, on a scripted model: lifecycle, isolation, cancellation."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import (
    BlockingEngine,
    ContextLengthError,
    DeadlineExceededError,
    Engine,
    EngineClosedError,
    EngineDeadError,
    FinishReason,
    GenerationError,
    GrammarError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
)
from aengine.errors import DeviceLostError
from aengine.testing import EOS, Faults, arithmetic_script, scripted_engine
from aengine.testing.scripted import ScriptedLauncher

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOPS = ["own", "caller"]
SCRIPT = arithmetic_script(256)


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What the script says, one token at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


async def drained(engine: Engine) -> None:
    """Wait until no request is live and every block is back."""
    with anyio.fail_after(10):
        while True:
            stats = await engine.stats()
            busy = stats.running, stats.waiting, stats.kv_blocks_in_use, stats.kv_blocks_leased
            if not any(busy):
                assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
                return
            await asyncio.sleep(0.001)


def endless(tokens: Sequence[int]) -> int:
    return ord("a") + len(tokens) % 26


def unhurried(tokens: Sequence[int]) -> int:
    """Endless, and slow enough that nothing ends by itself while a test leaves it."""
    threading.Event().wait(0.001)
    return endless(tokens)


@pytest.fixture(params=LOOPS)
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_tokens_are_those_of_the_model(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        result = await engine.generate([1, 2, 3], params(20))
    assert result.token_ids == expected([1, 2, 3], 20)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.prompt_tokens == 3
    assert result.usage.completion_tokens == 20


async def test_deltas_joined_equal_the_result(loop_mode: str) -> None:
    async with scripted_engine(endless, loop=loop_mode) as engine:
        stream = engine.generate("hello", params(30))
        chunks = [chunk async for chunk in stream]
        result = await stream
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert len(result.text) == 30
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert chunks[-1].usage == result.usage
    assert chunks[-1].metrics is not None
    assert chunks[-1].metrics.ttft is not None


async def test_many_requests_in_a_batch_equal_their_solo_runs(loop_mode: str) -> None:
    prompts = [[i, i + 1, i * 3 % 256] * (1 + i % 5) for i in range(40)]
    async with scripted_engine(loop=loop_mode, max_num_seqs=8, block_size=4) as engine:
        streams = [engine.generate(p, params(1 + i % 17)) for i, p in enumerate(prompts)]
        results = await asyncio.gather(*streams)
        await drained(engine)
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.token_ids == expected(prompt, 1 + i % 17)


async def test_an_end_token_stops() -> None:
    def script(tokens: Sequence[int]) -> int:
        return EOS if len(tokens) >= 10 else ord("x")

    async with scripted_engine(script) as engine:
        result = await engine.generate("12345", params(100))
        ignoring = await engine.generate("12345", params(9, ignore_eos=True))
    assert (result.text, result.finish_reason) == ("xxxxx", FinishReason.STOP)
    assert len(ignoring.token_ids) == 9


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with scripted_engine(endless) as engine:
        result = await engine.generate("z", params(60, stop=["hij", "never"]))
        await drained(engine)
    assert result.finish_reason is FinishReason.STOP
    assert result.stop_reason == "hij"
    assert result.text.endswith("defg")
    assert "h" not in result.text


async def test_n_completions_of_one_prompt() -> None:
    async with scripted_engine() as engine:
        result = await engine.generate([5, 6], params(6, n=3))
    assert len(result.completions) == 3
    assert all(c.token_ids == expected([5, 6], 6) for c in result.completions)
    assert result.usage.completion_tokens == 18


@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
@pytest.mark.parametrize("way", ["break", "abort", "timeout", "anyio", "double-cancel", "drop"])
async def test_every_way_out_frees_everything(way: str, phase: str, loop_mode: str) -> None:
    """known-faults: V PR 7111, TensorRT-LLM 6298."""
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "block_size": 4}
    async with scripted_engine(unhurried, loop=loop_mode, **options) as engine:
        before = None
        if phase == "queued":
            before = engine.generate("q" * 4, params(400))
            await anext(before)
        prompt = "p" * (200 if phase == "prefilling" else 3)
        stream = engine.generate(prompt, params(300))
        if phase == "decoding":
            await anext(stream)
        await leave(stream, way)
        del stream
        gc.collect()
        if before is not None:
            before.abort()
        await drained(engine)
        assert (await engine.generate("ok", params(3))).finish_reason is FinishReason.LENGTH


async def leave(stream: Any, way: str) -> None:
    if way == "abort":
        stream.abort()
        stream.abort()
    elif way == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await stream
    elif way == "anyio":
        with anyio.move_on_after(0.02):
            await stream
    elif way == "double-cancel":

        async def read() -> None:
            await stream

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif way == "break":

        async def read_one() -> None:
            async for _ in stream:
                break

        with anyio.move_on_after(0.02):
            await read_one()


async def test_an_aborted_stream_keeps_what_it_had(loop_mode: str) -> None:
    async with scripted_engine(endless, loop=loop_mode) as engine:
        stream = engine.generate("a", params(500))
        first = await anext(stream)
        stream.abort()
        result = await stream
    assert result.finish_reason is FinishReason.ABORT
    assert result.text.startswith(first.text)


async def test_abort_by_label() -> None:
    async with scripted_engine(endless) as engine:
        streams = [engine.generate("a", params(500), request_id="same") for _ in range(3)]
        engine.abort("same")
        engine.abort("unknown")
        results = await asyncio.gather(*streams)
    assert {r.finish_reason for r in results} == {FinishReason.ABORT}


async def test_duplicate_ids_are_only_labels() -> None:
    """known-faults: V#10583."""
    async with scripted_engine() as engine:
        results = await asyncio.gather(
            *[engine.generate([i], params(5), request_id="x") for i in range(4)]
        )
    assert [r.token_ids for r in results] == [expected([i], 5) for i in range(4)]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", InvalidRequestError),
        ([], InvalidRequestError),
        (b"bytes", InvalidRequestError),
        (None, InvalidRequestError),
        ("bad \ud800 surrogate", InvalidRequestError),
        ([1, -1], InvalidRequestError),
        ([1, 257], InvalidRequestError),
        ([1, "a"], InvalidRequestError),
        ([1.5], InvalidRequestError),
        ([{"role": "user"}], InvalidRequestError),
        ("x" * 512, ContextLengthError),
    ],
)
async def test_a_bad_prompt_fails_alone(prompt: Any, error: type[Exception]) -> None:
    """known-faults: V#1543, V#5822, xinference 3785."""
    async with scripted_engine() as engine:
        other = engine.generate([9], params(50))
        with pytest.raises(error):
            await engine.generate(prompt, params(5))
        assert (await engine.generate([7], params(5))).token_ids == expected([7], 5)
        assert (await other).token_ids == expected([9], 50)
        await drained(engine)


@pytest.mark.parametrize(
    "options", [{"deadline": 0}, {"deadline": "soon"}, {"priority": 1.5}, {"cache_salt": ""}]
)
async def test_bad_request_options_are_refused_at_once(options: dict[str, Any]) -> None:
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate([1], **options)
        assert caught.value.param in options


async def test_one_rows_fault_leaves_the_others_alone() -> None:
    """known-faults: nnsight 641, mlx-lm PR 1513."""
    faults = Faults(row_errors={3: RuntimeError("row broke")})
    async with scripted_engine(faults=faults) as engine:
        streams = [engine.generate([i], params(12)) for i in range(8)]
        results = await asyncio.gather(*streams, return_exceptions=True)
        await drained(engine)
    failed = [i for i, r in enumerate(results) if isinstance(r, GenerationError)]
    assert len(failed) == 1
    for i, result in enumerate(results):
        if i not in failed:
            assert not isinstance(result, BaseException)
            assert result.token_ids == expected([i], 12)


async def test_one_steps_fault_ends_its_rows_and_not_the_engine() -> None:
    faults = Faults(raise_at={2: RuntimeError("step broke")})
    async with scripted_engine(faults=faults) as engine:
        with pytest.raises(GenerationError, match="step broke"):
            await engine.generate([1], params(20))
        assert (await engine.generate([2], params(5))).token_ids == expected([2], 5)
        await drained(engine)


async def test_a_lost_device_ends_every_stream_at_once(loop_mode: str) -> None:
    """known-faults: transformers 42943, V PR 21443."""
    faults = Faults(raise_at={5: DeviceLostError("gone", step_id=5)})
    engine = scripted_engine(faults=faults, loop=loop_mode)
    await engine.start()
    streams = [engine.generate([i], params(100)) for i in range(4)]
    with anyio.fail_after(5):
        results = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(r, EngineDeadError) for r in results)
    assert len({id(r) for r in results}) == 4
    assert engine.health().state == "dead"
    assert not engine.health().alive
    with pytest.raises(EngineDeadError):
        engine.generate([1])
    await engine.aclose()


async def test_a_deadline_keeps_the_partial_text(loop_mode: str) -> None:
    def slow(tokens: Sequence[int]) -> int:
        threading.Event().wait(0.01)
        return ord("s")

    async with scripted_engine(slow, loop=loop_mode) as engine:
        result = await engine.generate("a", params(500), deadline=0.2)
        await drained(engine)
    assert result.finish_reason is FinishReason.DEADLINE
    assert 0 < len(result.text) < 500


async def test_a_deadline_before_the_first_token_is_an_error() -> None:
    """known-faults: V#16391."""
    async with scripted_engine(endless, max_num_seqs=1) as engine:
        first = engine.generate("a", params(500))
        await anext(first)
        with pytest.raises(DeadlineExceededError):
            await engine.generate("b", params(5), deadline=1e-6)
        first.abort()


async def test_use_before_start_and_after_close_is_an_error(loop_mode: str) -> None:
    engine = scripted_engine(loop=loop_mode)
    with pytest.raises(EngineClosedError, match="not started"):
        engine.generate("a")
    async with engine:
        await engine.start()
    await engine.aclose()
    with pytest.raises(EngineClosedError, match="closed"):
        engine.generate("a")
    with pytest.raises(EngineClosedError):
        await engine.start()
    with pytest.raises(EngineClosedError):
        await engine.stats()


async def test_close_drains_what_runs(loop_mode: str) -> None:
    engine = await scripted_engine(loop=loop_mode).start()
    streams = [engine.generate([i], params(30)) for i in range(5)]
    await anext(streams[0])
    await engine.aclose()
    results = await asyncio.gather(*streams)
    assert [r.token_ids for r in results] == [expected([i], 30) for i in range(5)]


async def test_close_without_drain_ends_streams_with_an_error(loop_mode: str) -> None:
    engine = await scripted_engine(endless, loop=loop_mode).start()
    stream = engine.generate("a", params(500))
    await anext(stream)
    await engine.aclose(drain=False)
    with pytest.raises(Exception, match="closed") as caught:
        await stream
    assert caught.value.code in ("request_aborted", "engine_closed")  # type: ignore[attr-defined]


async def test_an_unclosed_engine_warns_and_stops(recwarn: pytest.WarningsRecorder) -> None:
    engine = await scripted_engine().start()
    thread = engine._runtime._thread  # type: ignore[union-attr]
    del engine
    gc.collect()
    assert any(issubclass(w.category, ResourceWarning) for w in recwarn.list)
    recwarn.clear()  # the recorded warning holds the engine as its source
    gc.collect()
    assert thread is not None
    assert not thread.is_alive()


async def test_a_closed_engine_is_collected() -> None:
    """known-faults: V#1908, V#16543."""
    async with scripted_engine() as engine:
        await engine.generate([1], params(3))
        dead = weakref.ref(engine.parts.launcher)
    gc.collect()
    assert dead() is None


async def test_three_engines_at_once() -> None:
    """known-faults: V#1676, V#9198."""
    async with scripted_engine() as a, scripted_engine() as b, scripted_engine() as c:
        results = await asyncio.gather(*[e.generate([4], params(9)) for e in (a, b, c)])
    assert {r.token_ids for r in results} == {expected([4], 9)}


async def test_a_reader_that_never_reads_costs_the_others_nothing() -> None:
    """known-faults: exllamav3 227."""
    async with scripted_engine() as engine:
        sleeper = engine.generate([0], params(200))
        results = await asyncio.gather(*[engine.generate([i], params(50)) for i in range(10)])
        assert [r.token_ids for r in results] == [expected([i], 50) for i in range(10)]
        assert (await sleeper).token_ids == expected([0], 200)


def test_successive_loops_and_threads_share_one_engine() -> None:
    """known-faults: S#5162, lmdeploy 1290, llama-cpp-python 471, V#1285."""
    engine = scripted_engine()
    asyncio.run(engine.start())

    async def ask(i: int) -> tuple[int, ...]:
        return (await engine.generate([i], params(10))).token_ids

    for i in range(3):
        assert asyncio.run(ask(i)) == expected([i], 10)
    answers: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        answers[i] = asyncio.run(ask(i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: expected([i], 10) for i in range(16)}
    asyncio.run(engine.aclose())


def test_a_loop_closed_under_its_request_frees_it() -> None:
    engine = scripted_engine(endless)
    asyncio.run(engine.start())

    async def start_and_leave() -> Any:
        stream = engine.generate("a", params(500))
        await anext(stream)
        return stream

    stream = asyncio.run(start_and_leave())

    async def check() -> None:
        await drained(engine)
        await engine.aclose()

    asyncio.run(check())
    del stream


def test_the_blocking_facade() -> None:
    with BlockingEngine.around(scripted_engine()) as engine:
        assert engine.generate([3], params(7)).token_ids == expected([3], 7)
        chunks = list(engine.stream([3], params(7)))
        assert sum((c.token_ids for c in chunks), ()) == expected([3], 7)
        for _ in engine.stream([3], params(300)):
            break
        with pytest.raises(InvalidRequestError):
            engine.generate("")
    with pytest.raises(EngineClosedError):
        engine.generate([3])


async def test_the_blocking_facade_inside_a_running_loop() -> None:
    """known-faults: lmdeploy 1399, 2030."""
    with BlockingEngine.around(scripted_engine()) as engine:
        assert engine.generate([3], params(7)).token_ids == expected([3], 7)


async def test_structured_output_follows_its_grammar_beside_free_rows(loop_mode: str) -> None:
    choice = StructuredOutput.choice(["yes", "no", "perhaps"])
    async with scripted_engine(loop=loop_mode) as engine:
        bound = [engine.generate([i], params(40, structured=choice)) for i in range(6)]
        free = [engine.generate([i], params(40)) for i in range(6)]
        results = await asyncio.gather(*bound)
        others = await asyncio.gather(*free)
        await drained(engine)
    assert {r.text for r in results} <= {"yes", "no", "perhaps"}
    assert all(r.finish_reason is FinishReason.STOP for r in results)
    assert [r.token_ids for r in others] == [expected([i], 40) for i in range(6)]


@pytest.mark.parametrize(
    "bad",
    [
        StructuredOutput.regex("a(b"),
        StructuredOutput.json({"type": "nonsense"}),
        StructuredOutput.grammar("start: ???"),
    ],
)
async def test_a_bad_grammar_fails_its_request_alone(bad: StructuredOutput) -> None:
    """known-faults: V#17313, V#17248, TGI 2280, V PR 47312."""
    async with scripted_engine() as engine:
        with pytest.raises(GrammarError):
            await engine.generate([1], params(5, structured=bad))
        assert (await engine.generate([7], params(5))).token_ids == expected([7], 5)
        await drained(engine)


async def test_a_late_mask_takes_its_row_out_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, loop_mode: str
) -> None:
    word = StructuredOutput.regex("[a-z]{9}")
    async with scripted_engine(loop=loop_mode, block_size=4) as engine:
        grammars, late = engine.parts.grammars, [0]
        fill = grammars.fill

        def slow_fill(matchers: Any, bitmask: Any) -> Any:
            async def later() -> Any:
                if late[0] < 4:
                    late[0] += 1
                    await asyncio.sleep(0.08)
                return await fill(matchers, bitmask)

            return asyncio.ensure_future(later())

        monkeypatch.setattr(grammars, "fill", slow_fill)
        free = engine.generate([5], params(200))
        bound = await engine.generate([3], params(40, structured=word))
        assert re.fullmatch("[a-z]{9}", bound.text)
        assert (await free).token_ids == expected([5], 200)
        assert late[0] == 4
        await drained(engine)


async def test_a_mask_that_comes_while_its_step_runs_samples_no_token_for_nobody(
    monkeypatch: pytest.MonkeyPatch, loop_mode: str
) -> None:
    """Its row may only come back when the step that went on without it has settled: a token that is
    sampled before would be dropped, but counted for the penalties of the row."""
    word = StructuredOutput.regex("[a-z]{9}")
    slow = Faults(delay=0.02)
    async with scripted_engine(
        loop=loop_mode, block_size=4, faults=slow, grammar_mask_patience=0.001
    ) as engine:
        grammars, launcher = engine.parts.grammars, engine.parts.launcher
        fill, sampled = grammars.fill, Counter[int]()

        def late_fill(matchers: Any, bitmask: Any) -> Any:
            async def later() -> Any:
                await asyncio.sleep(0.005)
                return await fill(matchers, bitmask)

            return asyncio.ensure_future(later())

        def sample(begun: Any, row: int, mask: Any) -> None:
            sampled[begun.plan.seq_ids[row]] += 1
            once(begun, row, mask)

        assert isinstance(launcher, ScriptedLauncher)
        once = launcher._sample
        monkeypatch.setattr(grammars, "fill", late_fill)
        monkeypatch.setattr(launcher, "_sample", sample)
        results = [await engine.generate([3, i], params(40, structured=word)) for i in range(3)]
        assert all(re.fullmatch("[a-z]{9}", each.text) for each in results)
        assert list(sampled.values()) == [len(each.token_ids) for each in results]
        await drained(engine)
