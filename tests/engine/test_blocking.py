"""The blocking facade: every call of the engine, from any thread, also while it ends."""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aengine import BlockingEngine, Engine, SamplingParams
from aengine.errors import (
    AEngineError,
    ConfigError,
    EngineClosedError,
    EngineStateError,
    InvalidRequestError,
)
from aengine.testing import Faults, fake_engine, scripted_engine

LONG = SamplingParams(max_tokens=400, temperature=0)
RENAMED = {"aclose": "close"}
ASYNC_ONLY = {"from_parts", "closed_error", "parts"}


def test_it_has_every_call_of_the_engine_with_its_arguments() -> None:
    names = {n for n in dir(Engine) if not n.startswith("_")} - ASYNC_ONLY - {"config"}
    for name in names:
        mine = getattr(BlockingEngine, RENAMED.get(name, name))
        theirs = getattr(Engine, name)
        if name in ("generate", "generate_many", "metrics"):  # these hand their options on
            continue
        assert list(inspect.signature(mine).parameters) == list(
            inspect.signature(theirs).parameters
        ), name


@pytest.fixture(params=["own", "caller"])
def engine(request: pytest.FixtureRequest) -> Any:
    with BlockingEngine.around(scripted_engine(loop=request.param)) as engine:
        yield engine


def test_operating_it(engine: BlockingEngine) -> None:
    assert engine.health().alive
    engine.pause("keep")
    assert engine.health().paused
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(engine.generate, [1], SamplingParams(max_tokens=3))
        while not engine.stats().waiting:
            time.sleep(0.001)
        engine.resume()
        assert waiting.result(10).usage.completion_tokens == 3
    engine.reset_prefix_cache()
    engine.sleep()
    with pytest.raises(EngineStateError, match="asleep"):
        engine.generate([1])
    engine.wake()
    with pytest.raises(ConfigError):
        engine.pause("never")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        engine.update_weights("elsewhere")
    results = engine.generate_many([[1], [2]], SamplingParams(max_tokens=2), progress=False)
    assert [r.finish_reason for r in results] == ["length"] * 2  # type: ignore[union-attr]
    assert engine.start() is engine


def test_an_abort_from_another_thread(engine: BlockingEngine) -> None:
    chunks = engine.stream([1], LONG, request_id="mine")
    next(chunks)
    engine.abort("mine")
    assert list(chunks)[-1].finish_reason == "abort"


def test_before_the_start_and_after_the_end() -> None:
    engine = BlockingEngine.around(scripted_engine())
    calls: dict[str, Any] = {
        "generate": lambda: engine.generate([1]),
        "stream": lambda: next(engine.stream([1])),
        "many": lambda: engine.generate_many([[1]]),
        "stats": engine.stats,
        "pause": engine.pause,
        "resume": engine.resume,
        "sleep": engine.sleep,
        "wake": engine.wake,
        "reset": engine.reset_prefix_cache,
        "weights": lambda: engine.update_weights("x"),
    }
    for word in ("not started", "closed"):
        for call in calls.values():
            with pytest.raises(EngineClosedError, match=word):
                call()
        engine.abort("nobody")
        assert not engine.health().alive
        engine.close()
        engine.close()
        engine.terminate()
    with pytest.raises(EngineClosedError):
        engine.start()


def test_an_impossible_timeout_closes_nothing(engine: BlockingEngine) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        engine.close(timeout=-1)
    assert engine.generate([1], SamplingParams(max_tokens=2)).finish_reason == "length"


def test_closing_ends_the_calls_of_other_threads() -> None:
    before = set(threading.enumerate())  # what other tests left is not looked at
    engine = BlockingEngine.around(scripted_engine(faults=Faults(delay=0.005))).start()
    outcomes: list[BaseException] = []

    def use() -> None:
        try:
            while True:
                for _ in engine.stream([1], LONG):
                    pass
        except AEngineError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    while engine.stats().running < 8:
        time.sleep(0.001)
    engine.close(drain=False)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(outcomes) == 8
    assert not set(threading.enumerate()) - before


def test_a_start_that_fails_leaves_nothing() -> None:
    before = set(threading.enumerate())
    engine = BlockingEngine("no-such-model-anywhere")
    for _ in range(2):
        with pytest.raises(AEngineError):
            engine.start()
    assert not set(threading.enumerate()) - before


def test_a_callback_that_calls_back_is_told(engine: BlockingEngine) -> None:
    def again(done: int, total: int | None) -> None:
        engine.generate([1])

    with pytest.raises(EngineStateError, match="callback"):
        engine.generate_many([[1]], SamplingParams(max_tokens=1), on_progress=again)
    with pytest.raises(InvalidRequestError):
        engine.generate([])


def test_the_fake_engine_too() -> None:
    with BlockingEngine.around(fake_engine("yes")) as engine:
        assert engine.generate("?").text == "yes"
