"""Faults reported against engines that overlap their steps, one test a report. See the names.

S# is sgl-project/sglang, V# vllm-project/vllm. `docs/design/known-faults.md` says where the reports
are tested that have their test elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from aengine import FinishReason, SamplingParams, StructuredOutput
from aengine.device import FakeDevice
from aengine.policy.mux import PriorityStreams
from aengine.policy.mux_threshold import Threshold
from aengine.testing import Replies, arithmetic_script, scripted_engine
from aengine.testing.scripted import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from aengine import Engine
    from aengine.batch import BlockCopy, StepPlan
    from aengine.testing.scripted import ScriptedLauncher

SCRIPT = arithmetic_script(256)
WORD = StructuredOutput.regex("[a-z]{20}")
FAMILY = "👩‍👩‍👧‍👦 a family"
TEXTS = [FAMILY, "漢字かな交じり文", "ภาษาไทยไม่เว้นวรรค", "e\u0301tude", "🇩🇪🇫🇷 𝔘𝔫𝔦"]


@contextlib.asynccontextmanager
async def engine_on(
    device: FakeDevice, script: Any = None, **options: Any
) -> AsyncIterator[Engine]:
    """An engine whose device is played by hand inside the block, and by itself at the end."""
    settings: dict[str, Any] = {
        "loop": "caller",
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    engine = await scripted_engine(script, device=lambda: device, **(settings | options)).start()
    try:
        yield engine
    finally:
        with device.playing():
            await engine.aclose(drain=False)


def params(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0} | options)


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(SCRIPT(tokens))
    return tuple(tokens[len(prompt) :])


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110  # polled: it may be any state of the engine
            await asyncio.sleep(0)


async def storm(engine: Engine, device: FakeDevice, seed: int) -> None:
    """Requests that share beginnings, are constrained, preempted and dropped, in a random order."""
    with device.playing(seed=seed):
        stem = [9, 8, 7, 6, 5, 4, 3, 2]
        prompts = [stem[: 3 + i % 6] + [i] * (i % 3) for i in range(10)]
        free = [engine.generate(prompt, params(20)) for prompt in prompts]
        bound = [engine.generate(prompt, params(40, structured=WORD)) for prompt in prompts[:4]]
        dropped = [engine.generate(prompt, params(60)) for prompt in prompts[:4]]
        for stream in dropped:
            await anext(stream)
            stream.abort()
        results = await asyncio.gather(*free)
        assert [r.token_ids for r in results] == [expected(p, 20) for p in prompts]
        assert [len((await stream).text) for stream in bound] == [20] * 4
        for stream in dropped:
            assert (await stream).finish_reason is FinishReason.ABORT


class Watched:
    """Tells the fake device what each step reads and writes, when the device runs it."""

    def __init__(self, engine: Engine, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        launcher: Any = engine.parts.launcher
        self.launcher: ScriptedLauncher = launcher
        self.device = device
        self.size = engine.config.scheduler.tokens_per_block
        self.buffers: dict[str, Any] = {}
        self._begin, self._finish = launcher.begin, launcher.finish
        monkeypatch.setattr(launcher, "begin", self.begin)
        monkeypatch.setattr(launcher, "finish", self.finish)
        self._copy_blocks = launcher.copy_blocks
        monkeypatch.setattr(launcher, "copy_blocks", self.copy_blocks)

    def buffer(self, kind: str, number: int) -> Any:
        name = f"{kind} {number}"
        if name not in self.buffers:
            self.buffers[name] = self.device.buffer(name, 0)
        return self.buffers[name]

    def begin(self, plan: StepPlan) -> Any:
        for row in range(plan.num_rows):
            start, stop = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            table = plan.block_tables[row].tolist()
            written = range(start // self.size, (stop - 1) // self.size + 1)
            for index in range(-(-stop // self.size)):
                block = self.buffer("block", table[index])
                block.write(plan.step_id) if index in written else block.read()
            if row < plan.num_decode:
                self.buffer("future", int(plan.slots[row])).read()
        self._sampled(plan, set(np.flatnonzero(plan.samples).tolist()) - set(plan.constrained))
        return self._begin(plan)

    def copy_blocks(self, copy: BlockCopy) -> None:
        for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
            here, there = self.buffer("block", device), self.buffer("host block", host)
            source, target = (here, there) if copy.to_host else (there, here)
            source.read()
            target.write(copy.copy_id)
        self._copy_blocks(copy)

    def finish(self, begun: Any, rows: Any, masks: Any) -> Any:
        self._sampled(begun.plan, set(rows))
        return self._finish(begun, rows, masks)

    def _sampled(self, plan: StepPlan, rows: set[int]) -> None:
        for row in rows:
            self.buffer("future", int(plan.slots[row])).write(plan.step_id)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mux", [None, PriorityStreams, Threshold], ids=["turns", "prio", "green"])
async def test_s26380_nothing_is_read_while_it_is_written(
    mux: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV blocks and the FutureMap: every access is ordered after the one that it depends on."""
    device = FakeDevice()
    options = {"mux": mux() if mux else None, "num_blocks": 40, "max_steps_in_flight": 3}
    async with engine_on(device, **options) as engine:
        watched = Watched(engine, device, monkeypatch)
        await storm(engine, device, seed)
    assert len(watched.buffers) > 20
    assert device.races() == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mux", [None, PriorityStreams], ids=["turns", "lanes"])
@pytest.mark.parametrize("cache", [True, False])
async def test_s26380_blocks_that_move_to_the_host_and_back_are_ordered_too(
    cache: bool, mux: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run on a stream of their own, in any order that the edges leave them."""
    device = FakeDevice()
    swap = {"swap_space": 60 * 4 * TOKEN_BYTES, "swap_min_tokens": 1}
    options = {"mux": mux() if mux else None, "num_blocks": 18, "max_steps_in_flight": 3}
    async with engine_on(device, enable_prefix_cache=cache, **options, **swap) as engine:
        watched = Watched(engine, device, monkeypatch)
        await storm(engine, device, seed)
        stats = await engine.stats()
    assert stats.swapped_in > 0
    assert any(name.startswith("host") for name in watched.buffers)
    assert device.races() == []


@pytest.mark.parametrize("seed", range(3))
async def test_mini_sglang_67_v25279_v31841_what_a_step_was_given_stays_as_it_was(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans and masks: the device may run a step long after the host has gone on."""
    device = FakeDevice()
    async with engine_on(device, max_steps_in_flight=3, num_blocks=60) as engine:
        scheduler: Any = engine.parts.scheduler
        launcher: Any = engine.parts.launcher
        schedule, begin, finish = scheduler.schedule, launcher.begin, launcher.finish
        arrays = ("slots", "starts", "lengths", "prefill_token_ids", "block_tables", "num_blocks")
        then: dict[int, list[Any]] = {}
        steps = masked = 0

        def planned(*args: Any, **options: Any) -> Any:
            plan = schedule(*args, **options)
            if plan is not None:
                then[plan.step_id] = [getattr(plan, name).copy() for name in arrays]
            return plan

        def begun(plan: StepPlan) -> Any:
            nonlocal steps
            steps += 1
            for name, copy in zip(arrays, then.pop(plan.step_id), strict=True):
                np.testing.assert_array_equal(getattr(plan, name), copy)
            return begin(plan)

        forward: Any = engine.parts.forward_stream
        launch = forward.launch

        def launched(function: Any, *args: Any) -> Any:
            if function is not finish:
                return launch(function, *args)
            copy = args[2].copy()

            def later(begun: Any, rows: Any, masks: Any) -> Any:
                nonlocal masked
                masked += len(masks)
                np.testing.assert_array_equal(masks, copy)
                return finish(begun, rows, masks)

            return launch(later, *args)

        monkeypatch.setattr(scheduler, "schedule", planned)
        monkeypatch.setattr(launcher, "begin", begun)
        monkeypatch.setattr(launcher, "finish", finish)
        monkeypatch.setattr(forward, "launch", launched)
        await storm(engine, device, seed)
    assert steps > 30
    assert masked > 30


async def test_s10514_s11856_a_first_token_waits_for_no_later_step() -> None:
    """It is told when its own step is done, with other sequences decoding and steps in flight."""
    device = FakeDevice()
    async with engine_on(device, max_steps_in_flight=2) as engine:
        busy = engine.generate([1], params(200))
        await until(lambda: len(device.pending) == 2)
        device.run(device.pending[0])
        assert len((await anext(busy)).token_ids) == 1
        late = engine.generate([2, 3], params(5))
        told = asyncio.ensure_future(anext(late))
        for _ in range(30):  # it is prepared beside the step that is out
            await asyncio.sleep(0)
        launcher: Any = engine.parts.launcher
        ran = 0
        while not any(len(plan.prefill_token_ids) == 2 for plan in launcher.plans):
            await until(lambda: len(device.pending) == 2)
            device.run(device.pending[0])
            ran += 1
            assert ran <= 3, "it waits for more than the steps that were in flight"
        await until(told.done)
        assert told.result().token_ids == expected([2, 3], 1)
        with device.playing():
            assert (await late).token_ids == expected([2, 3], 5)
            busy.abort()


@pytest.mark.parametrize("text", TEXTS)
async def test_llama_cpp_python_pr_118_exo_pr_1691_half_a_character_is_never_streamed(
    text: str,
) -> None:
    """A byte a token, and every length: the deltas joined are the decoded tokens."""
    data = text.encode()
    async with scripted_engine(Replies(text), max_num_seqs=32) as engine:

        async def stream(count: int) -> list[str]:
            chunks = engine.generate([1], params(count))
            return [chunk.text async for chunk in chunks]

        counts = range(1, len(data) + 1)
        for count, deltas in zip(
            counts, await asyncio.gather(*[stream(count) for count in counts]), strict=True
        ):
            assert "".join(deltas) == data[:count].decode(errors="replace")
            assert all("\ufffd" not in delta for delta in deltas[:-1])


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("one STO two", ["STOP"], "one STO two"),
        ("aaaaab", ["aab"], "aaa"),
        ("abcabd", ["abd", "cab"], "ab"),
        ("x \u00e9t\u00e9", ["\u00e9t\u00e9"], "x "),
        ("never ends STO", ["STOP"], "never ends STO"),
    ],
)
async def test_v3574_v_pr_45636_no_part_of_a_stop_string_is_streamed_and_little_is_held(
    text: str, stop: list[str], shown: str
) -> None:
    device = FakeDevice()
    async with engine_on(device, Replies(text)) as engine:
        stream = engine.generate([1], params(60, stop=stop))
        deltas: list[str] = []
        tokens: list[int] = []
        reading = asyncio.ensure_future(_read(stream, deltas, tokens))
        while not reading.done():
            await until(lambda: bool(device.pending) or reading.done())
            if device.pending:
                device.run(device.pending[0])
            for _ in range(30):
                await asyncio.sleep(0)
            seen = bytes(t for t in tokens if t < 256).decode(errors="ignore")
            if not reading.done() and not any(each in seen for each in stop):
                held = seen[len("".join(deltas)) :]
                assert held == longest_beginning(seen, stop)
        await reading
    assert "".join(deltas) == shown


async def _read(stream: Any, deltas: list[str], tokens: list[int]) -> None:
    async for chunk in stream:
        deltas.append(chunk.text)
        tokens += chunk.token_ids


def longest_beginning(text: str, stops: list[str]) -> str:
    """The longest end of the text that may still become a stop string."""
    ends = [stop[:n] for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(ends, key=len, default="")
