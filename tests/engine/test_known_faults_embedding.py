"""Faults reported against engines that people embed, one test a report. See the names.

Reports that have their test elsewhere: test_engine (duplicate ids, stalled readers, loops, threads,
row faults, deadlines), test_lifecycle (stale caches), test_detokenize (UTF-8, stop strings),
test_real_model (batches, log-probabilities), test_structured (grammars).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import (
    AEngineError,
    Engine,
    EngineDeadError,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
)
from aengine.testing import Faults, arithmetic_script, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

SCRIPT = arithmetic_script(256)
CHOICE = StructuredOutput.choice(["yes", "no", "perhaps"])


def params(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0} | options)


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


async def all_back(engine: Engine) -> None:
    """Wait until no request is live; then every block must be free or cached."""
    with anyio.fail_after(20):
        while True:
            stats = await engine.stats()
            busy = stats.running, stats.waiting, stats.kv_blocks_in_use, stats.kv_blocks_leased
            if not any(busy):
                assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
                return
            await asyncio.sleep(0.001)


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


async def test_s4319_v13806_an_engine_starts_in_a_thread_and_leaves_signals_alone() -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD]
    before = [signal.getsignal(number) for number in numbers]
    answers: list[tuple[int, ...]] = []
    during: list[bool] = []

    async def use(loop_mode: str) -> None:
        async with scripted_engine(loop=loop_mode) as engine:
            answers.append((await engine.generate([1], params(5))).token_ids)
            during.append([signal.getsignal(number) for number in numbers] == before)

    for mode in ("own", "caller"):
        thread = threading.Thread(target=lambda mode=mode: asyncio.run(use(mode)))  # type: ignore[misc]
        thread.start()
        await asyncio.to_thread(thread.join)
    assert answers == [expected([1], 5)] * 2
    assert during == [True, True]
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("phase", ["queued", "compiling", "prefilling", "decoding", "unread"])
async def test_v_pr_7111_an_abort_of_n_frees_all_in_every_phase(phase: str, loop_mode: str) -> None:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "block_size": 4}
    faults = Faults(delay=0.001)
    async with scripted_engine(loop=loop_mode, faults=faults, **options) as engine:
        await engine.generate([1], params(1))
        await engine.reset_prefix_cache()
        before = (await engine.stats()).kv_blocks_free
        blocker = engine.generate([0], params(400, n=4)) if phase == "queued" else None
        if blocker is not None:
            await anext(blocker)
        structured = CHOICE if phase == "compiling" else None
        length = 200 if phase == "prefilling" else 3
        stream = engine.generate(list(range(length)), params(300, n=4, structured=structured))
        if phase == "decoding":
            await anext(stream)
        elif phase == "prefilling":
            while not (await engine.stats()).running:  # noqa: ASYNC110  # any state
                await asyncio.sleep(0)
        elif phase == "unread":
            while (await engine.stats()).generation_tokens < 40:  # noqa: ASYNC110  # any state
                await asyncio.sleep(0)
        stream.abort()
        result = await stream
        assert {c.finish_reason for c in result.completions} == {FinishReason.ABORT}
        assert len(result.completions) == 4
        if blocker is not None:
            blocker.abort()
        await all_back(engine)
        await engine.reset_prefix_cache()
        assert (await engine.stats()).kv_blocks_free == before


OUTPUTS = [
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"n": 3},
    {"stop": ["zzz"]},
    {"structured": CHOICE},
    {"seed": 3, "temperature": 1.0},
    {"repetition_penalty": 1.3},
    {"logprobs": 1, "n": 2, "stop": ["zz"], "prompt_logprobs": 1},
]


@pytest.mark.parametrize("options", OUTPUTS, ids=lambda o: "-".join(o))
async def test_tensorrt_llm_10810_a_cancel_with_every_output_option(
    options: dict[str, Any], loop_mode: str
) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.0005)) as engine:
        other = engine.generate([9], params(60))
        for turns in (0, 1, 5, 20):
            stream = engine.generate([1, 2, 3], params(200, **options))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            del stream
        assert (await other).token_ids == expected([9], 60)
        await all_back(engine)


BAD = [
    {"temperature": float("nan")},
    {"temperature": -1},
    {"top_p": 0},
    {"top_p": float("inf")},
    {"top_k": -5},
    {"max_tokens": 0},
    {"max_tokens": 10**30, "min_tokens": -1},
    {"n": 0},
    {"logprobs": -3},
    {"seed": "x"},
    {"stop": [""]},
    {"stop_token_ids": ["a"]},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {2: 1e30}},
    {"repetition_penalty": 0},
    {"temprature": 1},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
async def test_v1543_v5822_xinference_3785_bad_parameters_leave_the_engine_alone(
    bad: dict[str, Any],
) -> None:
    async with scripted_engine() as engine:
        with pytest.raises((AEngineError, TypeError)):
            await engine.generate([1], SamplingParams(**bad))
        assert (await engine.generate([7], params(5))).token_ids == expected([7], 5)


@pytest.mark.parametrize(
    "huge",
    [
        {"max_tokens": 10**12},
        {"top_k": 10**9},
        {"stop_token_ids": [256]},
    ],
    ids=str,
)
async def test_v5822_huge_parameters_end_by_themselves(huge: dict[str, Any]) -> None:
    async with scripted_engine(max_model_len=64) as engine:
        result = await engine.generate([1], params(**huge))
        assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert (await engine.generate([7], params(5))).token_ids == expected([7], 5)


async def test_transformers_42943_v_pr_21443_a_killed_step_loop_is_told_to_everyone(
    loop_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=Faults(delay=0.001)).start()
    streams = [engine.generate([i], params(400)) for i in range(4)]
    await anext(streams[0])

    def broken(*_: Any) -> None:
        raise RuntimeError("the scheduler broke")

    monkeypatch.setattr(engine.parts.scheduler, "schedule", broken)
    with anyio.fail_after(5):
        results = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert all(isinstance(result.cause, RuntimeError) for result in results)  # type: ignore[union-attr]
    assert len({id(result) for result in results}) == 4
    health = engine.health()
    assert (health.state, health.alive) == ("dead", False)
    assert "the scheduler broke" in str(health.error)
    await engine.aclose()


async def test_v2901_v18826_a_flood_is_refused_and_told_when_to_come_back(loop_mode: str) -> None:
    options = {"max_num_seqs": 2, "max_num_queued_requests": 5}
    faults = Faults(delay=0.001)
    async with scripted_engine(loop=loop_mode, faults=faults, **options) as engine:
        streams = [engine.generate([i], params(20)) for i in range(200)]
        results = await asyncio.gather(*streams, return_exceptions=True)
        served = [r for r in results if not isinstance(r, BaseException)]
        refused = [r for r in results if isinstance(r, EngineOverloadedError)]
        assert len(served) + len(refused) == 200
        assert 5 <= len(served) <= 2 + 5  # the queue, and the slots if they are given meanwhile
        assert all(0 < error.retry_after <= 60 for error in refused)
        assert len({id(error) for error in refused}) == len(refused)
        await all_back(engine)
        assert (await engine.generate([7], params(5))).token_ids == expected([7], 5)


async def test_v2901_prompts_that_are_still_being_tokenized_count_too(loop_mode: str) -> None:
    options = {"max_num_seqs": 1, "max_num_queued_requests": 3}
    async with scripted_engine(loop=loop_mode, **options) as engine:
        gate = threading.Event()
        # The text thread is busy: nothing that is text reaches the scheduler.
        busy = asyncio.ensure_future(engine.parts.text_thread.run(gate.wait))
        await asyncio.sleep(0)
        streams = [engine.generate("text", params(3)) for _ in range(50)]
        late = [asyncio.ensure_future(_outcome(stream)) for stream in streams]
        with anyio.fail_after(5):
            while sum(task.done() for task in late) < 46:  # noqa: ASYNC110  # any state
                await asyncio.sleep(0.001)
        assert sum(task.done() for task in late) == 46
        gate.set()
        await busy
        outcomes = await asyncio.gather(*late)
    served = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert 3 <= len(served) <= 4


async def _outcome(stream: Any) -> Any:
    try:
        return await stream
    except AEngineError as error:
        return error


async def test_exllamav3_227_a_slow_reader_finds_its_deltas_coalesced(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        sleeper = engine.generate([0], params(300))
        results = await asyncio.gather(*[engine.generate([i], params(40)) for i in range(10)])
        assert [r.token_ids for r in results] == [expected([i], 40) for i in range(10)]
        await all_back(engine)  # it has finished though nobody read it
        await asyncio.sleep(0.01)
        chunks = [chunk async for chunk in sleeper]
        assert len(chunks) == 1
        assert chunks[0].token_ids == expected([0], 300)


async def test_vllm_ascend_5027_metrics_are_always_filled(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.001)) as engine:
        whole = await engine.generate([1], params(5))
        dropped = engine.generate([2], params(300))
        await anext(dropped)
        dropped.abort()
        late = await engine.generate([3], params(300), deadline=0.05)
        for result in (whole, await dropped, late):
            times = result.metrics
            assert times.queue_time is not None
            assert times.prefill_time is not None
            assert times.ttft is not None
            assert times.e2e >= times.ttft >= times.queue_time >= 0
            assert result.usage.prompt_tokens == 1
            assert result.usage.completion_tokens == len(result.token_ids)
        assert whole.metrics.mean_itl is not None


async def test_s6778_s36475_random_lifecycles_leak_nothing(loop_mode: str) -> None:
    await lifecycles(500, loop_mode, seed=1)


@pytest.mark.slow
async def test_s6778_s36475_ten_thousand_random_lifecycles_leak_nothing(loop_mode: str) -> None:
    await lifecycles(10_000, loop_mode, seed=2)


async def lifecycles(count: int, loop_mode: str, seed: int) -> None:
    """Requests of every kind, left in every way, at random moments; nothing may stay behind."""
    rng = random.Random(seed)
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 96}
    options |= {"max_num_queued_requests": 64}
    # Slow at first: the loop's wake-up descriptor is made when a step is worth waiting for.
    faults = Faults(delay=0.02)
    async with scripted_engine(loop=loop_mode, faults=faults, **options) as engine:  # type: ignore[arg-type]
        await engine.generate("warm", params(3, structured=CHOICE))
        faults.delay = 0.0
        await all_back(engine)
        tasks, threads, files = what_is_open()

        async def one() -> None:
            prompt: Any = "p" * rng.choice([1, 5, 40, 120])
            if rng.random() < 0.3:
                prompt = [rng.randrange(256) for _ in range(rng.choice([1, 9, 60]))]
            wanted = params(
                rng.choice([1, 4, 30, 80]),
                n=rng.choice([1, 1, 1, 3]),
                structured=CHOICE if rng.random() < 0.1 else None,
                logprobs=None,
            )
            deadline = rng.choice([None, None, None, 0.004])
            stream = engine.generate(prompt, wanted, deadline=deadline, priority=rng.randrange(3))
            way = rng.randrange(6)
            with contextlib.suppress(AEngineError):
                if way == 0:
                    await stream
                elif way == 1:
                    async for _ in stream:
                        if rng.random() < 0.2:
                            break
                elif way == 2:
                    with anyio.move_on_after(rng.random() * 0.01):
                        await stream
                elif way == 3:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(rng.random() * 0.01):
                            await stream
                elif way == 4:
                    await asyncio.sleep(rng.random() * 0.005)
                    stream.abort()
                    await stream.aclose()
                else:
                    reader = asyncio.ensure_future(_outcome(stream))
                    await asyncio.sleep(rng.random() * 0.005)
                    reader.cancel()
                    reader.cancel()
                    await asyncio.wait([reader])

        for _ in range(0, count, 25):
            await asyncio.gather(*[one() for _ in range(25)])
        await all_back(engine)
        await asyncio.sleep(0.01)
        after = what_is_open()
        assert after[0] == tasks
        assert after[1] == threads
        # What an earlier test left to be collected may be gone by now; nothing may have come.
        assert after[2].items() <= files.items()
        core = engine._service._core
        assert core is not None
        assert (core._live, core._by_channel, core._preparing) == ({}, {}, {})


def what_is_open() -> tuple[set[str], set[str], dict[str, str]]:
    """Tasks of this loop, threads of the process, file descriptors and what they are."""
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    threads = {thread.name for thread in threading.enumerate()}
    files: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            files[number] = os.readlink(f"/proc/self/fd/{number}")
    return tasks, threads, files


async def test_v1908_v16543_five_cycles_leave_nothing_alive(loop_mode: str) -> None:
    before = set(threading.enumerate())
    dead: list[weakref.ref[Any]] = []
    for _ in range(5):
        async with scripted_engine(loop=loop_mode) as engine:
            await engine.generate("text", params(3))
            dead += [weakref.ref(engine.parts.launcher), weakref.ref(engine.parts.scheduler)]
        del engine
    gc.collect()
    assert [ref() for ref in dead] == [None] * 10
    left = set(threading.enumerate()) - before
    assert [t.name for t in left if t.name.startswith(("aengine", "cpu-"))] == []
    assert len(left) <= 1  # the loop's own executor


@pytest.mark.parametrize("loop_factory", ["asyncio", "uvloop"])
@pytest.mark.parametrize("mode", ["own", "caller"])
def test_lmdeploy_3104_an_orderly_exit_with_all_warnings_as_errors(
    mode: str, loop_factory: str
) -> None:
    done = run_python(
        f"""
        import asyncio, {loop_factory}
        from aengine import SamplingParams
        from aengine.testing import scripted_engine

        async def main():
            params = SamplingParams(max_tokens=200, temperature=0)
            async with scripted_engine(loop={mode!r}) as engine:
                await engine.generate([1], SamplingParams(max_tokens=5))
                left = engine.generate([2], params)
                async for _ in engine.generate([3], params):
                    break
                left.abort()
            print("closed", engine.health().state)

        with asyncio.Runner(debug=True, loop_factory={loop_factory}.new_event_loop) as runner:
            runner.run(main())
        """,
        "-W",
        "error",
        "-X",
        "dev",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed closed\n", "")


@pytest.mark.parametrize("mode", ["own", "caller"])
@pytest.mark.parametrize("tokens", [1, 30])
def test_an_interrupt_ends_the_program_in_an_orderly_way(mode: str, tokens: int) -> None:
    done = run_python(
        f"""
        import asyncio, os, signal
        from aengine import SamplingParams
        from aengine.testing import Faults, scripted_engine

        async def main():
            async with scripted_engine(loop={mode!r}, faults=Faults(delay=0.001)) as engine:
                seen = 0
                async for _ in engine.generate([3], SamplingParams(max_tokens=400, temperature=0)):
                    seen += 1
                    if seen == {tokens}:
                        os.kill(os.getpid(), signal.SIGINT)

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_v8893_v15681_importing_initialises_nothing() -> None:
    done = run_python(
        """
        import os, sys, threading, logging
        before = dict(os.environ)
        import aengine
        aengine.Engine, aengine.BlockingEngine, aengine.SamplingParams
        assert dict(os.environ) == before
        assert "torch" not in sys.modules
        assert threading.active_count() == 1
        assert logging.getLogger().handlers == []
        print("ok")
        """
    )
    assert (done.stdout, done.stderr) == ("ok\n", "")


async def test_a_fork_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_engine() as engine:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(AEngineError, match="fork"):
            engine.generate([1])
        monkeypatch.undo()


async def test_v24910_tokenizers_1797_a_huge_prompt_is_tokenized_beside_the_loop(
    loop_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        seen: list[str] = []
        codec = engine.parts.codec
        encode = codec.encode

        def noted(text: str, **options: Any) -> list[int]:
            seen.append(threading.current_thread().name)
            return encode(text, **options)

        monkeypatch.setattr(codec, "encode", noted, raising=True)
        other = engine.generate([9], params(50))
        with pytest.raises(InvalidRequestError):
            await engine.generate("x" * 5_000_000, params(5))
        assert (await other).token_ids == expected([9], 50)
        assert len(seen) == 1
        assert seen[0].startswith("aengine-text")
