"""Pause, resume, sleep, wake, other weights, health: on a scripted model and the fake device."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import (
    ConfigError,
    Engine,
    EngineClosedError,
    EngineStateError,
    FinishReason,
    ModelLoadError,
    SamplingParams,
)
from aengine.device import FakeDevice
from aengine.engine.steps import PULSE
from aengine.testing import Faults, arithmetic_script, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCRIPT = arithmetic_script(256)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110  # polled: it may be any state of the engine
            await asyncio.sleep(0.001)


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class FakeMemory:
    """A model's memory that only notes what is done to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    def free_kv(self) -> None:
        self._note("free_kv")

    def make_kv(self) -> None:
        self._note("make_kv")

    def read(self, model: str) -> str:
        self._note("read")
        return f"files of {model}"

    def load(self, files: str) -> str:
        self._note("load")
        return f"weights in {files}"

    def use(self, weights: str) -> None:
        assert weights == "weights in files of other"
        self._note("use")


def with_memory(engine: Engine) -> FakeMemory:
    memory = FakeMemory()
    engine.parts.memory = memory
    return memory


async def test_pause_aborts_and_resume_serves_who_came_meanwhile(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.001)) as engine:
        running = [engine.generate([i], params(400)) for i in range(3)]
        await anext(running[0])
        await engine.pause()
        assert engine.health().paused
        ended = await asyncio.gather(*running)
        assert {result.finish_reason for result in ended} == {FinishReason.ABORT}
        late = engine.generate([7], params(5))
        steps = (await engine.stats()).steps
        await asyncio.sleep(0.02)
        stats = await engine.stats()
        assert (stats.steps, stats.steps_in_flight) == (steps, 0)
        await engine.pause("wait")  # is paused already: who came waits on
        await engine.resume()
        await engine.resume()
        assert not engine.health().paused
        assert (await late).token_ids == expected([7], 5)


async def test_pause_waits_for_who_was_there_and_holds_who_comes(loop_mode: str) -> None:
    faults = Faults(delay=0.001)
    async with scripted_engine(loop=loop_mode, faults=faults, max_num_seqs=2) as engine:
        before = [engine.generate([i], params(40)) for i in range(5)]
        await anext(before[0])
        pausing = asyncio.create_task(engine.pause("wait"))
        await until(lambda: engine.health().paused)
        late = engine.generate([9], params(5))
        await pausing
        results = await asyncio.gather(*before)
        assert [r.token_ids for r in results] == [expected([i], 40) for i in range(5)]
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 1)
        await engine.resume()
        assert (await late).token_ids == expected([9], 5)


async def test_pause_keeps_requests_as_they_are(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.001)) as engine:
        stream = engine.generate([3], params(60))
        await anext(stream)
        await engine.pause("keep")
        stats = await engine.stats()
        assert (stats.running, stats.steps_in_flight) == (1, 0)
        assert stats.kv_blocks_in_use > 0
        await engine.resume()
        assert (await stream).token_ids == expected([3], 60)


async def test_a_paused_engine_drops_requests_and_watches_deadlines(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        await engine.pause()
        dropped = engine.generate([1], params(5))
        hurried = engine.generate([2], params(5), deadline=0.02)
        dropped.abort()
        assert (await dropped).finish_reason is FinishReason.ABORT
        last = [chunk async for chunk in hurried][-1]
        assert last.finish_reason is FinishReason.DEADLINE
        assert (await engine.stats()).waiting == 0


async def test_a_cancelled_pause_is_undone(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.002)) as engine:
        stream = engine.generate([3], params(100))
        await anext(stream)
        with anyio.move_on_after(0.02):
            await engine.pause("wait")
        assert (await stream).token_ids == expected([3], 100)
        assert (await engine.generate([4], params(5))).token_ids == expected([4], 5)
        assert not engine.health().paused


async def test_resuming_before_the_pause_is_reached_says_so(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.002)) as engine:
        stream = engine.generate([3], params(200))
        await anext(stream)
        pausing = asyncio.create_task(engine.pause("wait"))
        await until(lambda: engine.health().paused)
        await engine.resume()
        with pytest.raises(EngineStateError, match="resumed"):
            await pausing
        stream.abort()


async def test_pausing_waits_for_the_device() -> None:
    device = FakeDevice()
    options = {"loop": "caller", "device": lambda: device}
    async with scripted_engine(**options) as engine:  # type: ignore[arg-type]
        stream = engine.generate([1, 2], params(10))
        await until(lambda: len(device.pending) == 2)
        pausing = asyncio.create_task(engine.pause("keep"))
        await asyncio.sleep(0.01)
        while device.pending:
            assert not pausing.done()
            device.run(device.pending[0])
            await asyncio.sleep(0.01)
        await pausing
        assert (await engine.stats()).generation_tokens < 10
        assert device.pending == []
        await engine.resume()
        with device.playing():
            assert (await stream).token_ids == expected([1, 2], 10)


async def test_closing_a_paused_engine_lets_what_waits_finish(loop_mode: str) -> None:
    engine = await scripted_engine(loop=loop_mode).start()
    await engine.pause("keep")
    streams = [engine.generate([i], params(5)) for i in range(3)]
    await engine.aclose()
    assert [(await s).token_ids for s in streams] == [expected([i], 5) for i in range(3)]


async def test_closing_ends_a_pause_that_is_under_way(loop_mode: str) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=Faults(delay=0.002)).start()
    stream = engine.generate([3], params(400))
    await anext(stream)
    pausing = asyncio.create_task(engine.pause("wait"))
    await until(lambda: engine.health().paused)
    await engine.aclose(drain=False)
    with pytest.raises((EngineClosedError, EngineStateError)):
        await pausing
    del stream


async def test_sleep_gives_memory_back_and_forgets_prefixes(loop_mode: str) -> None:
    """known-faults: V#17103, V#16234."""
    prompt = list(range(64))
    async with scripted_engine(loop=loop_mode) as engine:
        memory = with_memory(engine)
        await engine.generate(prompt, params(3))
        assert (await engine.generate(prompt, params(3))).usage.cached_tokens > 0
        running = engine.generate([1], params(400))
        await engine.sleep()
        await engine.sleep()
        assert (await running).finish_reason is FinishReason.ABORT
        assert engine.health().asleep
        assert engine.health().alive
        with pytest.raises(EngineStateError, match="asleep"):
            engine.generate(prompt)
        with pytest.raises(EngineStateError, match="asleep"):
            await engine.resume()
        with pytest.raises(EngineStateError, match="asleep"):
            await engine.update_weights("other")
        stats = await engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        await engine.wake()
        await engine.wake()
        assert memory.calls == ["free_kv", "make_kv"]
        again = await engine.generate(prompt, params(3))
        assert again.usage.cached_tokens == 0
        assert again.token_ids == expected(prompt, 3)


async def test_a_failed_sleep_or_wake_leaves_the_engine_as_it_was(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        memory = with_memory(engine)
        memory.fail["free_kv"] = ConfigError("graphs hold it")
        with pytest.raises(ConfigError, match="graphs"):
            await engine.sleep()
        assert (await engine.generate([1], params(3))).token_ids == expected([1], 3)
        memory.fail = {"make_kv": ConfigError("nothing free")}
        await engine.sleep()
        with pytest.raises(ConfigError, match="nothing free"):
            await engine.wake()
        assert engine.health().asleep
        memory.fail = {}
        await engine.wake()
        assert (await engine.generate([1], params(3))).token_ids == expected([1], 3)


async def test_a_sleeping_engine_closes(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        with_memory(engine)
        await engine.sleep()
    assert engine.health().state == "closed"


async def test_new_weights_come_between_requests_and_forget_prefixes(loop_mode: str) -> None:
    """known-faults: V#17103, V#16234."""
    prompt = list(range(64))
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.001)) as engine:
        memory = with_memory(engine)
        running = engine.generate(prompt, params(20))
        await anext(running)
        updating = asyncio.create_task(engine.update_weights("other"))
        await until(lambda: engine.health().paused)
        assert memory.calls == []  # the one that runs finishes with the old weights
        late = engine.generate(prompt, params(4))
        await updating
        assert memory.calls == ["read", "load", "use"]
        assert (await running).token_ids == expected(prompt, 20)
        assert (await late).usage.cached_tokens == 0
        assert not engine.health().paused


@pytest.mark.parametrize("stage", ["read", "load"])
async def test_weights_that_do_not_fit_change_nothing(stage: str, loop_mode: str) -> None:
    prompt = list(range(64))
    async with scripted_engine(loop=loop_mode) as engine:
        memory = with_memory(engine)
        memory.fail[stage] = ModelLoadError("tensor x is missing")
        await engine.generate(prompt, params(3))
        with pytest.raises(ModelLoadError, match="tensor x"):
            await engine.update_weights("other")
        assert "use" not in memory.calls
        result = await engine.generate(prompt, params(3))
        assert result.token_ids == expected(prompt, 3)
        assert result.usage.cached_tokens > 0


async def test_weights_and_kept_requests_do_not_mix(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode, faults=Faults(delay=0.001)) as engine:
        memory = with_memory(engine)
        stream = engine.generate([3], params(60))
        await anext(stream)
        await engine.pause("keep")
        with pytest.raises(EngineStateError, match="old weights"):
            await engine.update_weights("other")
        assert memory.calls == []
        assert engine.health().paused
        await engine.resume()
        assert (await stream).token_ids == expected([3], 60)
        await engine.pause("wait")
        await engine.update_weights("other")
        assert engine.health().paused  # as it was found
        await engine.resume()


async def test_resetting_the_prefix_cache(loop_mode: str) -> None:
    prompt = list(range(64))
    async with scripted_engine(loop=loop_mode) as engine:
        await engine.generate(prompt, params(3))
        await engine.reset_prefix_cache()
        assert (await engine.generate(prompt, params(3))).usage.cached_tokens == 0


CALLS: list[Callable[[Engine], Any]] = [
    lambda engine: engine.pause(),
    lambda engine: engine.resume(),
    lambda engine: engine.sleep(),
    lambda engine: engine.wake(),
    lambda engine: engine.update_weights("other"),
    lambda engine: engine.reset_prefix_cache(),
    lambda engine: engine.stats(),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
async def test_before_the_start_and_after_the_end_calls_are_refused(
    number: int, loop_mode: str
) -> None:
    engine = scripted_engine(loop=loop_mode)
    with pytest.raises(EngineClosedError, match="not started"):
        await CALLS[number](engine)
    async with engine:
        pass
    with pytest.raises(EngineClosedError, match="closed"):
        await CALLS[number](engine)


async def test_impossible_calls_are_named() -> None:
    async with scripted_engine() as engine:
        with pytest.raises(ConfigError, match="gently"):
            await engine.pause("gently")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no weights"):
            await engine.update_weights("other")


async def test_a_closing_engine_says_so(loop_mode: str) -> None:
    engine = await scripted_engine(loop=loop_mode, faults=Faults(delay=0.002)).start()
    stream = engine.generate([1], params(50))
    await anext(stream)
    closing = asyncio.create_task(engine.aclose())
    await until(lambda: engine.health().state == "closing")
    with pytest.raises(EngineClosedError, match="closing"):
        engine.generate([2])
    await closing
    assert (await stream).token_ids == expected([1], 50)


@pytest.mark.slow
async def test_the_heartbeat_of_an_idle_engine_goes_on(loop_mode: str) -> None:
    async with scripted_engine(loop=loop_mode) as engine:
        beats = set()
        steps = engine._service._steps
        assert steps is not None
        with anyio.fail_after(20 * PULSE):
            while len(beats) < 4:
                beats.add(steps.heartbeat)
                await asyncio.sleep(PULSE / 10)
        age = engine.health().heartbeat_age
        assert age is not None


async def test_a_device_that_hangs_stops_the_heartbeat() -> None:
    device = FakeDevice()
    async with scripted_engine(loop="caller", device=lambda: device) as engine:
        stream = engine.generate([1], params(2))
        await until(lambda: len(device.pending) > 0)
        await asyncio.sleep(0.01)
        steps = engine._service._steps
        assert steps is not None
        beat = steps.heartbeat
        await asyncio.sleep(1.2 * PULSE)
        assert steps.heartbeat == beat
        with device.playing():
            await stream
