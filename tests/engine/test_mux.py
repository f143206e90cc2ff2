"""Prefill and decode as two loops: the tokens of one loop, in any order of completions."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from aengine import (
    EngineDeadError,
    EngineStats,
    FinishReason,
    SamplingParams,
    StructuredOutput,
)
from aengine.batch import LaneKind, SmPartition
from aengine.device import FakeDevice, Trace
from aengine.errors import ConfigError
from aengine.policy.mux import ChunkedOnly, Exclusive, MuxLoad, PriorityStreams
from aengine.policy.mux_slo import SloFeedback
from aengine.policy.mux_threshold import Threshold
from aengine.testing import Faults, arithmetic_script, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine import Engine
    from aengine.device.fake import FakeOp

SCRIPT = arithmetic_script(256)


class Restless:
    """Another partition at each call, all of the device's in turn."""

    def __init__(self) -> None:
        self.calls = 0

    def select(self, load: MuxLoad) -> SmPartition:
        self.calls += 1
        return load.lanes.all[self.calls % len(load.lanes.all)]


class Dice:
    """Any partition, by a throw of the dice."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def select(self, load: MuxLoad) -> SmPartition:
        return self.rng.choice(load.lanes.all)


class Always:
    """The smallest split."""

    def select(self, load: MuxLoad) -> SmPartition:
        return load.lanes.green[0]


POLICIES: dict[str, Callable[[], Any]] = {
    "priority": PriorityStreams,
    "threshold": Threshold,
    "slo": lambda: SloFeedback(1e-4),
    "restless": Restless,
    "dice": Dice,
    "always": Always,
}


def engine_on(device: FakeDevice, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "loop": "caller",
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "cpu_threads": 8,
        "mux": Always(),
    }
    return scripted_engine(device=lambda: device, **settings | options)


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def check(prompt: list[int], tokens: tuple[int, ...]) -> None:
    sequence = list(prompt)
    for token in tokens:
        assert token == SCRIPT(sequence)
        sequence.append(token)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110  # polled: it may be any state of the engine
            await asyncio.sleep(0)


async def settle_down() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def work(device: FakeDevice, lane: str) -> list[FakeOp]:
    """Steps launched on a kind of lane."""
    ops = device.pending
    return [op for op in ops if op.stream.startswith(lane) and op.name not in ("wait", "record")]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
async def test_any_order_gives_the_tokens_of_one_loop(policy: str, seed: int) -> None:
    device = FakeDevice()
    async with engine_on(device, mux=POLICIES[policy]()) as engine:
        with device.playing(seed=seed):
            prompts = [[seed, i] * (1 + 5 * i % 17) for i in range(12)]
            results = await asyncio.gather(*[engine.generate(p, params(9)) for p in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 9
        check(prompt, result.token_ids)


async def start_two(device: FakeDevice, engine: Engine) -> tuple[Any, Any]:
    """One stream that decodes, one whose first chunk is on the prefill lane."""
    first = engine.generate([1, 2, 3], params(50))
    await until(lambda: bool(work(device, "prefill")))
    device.run_all()
    await until(lambda: len(work(device, "decode")) == 2)
    second = engine.generate([9] * 40, params(4))
    await until(lambda: bool(work(device, "prefill")))
    return first, second


async def test_decode_goes_on_while_a_prefill_is_out() -> None:
    device = FakeDevice()
    async with engine_on(device) as engine:
        first, second = await start_two(device, engine)
        for _ in range(5):
            await until(lambda: len(work(device, "decode")) == 2)
            step = work(device, "decode")[0]
            while step in device.pending:  # an edge may be before it
                device.run(next(op for op in device.ready() if op.stream == step.stream))
        await settle_down()
        assert len(work(device, "prefill")) == 1
        tokens: tuple[int, ...] = ()
        while len(tokens) < 6:
            tokens += (await anext(first)).token_ids
        check([1, 2, 3], tokens)
        with device.playing():
            check([9] * 40, (await second).token_ids)
            await first


async def test_decode_has_an_edge_behind_the_prefill_that_joins_it() -> None:
    """known-faults: S#29958."""
    device = FakeDevice()
    async with engine_on(device) as engine:
        stream = engine.generate([1, 2, 3], params(3))
        await until(lambda: bool(work(device, "prefill")))
        (prefill,) = work(device, "prefill")
        device.run(prefill)
        assert (await anext(stream)).token_ids == (SCRIPT([1, 2, 3]),)  # at once
        await until(lambda: bool(work(device, "decode")))
        (step,) = work(device, "decode")[:1]
        before = [op for op in device.pending if op.stream == step.stream and op.index < step.index]
        edges = [op.after for op in before if op.name == "wait"]
        assert (prefill.completion,) in edges
        with device.playing():
            check([1, 2, 3], (await stream).token_ids)


async def test_a_step_on_a_new_lane_starts_after_the_last_on_the_old() -> None:
    device = FakeDevice()
    async with engine_on(device, mux=Restless()) as engine:
        stream = engine.generate([1, 2, 3], params(12))
        await until(lambda: bool(work(device, "prefill")))
        device.run_all()
        await until(lambda: len(work(device, "decode") + work(device, "forward")) == 2)
        older, newer = sorted(
            work(device, "decode") + work(device, "forward"), key=lambda op: op.index
        )
        assert older.stream != newer.stream
        ready = device.ready()
        assert newer not in ready
        with device.playing(seed=5):
            check([1, 2, 3], (await stream).token_ids)


def finish(device: FakeDevice, op: FakeOp) -> None:
    """Run what stands before `op` on its stream, and itself."""
    while op in device.pending:
        device.run(next(each for each in device.ready() if each.stream == op.stream))


class Contended:
    """A split while there is work for both lanes."""

    def select(self, load: MuxLoad) -> SmPartition:
        return load.lanes.green[0] if load.contended else load.lanes.plain


async def test_a_prefill_that_comes_back_to_its_lane_starts_after_decode_on_the_whole_device() -> (
    None
):
    device = FakeDevice()
    async with engine_on(device, mux=Contended(), enable_prefix_cache=False) as engine:
        first = engine.generate([1, 2, 3], params(60))
        await until(lambda: bool(work(device, "prefill")))
        device.run_all()
        for _ in range(2):
            await until(lambda: len(work(device, "forward")) == 2)
            on_whole = work(device, "forward")
            prompt = engine.generate([9] * 12, params(1))
            await until(lambda: bool(work(device, "prefill-")))
            (prefill,) = work(device, "prefill-")
            assert prefill not in device.ready(), "decode has the whole device"
            for step in on_whole:
                lane = [op for op in device.ready() if op.stream == prefill.stream]
                assert prefill not in lane
                finish(device, step)
            finish(device, prefill)
            await prompt
            while work(device, "decode-"):  # what is left of the split
                finish(device, work(device, "decode-")[0])
                await settle_down()
        with device.playing():
            first.abort()
            await first


async def test_the_partition_is_not_changed_beside_a_running_prefill() -> None:
    device = FakeDevice()
    async with engine_on(device, mux=Dice()) as engine:
        streams = [engine.generate([i] * 3, params(30)) for i in range(2)]
        await until(lambda: bool(work(device, "prefill")))
        device.run_all()
        await until(lambda: bool(work(device, "decode") + work(device, "forward")))
        late = engine.generate([5] * 30, params(2))
        await until(lambda: bool(work(device, "prefill")))
        launcher: Any = engine.parts.launcher
        seen = len(launcher.plans)
        with anyio.fail_after(5):
            while len(launcher.plans) < seen + 10:
                for op in device.ready():
                    if not op.stream.startswith("prefill"):
                        device.run(op)
                await settle_down()
        # Two may have been launched before the prefill.
        assert len({plan.partition for plan in launcher.plans[seen + 2 :]}) == 1
        with device.playing():
            for stream in [*streams, late]:
                await stream


@pytest.mark.parametrize("way", ["abort", "deadline", "label"])
async def test_a_prefill_can_be_ended_between_its_chunks(way: str) -> None:
    device = FakeDevice()
    async with engine_on(device, enable_prefix_cache=False) as engine:
        first, _ = await start_two(device, engine)
        deadline = 0.05 if way == "deadline" else None
        doomed = engine.generate([8] * 60, params(4), request_id="doomed", deadline=deadline)
        await settle_down()
        if way == "abort":
            doomed.abort()
        elif way == "label":
            engine.abort("doomed")
        else:
            await asyncio.sleep(0.06)
        with device.playing():
            if way == "deadline":
                with pytest.raises(Exception, match="deadline"):
                    await doomed
            else:
                assert (await doomed).finish_reason is FinishReason.ABORT
            first.abort()
            await first
            scheduler = engine.parts.scheduler
            await until(lambda: not scheduler.has_work)
        stats = scheduler.stats()
        assert stats.free_blocks == stats.total_blocks


async def test_closing_with_a_prefill_out_frees_everything() -> None:
    device = FakeDevice()
    engine = await engine_on(device).start()
    await start_two(device, engine)
    closing = asyncio.ensure_future(engine.aclose(drain=False))
    with device.playing():
        with anyio.fail_after(5):
            await closing
    assert engine.health().state == "closed"


async def test_a_lost_device_ends_both_lanes() -> None:
    device = FakeDevice()
    engine = await engine_on(device).start()
    streams = await start_two(device, engine)
    device.lose("power cut")
    for stream in streams:
        with pytest.raises(EngineDeadError, match="power cut"):
            await stream
    await engine.aclose()


async def test_one_steps_fault_ends_its_rows_and_not_the_lanes() -> None:
    faults = Faults(raise_at={0: RuntimeError("a step broke")})
    async with scripted_engine(faults=faults, mux=Always(), cpu_threads=4) as engine:
        with pytest.raises(Exception, match="a step broke"):
            await engine.generate([1, 2], params(3))
        check([3], (await engine.generate([3], params(5))).token_ids)


class Broken:
    """A caller's policy that raises."""

    def select(self, load: MuxLoad) -> SmPartition:
        raise RuntimeError("no idea")


class Nonsense:
    """A caller's policy that returns what no device has."""

    def select(self, load: MuxLoad) -> Any:
        return SmPartition(kind=LaneKind.GREEN, prefill=1000, decode=-3)


@pytest.mark.parametrize("policy", [Broken, Nonsense])
async def test_a_policy_that_fails_is_no_split_and_said_once(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="aengine"):
        async with scripted_engine(mux=policy(), cpu_threads=4, loop="caller") as engine:
            prompts = [[i] * 20 for i in range(5)]
            results = await asyncio.gather(*[engine.generate(p, params(6)) for p in prompts])
            stats = await engine.stats()
    for prompt, result in zip(prompts, results, strict=True):
        check(prompt, result.token_ids)
    assert [r.message for r in caplog.records if "mux policy" in r.message] == [
        r.message for r in caplog.records[:1]
    ]
    assert stats.mux["faults"] > 1
    assert set(stats.mux["share"]) == {"plain 4+4"}


@pytest.mark.parametrize("policy", [object(), "slo", Always])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="select"):
        scripted_engine(mux=policy)


@pytest.mark.parametrize("policy", [None, Exclusive(), ChunkedOnly()])
async def test_taking_turns_is_the_one_loop(policy: Any) -> None:
    async with scripted_engine(mux=policy, loop="caller") as engine:
        await engine.generate([1], params(3))
        assert engine.parts.lanes is None
        assert (await engine.stats()).mux == EngineStats().mux


@pytest.mark.parametrize("policy", POLICIES)
async def test_grammar_rows_beside_free_rows(policy: str) -> None:
    options = {
        "mux": POLICIES[policy](),
        "cpu_threads": 4,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    }
    rule = StructuredOutput.regex("[a-c]{6}z")
    async with scripted_engine(loop="caller", **options) as engine:
        asked = []
        for i in range(6):
            structured = rule if i % 2 else None
            asked.append(engine.generate([40 + i] * (3 + 9 * i), params(7, structured=structured)))
        results = await asyncio.gather(*asked)
    for i, result in enumerate(results):
        if i % 2:
            assert len(result.text) == 7
            assert set(result.text[:6]) <= set("abc")
            assert result.text.endswith("z")
        else:
            check([40 + i] * (3 + 9 * i), result.token_ids)


@pytest.mark.parametrize("policy", POLICIES)
async def test_preemption_and_a_shared_prefix(policy: str) -> None:
    options = {"mux": POLICIES[policy](), "cpu_threads": 4, "block_size": 4, "max_num_seqs": 8}
    async with scripted_engine(num_blocks=40, loop="caller", **options) as engine:
        prompts = [[7] * 16 + [i] for i in range(8)]
        results = await asyncio.gather(*[engine.generate(p, params(24)) for p in prompts])
        stats = await engine.stats()
    for prompt, result in zip(prompts, results, strict=True):
        check(prompt, result.token_ids)
    assert stats.preemptions > 0
    assert stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm(seed: int) -> None:
    """Arrivals, aborts, deadlines, preemption, switches of lanes: tokens and blocks are right."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    async with scripted_engine(
        mux=Restless(), num_blocks=48, cpu_threads=6, loop="caller", **options
    ) as engine:

        async def one(i: int) -> None:
            await asyncio.sleep(rng.random() * 0.05)
            prompt = [rng.randrange(4)] * rng.randrange(1, 60)
            stream = engine.generate(prompt, params(rng.randrange(1, 30)))
            if i % 4 == 0:
                await asyncio.sleep(rng.random() * 0.02)
                stream.abort()
            result = await stream
            check(prompt, result.token_ids)

        with anyio.fail_after(20):
            await asyncio.gather(*[one(i) for i in range(60)])
            scheduler = engine.parts.scheduler
            await until(lambda: not scheduler.has_work)
        stats = scheduler.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


async def test_stats_and_trace_tell_the_partitions() -> None:
    device = FakeDevice()
    async with engine_on(device, mux=Threshold()) as engine:
        trace = engine.parts.trace = Trace()
        with device.playing():
            asked = [engine.generate([i] * 30, params(20)) for i in range(6)]
            await asyncio.gather(*asked)
        mux = (await engine.stats()).mux
    assert sum(mux["share"].values()) == pytest.approx(1)
    assert mux["switches"] > 0
    assert "green 6+2" in mux["share"] or "green 4+4" in mux["share"]
    assert set(mux["decode_step"]) <= set(mux["share"])
    assert all(seconds > 0 for seconds in mux["decode_step"].values())
    steps = [event for event in trace.events() if event.get("cat", "").startswith("lane ")]
    assert {event["cat"] for event in steps} == {"lane prefill", "lane decode"}
    assert {event["args"]["partition"] for event in steps} <= set(mux["share"])


async def test_chunked_only_bounds_the_prompt_tokens_beside_decode() -> None:
    device = FakeDevice()
    async with engine_on(device, mux=ChunkedOnly(5)) as engine:
        first = engine.generate([1, 2], params(12))
        with device.playing():
            await anext(first)
            check([9] * 30, (await engine.generate([9] * 30, params(2))).token_ids)
            await first
        launcher: Any = engine.parts.launcher
        mixed = [p for p in launcher.plans if p.num_decode and len(p.prefill_token_ids)]
    assert mixed
    assert max(len(plan.prefill_token_ids) for plan in mixed) == 5
