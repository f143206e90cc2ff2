"""Blocks of sequences that give way go to the host and back: nothing waits, nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import (
    EngineClosedError,
    EngineDeadError,
    FinishReason,
    RequestAbortedError,
    SamplingParams,
)
from aengine.device import FakeDevice
from aengine.policy.mux import PriorityStreams
from aengine.testing import arithmetic_script, scripted_engine
from aengine.testing.scripted import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine import Engine, Stream

SCRIPT = arithmetic_script(256)
BLOCK = 4
URGENT, PATIENT = list(range(1, 10)), list(range(20, 28))


def engine_on(device: FakeDevice | None, **options: Any) -> Engine:
    options = {
        "loop": "caller",
        "block_size": BLOCK,
        "max_num_seqs": 4,
        "num_blocks": 5,
        "enable_prefix_cache": False,
        "swap_space": 16 * BLOCK * TOKEN_BYTES,
        "swap_min_tokens": 1,
    } | options
    if device is not None:
        options["device"] = lambda: device
    return scripted_engine(**options)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def solo(prompt: list[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110  # polled: it may be any state of the engine
            await asyncio.sleep(0)


async def settle_down() -> None:
    """Let everything that can run without the device run."""
    for _ in range(30):
        await asyncio.sleep(0)


def copies(device: FakeDevice) -> list[Any]:
    """Copies of blocks that wait to be run."""
    return [op for op in device.pending if op.stream == "copy"]


async def run_steps(device: FakeDevice, engine: Engine, *, to_copy: bool) -> None:
    """Run everything but copies, until one is pending (`to_copy`), or until nothing is left."""
    with anyio.fail_after(5):
        while True:
            await settle_down()
            if to_copy and copies(device):
                return
            steps = [op for op in device.ready() if op.stream != "copy"]
            if steps:
                device.run(steps[0])
            elif not to_copy:
                return


async def empty(engine: Engine) -> None:
    """Every block, here and on the host, comes back."""
    scheduler = engine.parts.scheduler

    def is_empty() -> bool:
        stats = scheduler.stats()
        return (
            stats.free_blocks + stats.cached_blocks == stats.total_blocks
            and stats.host_free_blocks == stats.host_total_blocks
            and not stats.copies_in_flight
        )

    await until(is_empty)


async def crowded(engine: Engine) -> tuple[Stream, Stream]:
    """Two requests of which the second has to give way."""
    first = engine.generate(URGENT, params(8))
    second = engine.generate(PATIENT, params(8), priority=1)
    return first, second


async def test_it_comes_back_with_what_it_had() -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first, second = await crowded(engine)
        with device.playing():
            assert (await first).token_ids == solo(URGENT, 8)
            assert (await second).token_ids == solo(PATIENT, 8)
        stats = await engine.stats()
        assert stats.swapped_out == stats.swapped_in > 0
        launched = engine.parts.launcher.plans
        assert sum(plan.num_tokens for plan in launched) == len(URGENT) + len(PATIENT) + 2 * 7
        await empty(engine)


async def test_steps_go_on_while_a_copy_is_out() -> None:
    """The host awaits no copy: what has its blocks decodes on beside it."""
    device = FakeDevice()
    async with engine_on(device, num_blocks=6) as engine:
        third = engine.generate([40], params(4), priority=-1)
        first, second = await crowded(engine)
        await run_steps(device, engine, to_copy=True)
        await run_steps(device, engine, to_copy=False)
        assert (await third).token_ids == solo([40], 4)
        assert copies(device)
        with device.playing():
            assert (await first).token_ids == solo(URGENT, 8)
            assert (await second).token_ids == solo(PATIENT, 8)
        await empty(engine)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cache", [True, False])
async def test_any_order_gives_the_same_tokens(seed: int, cache: bool) -> None:
    device = FakeDevice()
    options = {"num_blocks": 9, "enable_prefix_cache": cache, "max_steps_in_flight": 1 + seed % 3}
    async with engine_on(device, **options) as engine:
        prompts = [[seed, i] * (2 + i % 4) for i in range(9)]
        with device.playing(seed=seed):
            asked = [engine.generate(p, params(12), priority=i % 2) for i, p in enumerate(prompts)]
            results = await asyncio.gather(*asked)
            stats = await engine.stats()
            await empty(engine)
    assert stats.swapped_in > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == solo(prompt, 12)


@pytest.mark.parametrize("nth", [0, 1], ids=["to the host", "back"])
async def test_a_copy_that_fails_costs_a_recompute(
    nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first, second = await crowded(engine)
        for number in range(nth + 1):
            await run_steps(device, engine, to_copy=True)
            (copy,) = copies(device)
            if number == nth:
                device.faults.raise_at = {copy.index: RuntimeError("no such luck")}
            device.run(copy)
        with caplog.at_level(logging.WARNING, "aengine"), device.playing():
            assert (await first).token_ids == solo(URGENT, 8)
            assert (await second).token_ids == solo(PATIENT, 8)
            await empty(engine)
        assert "no such luck" in caplog.text


@pytest.mark.parametrize("nth", [0, 1], ids=["to the host", "back"])
async def test_aborted_while_its_blocks_move(nth: int) -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first, second = await crowded(engine)
        await run_steps(device, engine, to_copy=True)
        if nth:
            device.run(copies(device)[0])
            await run_steps(device, engine, to_copy=True)
        second.abort()
        assert (await second).finish_reason is FinishReason.ABORT
        scheduler = engine.parts.scheduler
        stats = scheduler.stats()
        assert stats.swapped_blocks == 0
        assert stats.host_leased_blocks > 0
        assert stats.leased_blocks > 0
        with device.playing():
            assert (await first).token_ids == solo(URGENT, 8)
            await empty(engine)


async def test_aborted_while_its_blocks_are_away() -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first, second = await crowded(engine)
        await run_steps(device, engine, to_copy=True)
        device.run(copies(device)[0])
        await until(lambda: not engine.parts.scheduler.stats().copies_in_flight)
        assert engine.parts.scheduler.stats().swapped_blocks > 0
        second.abort()
        await second
        assert engine.parts.scheduler.stats().swapped_blocks == 0
        with device.playing():
            await first
            await empty(engine)


async def test_its_deadline_passes_while_its_blocks_are_away() -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first = engine.generate(URGENT, params(8))
        second = engine.generate(PATIENT, params(8), priority=1, deadline=3600)
        await run_steps(device, engine, to_copy=True)
        device.run(copies(device)[0])
        scheduler = engine.parts.scheduler
        await until(lambda: not scheduler.stats().copies_in_flight)
        assert scheduler.stats().swapped_blocks > 0
        scheduler._deadlines.add(2, 0.0)  # an hour has passed
        await engine.stats()
        result = await second
        assert result.finish_reason is FinishReason.DEADLINE
        assert 0 < len(result.token_ids) < 8
        assert result.token_ids == solo(PATIENT, len(result.token_ids))
        assert scheduler.stats().swapped_blocks == 0
        with device.playing():
            await first
            await empty(engine)


@pytest.mark.parametrize("drain", [True, False])
async def test_the_engine_closes_while_blocks_move(drain: bool) -> None:
    device = FakeDevice()
    engine = await engine_on(device).start()
    first, second = await crowded(engine)
    await run_steps(device, engine, to_copy=True)
    with device.playing():
        await engine.aclose(drain=drain)
        for stream, prompt in ((first, URGENT), (second, PATIENT)):
            if drain:
                assert (await stream).token_ids == solo(prompt, 8)
            else:
                with pytest.raises((RequestAbortedError, EngineClosedError)):
                    await stream


async def test_the_engine_closes_although_a_copy_never_ends() -> None:
    device = FakeDevice()
    engine = await engine_on(device).start()
    streams = await crowded(engine)
    await run_steps(device, engine, to_copy=True)
    device.faults.drop = frozenset({copies(device)[0].index})
    device.run(copies(device)[0])
    with device.playing(), anyio.fail_after(5):
        await engine.aclose(drain=False)
        for stream in streams:
            with pytest.raises((RequestAbortedError, EngineClosedError)):
                await stream


async def test_the_device_is_lost_while_blocks_move() -> None:
    device = FakeDevice()
    engine = await engine_on(device).start()
    streams = await crowded(engine)
    await run_steps(device, engine, to_copy=True)
    device.lose("power cut")
    for stream in streams:
        with pytest.raises(EngineDeadError, match="power cut"):
            await stream
    await engine.aclose()


async def test_paused_means_that_no_copy_is_out() -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        streams = await crowded(engine)
        await run_steps(device, engine, to_copy=True)
        pausing = asyncio.ensure_future(engine.pause("keep"))
        await run_steps(device, engine, to_copy=False)
        assert not pausing.done()
        assert copies(device)
        with device.playing():
            await pausing
            assert not engine.parts.scheduler.stats().copies_in_flight
            await engine.resume()
            assert (await streams[1]).token_ids == solo(PATIENT, 8)
            await streams[0]


async def test_beside_lanes() -> None:
    """Prefill and decode on lanes of their own, blocks moving beside both."""
    options = {
        "num_blocks": 9,
        "mux": PriorityStreams(),
        "cpu_threads": 2,
        "enable_prefix_cache": True,
    }
    async with engine_on(None, **options) as engine:
        prompts = [[7, i] * (2 + i % 4) for i in range(12)]
        results = await asyncio.gather(*[engine.generate(p, params(12)) for p in prompts])
        stats = await engine.stats()
        await empty(engine)
    assert stats.swapped_in > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == solo(prompt, 12)


async def test_statistics_tell() -> None:
    async with engine_on(None) as engine:
        first, second = await crowded(engine)
        await asyncio.gather(first, second)
        stats = await engine.stats()
    assert stats.swap_blocks_total == 16
    assert stats.swap_blocks_in_use == 0
    assert stats.swapped_out > 0


async def test_without_swap_space_there_is_no_copy_stream() -> None:
    device = FakeDevice()
    async with engine_on(device, swap_space=0) as engine:
        streams = await crowded(engine)
        with device.playing():
            await asyncio.gather(*streams)
        stats = await engine.stats()
        assert stats.preemptions > 0
        assert stats.swapped_out == stats.swap_blocks_total == 0
        assert device.stream("copy").name == "copy", "the engine took that name"
