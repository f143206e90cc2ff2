"""Every way to leave a request, in every phase it can be in: all is free before the next step.

The device is driven by hand, so that each phase is a fact and not a matter of luck: nothing is
computed unless the test says so.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import SamplingParams, StructuredOutput
from aengine.device.fake import FakeDevice
from aengine.grammar.compiler import GrammarCompiler
from aengine.policy.mux import PriorityStreams
from aengine.testing import scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aengine.engine.front import Engine
    from aengine.engine.stream import Stream
    from aengine.outputs import EngineStats
    from aengine.testing import ScriptedLauncher

LONG = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
PHASES = (
    "tokenizing",
    "queued",
    "compiling",
    "chunked prefill",
    "split prefill",
    "decoding",
    "constrained",
    "unread",
    "n=4",
)
READABLE = ("decoding", "constrained", "unread", "n=4")
WAYS = ("abort", "aclose", "break", "timeout", "anyio", "double cancel", "dropped", "loop closed")


@dataclass
class Bench:
    """An engine, the device below it, and what holds a phase in place."""

    engine: Engine
    device: FakeDevice
    gate: threading.Event = field(default_factory=threading.Event)
    others: list[Stream] = field(default_factory=list)

    async def until(self, reached: Callable[[EngineStats], bool], *, steps: bool = True) -> None:
        """Run the device, one operation at a time, until the engine says so."""
        for _ in range(2000):
            if reached(await self.engine.stats()):
                return
            if steps and (ready := self.device.ready()):
                self.device.run(ready[0])
            await asyncio.sleep(0.0005)
        raise AssertionError(f"never reached: {await self.engine.stats()}")

    @property
    def launcher(self) -> ScriptedLauncher:
        launcher: Any = self.engine.parts.launcher
        return launcher


def options(phase: str) -> dict[str, Any]:
    found = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 4}
    found |= {"enable_prefix_cache": False}
    if phase == "split prefill":
        found["mux"] = PriorityStreams()
    return found


def request(phase: str) -> tuple[Any, SamplingParams]:
    """A prompt and parameters that come into the phase."""
    params = LONG
    if phase == "n=4":
        params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, n=4)
    if phase in ("compiling", "constrained"):
        structured = StructuredOutput.regex("[ab]{200}")
        params = SamplingParams(max_tokens=300, temperature=0, structured=structured)
    prompt: Any = list(range(100)) if "prefill" in phase else [1, 2, 3]
    return ("words" if phase == "tokenizing" else prompt), params


async def come_into(bench: Bench, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to be so before the request is made."""
    if phase == "tokenizing":
        codec: Any = bench.engine.parts.codec
        encode = codec.encode

        def wait(text: str, **how: Any) -> list[int]:
            assert bench.gate.wait(20)
            return list(encode(text, **how))

        monkeypatch.setattr(codec, "encode", wait)
    elif phase == "compiling":
        compiled = GrammarCompiler.compile_source

        def wait_too(self: GrammarCompiler, source: Any) -> Any:
            assert bench.gate.wait(20)
            return compiled(self, source)

        monkeypatch.setattr(GrammarCompiler, "compile_source", wait_too)
    elif phase == "queued":
        bench.others = [bench.engine.generate([9, n], LONG) for n in range(4)]
        await bench.until(lambda stats: stats.running == 4 and stats.generation_tokens > 4)


async def arrive(bench: Bench, stream: Stream, phase: str) -> None:
    """Wait until the request is in its phase."""
    if phase in ("tokenizing", "compiling", "queued"):
        await bench.until(lambda stats: stats.waiting == 1, steps=False)
        if phase != "queued":
            await asyncio.sleep(0.005)
    elif "prefill" in phase:
        await bench.until(lambda stats: stats.steps >= 2 and stats.kv_blocks_in_use > 2)
        assert (await bench.engine.stats()).generation_tokens == 0
    else:
        tokens = 8 if phase == "n=4" else 2
        await bench.until(lambda stats: stats.generation_tokens >= tokens)
        if phase != "unread":
            await anext(stream)


async def leave(stream: Stream, way: str) -> None:
    if way == "abort":
        stream.abort()
        stream.abort()
    elif way == "aclose":
        await stream.aclose()
    elif way == "break":
        async for _ in stream:
            break
    elif way == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream
    elif way == "anyio":
        with anyio.move_on_after(0.01) as scope:
            await stream
        assert scope.cancelled_caught
    elif way == "double cancel":

        async def read() -> None:
            await stream

        task = asyncio.create_task(read())
        await asyncio.sleep(0.001)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def all_free(bench: Bench, phase: str, *, at_once: bool) -> None:
    """No live request, no block, no task; and no step computes what was left."""
    others = len(bench.others)
    if at_once:
        stats = await bench.engine.stats()
        assert (stats.running, stats.waiting) == (others, 0)
    else:
        await bench.until(lambda stats: (stats.running, stats.waiting) == (others, 0))
    left = {seq_id for plan in bench.launcher.plans for seq_id in plan.seq_ids}
    launched = len(bench.launcher.plans) + len(bench.device.pending)
    for other in bench.others:
        other.abort()
    bench.gate.set()
    await bench.until(lambda stats: stats.steps_in_flight == stats.kv_blocks_leased == 0)
    stats = await bench.engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0)
    for plan in bench.launcher.plans[launched:]:
        assert left.isdisjoint(plan.seq_ids)
    core = bench.engine._service._core
    assert core is not None
    assert (core._live, core._by_channel, core._preparing) == ({}, {}, {})
    delayed = bench.engine._service._delayed
    assert delayed is not None
    assert not delayed._matchers


async def serves_on(bench: Bench) -> None:
    answer = asyncio.ensure_future(
        _answer(bench.engine.generate([5], SamplingParams(max_tokens=3)))
    )
    await bench.until(lambda stats: answer.done())
    assert (await answer).usage.completion_tokens == 3


async def _answer(stream: Stream) -> Any:
    return await stream


def name_of(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


def what_runs() -> set[str]:
    """The tasks of this loop, but for the engine's waits of a moment."""
    names = {name_of(task) for task in asyncio.all_tasks()}
    return names - {"Inbox.wait", "_reached"}


async def filling_ends() -> None:
    """On a busy machine a mask can be late: its thread is not stoppable, and waited for."""
    late = [task for task in asyncio.all_tasks() if name_of(task) == "DelayedSampling._rejoin"]
    if late:
        await asyncio.wait(late)


def in_another_loop(bench: Bench, phase: str) -> Callable[[], None]:
    """Make the request in a loop of another thread; returns what closes that loop under it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def ask() -> Stream:
        return bench.engine.generate(*request(phase))

    held = [asyncio.run_coroutine_threadsafe(ask(), loop).result(10)]

    def close() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        del held[:]

    return close


@pytest.mark.parametrize("loop_mode", ["own", "caller"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", WAYS)
async def test_leaving_frees_everything(
    way: str, phase: str, loop_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """known-faults: V PR 7111, TensorRT-LLM 6298."""
    if way == "break" and phase not in READABLE:
        pytest.skip("nothing comes in this phase that one could break at")
    device = FakeDevice()
    made: Any = scripted_engine(device=lambda: device, loop=loop_mode, **options(phase))
    engine = await made.start()
    bench = Bench(engine, device)
    try:
        tasks = what_runs()
        await come_into(bench, phase, monkeypatch)
        if way == "loop closed":
            close = in_another_loop(bench, phase)
            if phase in READABLE:
                await bench.until(lambda stats: stats.generation_tokens >= 8)
            else:
                await bench.until(lambda stats: stats.running + stats.waiting > 0, steps=False)
            close()
        else:
            stream: Stream | None = engine.generate(*request(phase))
            assert stream is not None
            await arrive(bench, stream, phase)
            if way == "break" and phase != "unread":
                generated = (await engine.stats()).generation_tokens
                await bench.until(lambda stats: stats.generation_tokens > generated + 4)
            await leave(stream, way)
            if way == "break":
                stream = None
        if way == "dropped":
            stream = None
            gc.collect()
        await all_free(bench, phase, at_once=True)
        await serves_on(bench)
        await filling_ends()
        assert what_runs() == tasks
    finally:
        bench.gate.set()
        closing: Coroutine[Any, Any, None] = engine.aclose(drain=False)
        with device.playing():
            await closing
