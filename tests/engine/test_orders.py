"""Overlap, leases and cancellation under completion orders chosen by hand, on the fake device."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import EngineDeadError, FinishReason, SamplingParams
from aengine.device import FakeDevice
from aengine.testing import arithmetic_script, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine import Engine

SCRIPT = arithmetic_script(256)


def engine_on(device: FakeDevice, **options: Any) -> Engine:
    options = {"loop": "caller", "block_size": 4, "max_num_seqs": 4} | options
    return scripted_engine(device=lambda: device, **options)


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110  # polled: it may be any state of the engine
            await asyncio.sleep(0)


async def settle_down() -> None:
    """Let everything that can run without the device run."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_the_next_forward_is_launched_before_the_last_tokens_are_here() -> None:
    """Law 2."""
    device = FakeDevice()
    async with engine_on(device) as engine:
        stream = engine.generate([1, 2, 3], params(4))
        await until(lambda: len(device.pending) == 2)
        await settle_down()
        assert len(device.pending) == 2  # bounded: max_steps_in_flight
        device.run(device.pending[0])
        assert (await anext(stream)).token_ids == (SCRIPT([1, 2, 3]),)
        with device.playing():
            assert len((await stream).token_ids) == 4


async def test_depth_one_waits_for_each_step() -> None:
    device = FakeDevice()
    async with engine_on(device, max_steps_in_flight=1) as engine:
        stream = engine.generate([1], params(3))
        await until(lambda: len(device.pending) == 1)
        await settle_down()
        assert len(device.pending) == 1
        with device.playing():
            await stream


async def test_arrivals_and_aborts_are_served_while_a_step_is_out() -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first = engine.generate([1], params(50))
        await until(lambda: len(device.pending) == 2)
        first.abort()
        second = engine.generate([2], params(2))
        device.run(device.pending[0])
        await until(lambda: len(device.pending) == 2)
        assert (await first).finish_reason is FinishReason.ABORT
        with device.playing():
            assert len((await second).token_ids) == 2


async def test_blocks_of_an_aborted_row_are_leased_until_its_steps_are_done() -> None:
    """Law 3; known-faults: mini-sglang 89, 102."""
    device = FakeDevice()
    async with engine_on(device, enable_prefix_cache=False) as engine:
        stream = engine.generate([1, 2, 3, 4, 5], params(50))
        await until(lambda: len(device.pending) == 2)
        stream.abort()
        scheduler = engine.parts.scheduler
        device.run(device.pending[0])
        await until(lambda: scheduler.num_running == 0)
        stats = scheduler.stats()
        assert stats.free_blocks < stats.total_blocks
        device.run(device.pending[0])
        await until(lambda: scheduler.stats().free_blocks == stats.total_blocks)


async def test_losing_the_device_names_itself_to_every_stream() -> None:
    device = FakeDevice()
    engine = await engine_on(device).start()
    streams = [engine.generate([i], params(5)) for i in range(3)]
    await until(lambda: len(device.pending) == 2)
    device.lose("power cut")
    for stream in streams:
        with pytest.raises(EngineDeadError, match="power cut"):
            await stream
    await engine.aclose()


@pytest.mark.parametrize("seed", range(6))
async def test_any_order_gives_the_same_tokens(seed: int) -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        with device.playing(seed=seed):
            prompts = [[seed, i] * (1 + i % 3) for i in range(9)]
            results = await asyncio.gather(*[engine.generate(p, params(12)) for p in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        tokens = list(prompt)
        for token in result.token_ids:
            assert token == SCRIPT(tokens)
            tokens.append(token)
    assert device.races() == []
