"""`generate_many`: order, bounded concurrency, errors of single prompts, progress."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from aengine import (
    BlockingEngine,
    EngineClosedError,
    GenerationError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from aengine.testing import Faults, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aengine import AEngineError, Engine


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def texts(results: Sequence[RequestOutput | AEngineError]) -> list[tuple[int, ...]]:
    assert all(isinstance(result, RequestOutput) for result in results)
    return [result.token_ids for result in results if isinstance(result, RequestOutput)]


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_answers_come_in_the_order_of_the_prompts(loop_mode: str) -> None:
    prompts = [[i, i + 1] for i in range(30)]
    each = [params(1 + (30 - i) % 13) for i in range(30)]  # the later ones finish first
    async with scripted_engine(loop=loop_mode, max_num_seqs=4) as engine:
        alone = [await engine.generate(p, s) for p, s in zip(prompts, each, strict=True)]
        results = await engine.generate_many(prompts, each, concurrency=7)
    assert texts(results) == [one.token_ids for one in alone]


async def test_no_more_than_so_many_at_once_and_prompts_are_taken_as_needed() -> None:
    taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal taken
        for i in range(20):
            taken += 1
            yield [i]

    most_ahead = 0

    def note(done: int, total: int | None) -> None:
        nonlocal most_ahead
        assert total is None
        most_ahead = max(most_ahead, taken - done)

    async with scripted_engine() as engine:
        results = await engine.generate_many(prompts(), params(3), concurrency=3, on_progress=note)
    assert len(results) == 20
    assert most_ahead < 3  # the one that has just finished takes its next prompt afterwards


async def test_the_error_of_a_prompt_takes_the_place_of_its_answer() -> None:
    faults = Faults(row_errors={2: RuntimeError("row broke")})
    async with scripted_engine(faults=faults) as engine:
        results = await engine.generate_many(
            [[1], [2], [], [3]], params(4), concurrency=1, return_exceptions=True
        )
    kinds = [type(result) for result in results]
    assert kinds == [RequestOutput, GenerationError, InvalidRequestError, RequestOutput]


async def test_the_first_error_ends_the_batch_and_drops_the_rest(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        with pytest.raises(InvalidRequestError, match="empty"):
            await engine.generate_many([[1], [2], "", [3]], params(400), concurrency=4)
        await nothing_runs(engine)


async def test_cancelling_drops_every_request(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        task = asyncio.create_task(engine.generate_many(itertools.repeat([1]), params(400)))
        while not (await engine.stats()).running:  # noqa: ASYNC110  # any state of the engine
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_runs(engine)


async def nothing_runs(engine: Engine) -> None:
    async with asyncio.timeout(5):
        while True:
            stats = await engine.stats()
            if not (stats.running or stats.waiting or stats.kv_blocks_leased):
                return
            await asyncio.sleep(0.001)


async def test_a_batch_waits_while_the_queue_is_full() -> None:
    async with scripted_engine(max_num_seqs=1, max_num_queued_requests=2) as engine:
        results = await engine.generate_many([[i] for i in range(12)], params(2), concurrency=12)
    assert len(texts(results)) == 12


@pytest.mark.parametrize(
    ("prompts", "options", "param"),
    [
        ("one text", {}, "prompts"),
        ([[1]], {"concurrency": 0}, "concurrency"),
        ([[1]], {"concurrency": True}, "concurrency"),
        ([[1], [2]], {"params": [SamplingParams()]}, "params"),
        (iter([[1]]), {"params": [SamplingParams()]}, "params"),
    ],
)
async def test_bad_arguments_are_named(prompts: Any, options: dict[str, Any], param: str) -> None:
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate_many(prompts, **options)
        assert caught.value.param == param
        assert await engine.generate_many([]) == []


async def test_a_closed_engine_refuses_the_batch() -> None:
    async with scripted_engine() as engine:
        pass
    with pytest.raises(EngineClosedError):
        await engine.generate_many([[1]])


async def test_nothing_is_printed_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int | None]] = []
    async with scripted_engine() as engine:
        await engine.generate_many(
            [[1], [2]], params(2), on_progress=lambda done, total: seen.append((done, total))
        )
        quiet = capsys.readouterr()
        await engine.generate_many([[1], [2]], params(2), progress=True)
        shown = capsys.readouterr()
    assert seen == [(1, 2), (2, 2)]
    assert (quiet.out, quiet.err, shown.out) == ("", "", "")
    assert "generate" in shown.err


def test_the_blocking_facade_does_batches_too() -> None:
    with BlockingEngine.around(scripted_engine()) as engine:
        results = engine.generate_many([[1], [2]], params(5), concurrency=1)
        alone = [engine.generate([i], params(5)) for i in (1, 2)]
    assert texts(results) == [one.token_ids for one in alone]
