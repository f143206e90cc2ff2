"""A device that never reports: closing ends all the same, and whoever waits is told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from aengine import SamplingParams, StructuredOutput
from aengine.config import EngineConfig
from aengine.engine.front import Engine
from aengine.errors import (
    EngineClosedError,
    EngineStateError,
    RequestAbortedError,
)
from aengine.policy.mux import PriorityStreams
from aengine.testing import Faults, fake_engine, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS = SamplingParams(max_tokens=400, temperature=0)


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.front.GRACE", 0.1)
    monkeypatch.setattr("aengine.engine.steps.WATCH", 0.02)


@pytest.fixture
def dropped() -> Iterator[Any]:
    """Makes faults that drop a completion; the thread that waits for it is let go at the end."""
    made: list[Faults] = []

    def drop(step: int) -> Faults:
        made.append(Faults(drop_at=step))
        return made[-1]

    yield drop
    for faults in made:
        faults.release()


async def hang(engine: Engine) -> None:
    """Return when the device has been silent for a while."""
    for _ in range(200):
        stats = await asyncio.wait_for(engine.stats(), 5)
        await asyncio.sleep(0.01)
        later = await asyncio.wait_for(engine.stats(), 5)
        if stats.steps_in_flight and stats.generation_tokens == later.generation_tokens:
            return
    raise AssertionError("the device did not hang")


CLOSES = {
    "drain": {"drain": True, "timeout": 0.1},
    "no-drain": {"drain": False},
}


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("close", CLOSES)
async def test_closing_ends_without_the_dropped_completion(
    close: str, step: int, loop_mode: str, dropped: Any
) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=dropped(step)).start()
    streams = [engine.generate([1, 2, n], PARAMS) for n in range(3)]
    waiters = [asyncio.ensure_future(_result(stream)) for stream in streams]
    await hang(engine)
    await engine.aclose(**CLOSES[close])
    assert engine.health().state == "closed"
    for waiter in waiters:
        with pytest.raises(RequestAbortedError):
            await waiter
    with pytest.raises(EngineClosedError):
        engine.generate([1])
    await engine.aclose()


async def _result(stream: Any) -> Any:
    return await stream


async def test_terminating_ends_without_the_dropped_completion(
    loop_mode: str, dropped: Any
) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=dropped(2)).start()
    waiter = asyncio.ensure_future(_result(engine.generate([1, 2], PARAMS)))
    await hang(engine)
    engine.terminate()
    with pytest.raises(RequestAbortedError):
        await waiter
    await engine.aclose()
    assert engine.health().state == "closed"


async def test_a_silent_device_with_nobody_left_to_serve(loop_mode: str, dropped: Any) -> None:
    async with scripted_engine(loop=loop_mode, faults=dropped(2)) as engine:
        stream = engine.generate([1, 2], PARAMS)
        await hang(engine)
        stream.abort()


async def test_with_a_grammar_and_with_two_lanes(loop_mode: str, dropped: Any) -> None:
    structured = SamplingParams(max_tokens=50, structured=StructuredOutput.regex("[ab]{40}"))
    for step in (0, 3):
        engine = await scripted_engine(loop=loop_mode, faults=dropped(step)).start()
        waiter = asyncio.ensure_future(_result(engine.generate([1, 2], structured)))
        await hang(engine)
        await engine.aclose(drain=False)
        with pytest.raises(RequestAbortedError):
            await waiter
    engine = await scripted_engine(loop=loop_mode, faults=dropped(3), mux=PriorityStreams()).start()
    waiter = asyncio.ensure_future(_result(engine.generate([1, 2], PARAMS)))
    await hang(engine)
    await engine.aclose(drain=False)
    with pytest.raises(RequestAbortedError):
        await waiter


async def test_a_silent_device_holds_up_neither_aborts_nor_deadlines(
    loop_mode: str, dropped: Any
) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=dropped(4)).start()
    timed = engine.generate([1, 2], PARAMS, deadline=0.3)
    dropped_one = engine.generate([1, 3], PARAMS)
    queued = engine.generate([1, 4], PARAMS)
    await hang(engine)
    assert (await asyncio.wait_for(_result(timed), 5)).finish_reason == "deadline"
    dropped_one.abort()
    assert (await asyncio.wait_for(_result(dropped_one), 5)).finish_reason == "abort"
    engine.abort(queued.request_id)
    assert (await asyncio.wait_for(_result(queued), 5)).finish_reason == "abort"
    assert (await engine.stats()).running == 0
    await engine.aclose()


@pytest.mark.parametrize("operation", ["pause", "sleep"])
async def test_an_operation_that_waits_for_the_device_ends_too(
    operation: str, loop_mode: str, dropped: Any
) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=dropped(2)).start()
    stream = engine.generate([1, 2], PARAMS)
    await hang(engine)
    waiting = asyncio.ensure_future(getattr(engine, operation)())
    await asyncio.sleep(0.01)
    await engine.aclose(drain=False)
    with pytest.raises((EngineClosedError, EngineStateError)):
        await waiting
    del stream


async def test_the_fake_engine_of_the_plugin(loop_mode: str) -> None:
    faults = Faults(drop_at=2)
    async with fake_engine(faults=faults, loop=loop_mode) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.generate("hello")
    for thread in threading.enumerate():
        if thread.name.startswith("cpu-"):
            await asyncio.to_thread(thread.join, 10)
            assert not thread.is_alive(), "the dropped completion comes when all is over"


# -- a start that does not end -----------------------------------------------------------------


def never_loaded(loop_mode: str, blocked: threading.Event | None) -> Engine:
    async def load(config: EngineConfig, on_progress: Any) -> Any:
        on_progress("load", 0, 1)
        if blocked is not None:
            blocked.wait()
        await asyncio.Event().wait()

    return Engine.from_parts(EngineConfig.from_options("never", {"loop": loop_mode}), load)


@pytest.mark.parametrize("way", ["aclose", "terminate", "cancel"])
async def test_a_start_under_way_is_given_up(way: str, loop_mode: str) -> None:
    engine = never_loaded(loop_mode, None)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.02)
    assert engine.health().state == "starting"
    if way == "aclose":
        await engine.aclose()
    elif way == "terminate":
        engine.terminate()
    else:
        starting.cancel()
    with pytest.raises(asyncio.CancelledError if way == "cancel" else EngineClosedError):
        await starting
    await engine.aclose()
    assert engine.health().state == "closed"


async def test_an_engine_whose_own_loop_is_stuck_is_given_up() -> None:
    blocked = threading.Event()
    engine = never_loaded("own", blocked)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.02)
    try:
        await engine.aclose(drain=False)
        assert engine.health().state == "closed"
        with pytest.raises(EngineClosedError):
            await starting
    finally:
        blocked.set()


def test_a_loop_that_was_closed_under_the_engine() -> None:
    before = set(threading.enumerate())
    engine = scripted_engine(loop="caller")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    stream = loop.run_until_complete(_first(engine))
    loop.close()  # without cancelling its tasks, as asyncio.run would

    async def close() -> None:
        with pytest.raises(EngineClosedError):
            engine.generate([1])
        await engine.aclose(timeout=0)
        with pytest.raises(EngineClosedError):
            await engine.stats()

    asyncio.run(close())
    assert engine.health().state == "closed"
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("cpu-")]
    with contextlib.suppress(RuntimeError):
        stream.abort()


async def _first(engine: Engine) -> Any:
    stream = engine.generate([1, 2], PARAMS)
    await anext(stream)
    return stream


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
async def test_an_impossible_timeout_is_refused(timeout: Any) -> None:
    async with scripted_engine() as engine:
        with pytest.raises(ValueError, match="timeout="):
            await engine.aclose(timeout=timeout)
        assert engine.health().alive
