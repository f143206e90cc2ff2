"""One contract, every device: what a coroutine may rely on."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from aengine.device import DeviceFuture
from aengine.device.protocols import Completion
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from tests.device.conftest import Rig


class Thing:
    """Something whose death can be seen."""


async def test_a_launch_gives_its_value(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    future = stream.launch(lambda a, b: a + b, 2, 3)
    assert isinstance(future, DeviceFuture)
    assert await future == 5
    assert await future == 5
    assert future.done()
    assert future.result_nowait() == 5
    assert future.exception_nowait() is None


async def test_slow_work_is_awaited(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    futures = [stream.launch(rig.slow(stream)) for _ in range(5)]
    assert await asyncio.gather(*futures) == [7] * 5


async def test_what_is_not_done_says_so(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    future, point = stream.launch(int), stream.record()
    assert not future.done()
    assert not point.done()
    with pytest.raises(asyncio.InvalidStateError):
        future.result_nowait()
    gate.open()
    await point
    assert future.result_nowait() == 0


async def test_points_of_a_stream_come_in_order(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    points = [stream.record() for _ in range(20)]
    seen: list[int] = []

    async def watch(number: int) -> None:
        await points[number]
        assert all(point.done() for point in points[:number])
        seen.append(number)

    await asyncio.gather(*(watch(number) for number in reversed(range(20))))
    assert sorted(seen) == list(range(20))


async def test_a_record_is_never_rearmed(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    first = stream.record()
    await first
    gate = rig.gate(stream)
    second = stream.record()
    assert first.done()
    assert not second.done()
    await first
    gate.open()
    await second


async def test_a_future_argument_arrives_as_its_value(rig: Rig) -> None:
    forward, copy = rig.device.stream("forward"), rig.device.stream("copy")
    gate = rig.gate(forward)
    made = forward.launch(lambda: 20)
    used = copy.launch(lambda x, y: x + y, made, 1)
    assert not used.done()
    gate.open()
    assert await used == 21


async def test_an_edge_holds_up_the_other_stream_only(rig: Rig) -> None:
    forward, copy, other = (rig.device.stream(name) for name in ("forward", "copy", "other"))
    gate = rig.gate(forward)
    point = forward.record()
    copy.wait(point)
    behind, free = copy.launch(lambda: "behind"), other.launch(lambda: "free")
    assert await free == "free"
    assert not behind.done()
    gate.open()
    assert await behind == "behind"
    assert point.done()


async def test_an_exception_fails_its_future_and_what_depends_on_it(rig: Rig) -> None:
    stream, other = rig.device.stream("forward"), rig.device.stream("other")
    cause = KeyError("no such row")

    def broken() -> None:
        raise cause

    failed = stream.launch(broken)
    dependent = other.launch(lambda x: x, failed)
    unrelated = stream.launch(lambda: "fine")
    for future in (failed, dependent):
        with pytest.raises(DeviceError, match="broken") as caught:
            await future
        assert caught.value.__cause__ is cause
        assert isinstance(future.exception_nowait(), DeviceError)
    assert await unrelated == "fine"
    await stream.record()


async def test_each_raise_is_an_exception_of_its_own(rig: Rig) -> None:
    failed = rig.device.stream("forward").launch(lambda: 1 / 0)
    caught = []
    for _ in range(2):
        with pytest.raises(DeviceError) as info:
            await failed
        caught.append(info.value)
    assert caught[0] is not caught[1]


async def test_many_await_one_completion(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    point = stream.record()
    assert isinstance(point, Completion)

    async def wait() -> bool:
        await point
        return True

    tasks = [asyncio.create_task(wait()) for _ in range(256)]
    await asyncio.sleep(0)
    before = rig.device.statistics()["loop_wakeups"]
    gate.open()
    assert all(await asyncio.gather(*tasks))
    # One wake-up for the point; a few more may be about something else (a timer, a side stream).
    assert rig.device.statistics()["loop_wakeups"] - before <= 4


async def test_fan_in_of_several_streams(rig: Rig) -> None:
    streams = [rig.device.stream(f"s{i}") for i in range(4)]
    futures = [s.launch(rig.slow(s, 0.002 * (i + 1))) for i, s in enumerate(streams)]
    total = streams[0].launch(lambda *values: sum(values), *futures)
    assert await total == 28


async def test_cancelling_abandons_the_wait_only(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    future = stream.launch(lambda: "kept")
    for _ in range(50):
        task = asyncio.create_task(_wait(future))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not future.completion._waiters
    assert rig.device.statistics()["waits_abandoned"] == 50
    gate.open()
    assert await future == "kept"


async def test_a_timeout_abandons_the_wait_only(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    point = stream.record()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await point
    gate.open()
    await point


async def test_loops_in_several_threads(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    future = stream.launch(lambda: "everywhere")
    results: list[str] = []
    started = [threading.Event() for _ in range(4)]

    async def in_thread(event: threading.Event) -> None:
        event.set()
        results.append(await future)

    threads = [
        threading.Thread(target=lambda e=event: asyncio.run(in_thread(e))) for event in started
    ]
    for thread, event in zip(threads, started, strict=True):
        thread.start()
        await asyncio.to_thread(event.wait)
    gate.open()
    assert await future == "everywhere"
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert results == ["everywhere"] * 4


def test_three_runs_and_a_loop_that_was_closed(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    for number in range(3):
        assert asyncio.run(_wait(stream.launch(lambda n=number: n))) == number
    gate = rig.gate(stream)
    future = stream.launch(lambda: "late")
    loop = asyncio.new_event_loop()
    task = loop.create_task(_wait(future))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    loop.close()
    gate.open()
    assert asyncio.run(_wait(future)) == "late"
    assert not task.done()
    task._log_destroy_pending = False
    assert len(future.completion._waiters) == 0


async def test_what_a_launch_uses_lives_until_the_work_is_done(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    thing = Thing()
    alive = weakref.ref(thing)
    point_of = stream.launch(lambda used: id(used), thing).completion
    del thing
    gc.collect()
    assert alive() is not None
    gate.open()
    await point_of
    await asyncio.sleep(0)  # what a point held goes at the latest in the loop's next turn
    gc.collect()
    assert alive() is None


async def test_a_result_lives_as_long_as_its_future(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    future = stream.launch(Thing)
    alive = weakref.ref(await future)
    await asyncio.sleep(0)
    gc.collect()
    assert alive() is not None
    del future
    gc.collect()
    assert alive() is None


async def test_a_thread_can_wait_without_a_loop(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    point = stream.launch(lambda: 1).completion
    assert not await asyncio.to_thread(point.wait_sync, 0.01)
    waiting = asyncio.create_task(asyncio.to_thread(point.wait_sync))
    gate.open()
    assert await waiting
    assert point.wait_sync()


async def test_launching_from_many_threads(rig: Rig) -> None:
    streams = [rig.device.stream(f"s{i}") for i in range(2)]
    futures: list[DeviceFuture[int]] = []

    def launch(offset: int) -> None:
        for number in range(offset, offset + 50):
            futures.append(streams[number % 2].launch(lambda n: n, number))  # noqa: PERF401

    await asyncio.gather(*(asyncio.to_thread(launch, 50 * i) for i in range(4)))
    assert sorted(await asyncio.gather(*futures)) == list(range(200))


async def test_statistics_add_up(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    before = rig.device.statistics()
    futures = [stream.launch(int) for _ in range(10)]
    bad = stream.launch(lambda: 1 / 0)
    await asyncio.gather(*futures)
    with pytest.raises(DeviceError):
        await bad
    await stream.record()
    after = rig.device.statistics()
    assert after["launches"] - before["launches"] == 11
    assert after["failed"] == 1
    assert after["waits"] - before["waits"] == 12
    assert 0 <= after["share_spun"] <= 1
    assert sum(after["wakeup_latency_us"].values()) <= after["waits"]


async def test_closing_finishes_what_was_launched(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    futures = [stream.launch(rig.slow(stream, 0.002)) for _ in range(10)]
    await asyncio.to_thread(rig.device.close)
    rig.device.close()
    assert [future.result_nowait() for future in futures] == [7] * 10
    assert rig.device.statistics()["pending"] == 0
    for use in (lambda: stream.launch(int), stream.record, lambda: rig.device.stream("more")):
        with pytest.raises(DeviceError, match="closed"):
            use()


async def test_a_wait_outlives_close(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    waits = [asyncio.create_task(_wait(stream.launch(rig.slow(stream)))) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(rig.device.close)
    assert await asyncio.gather(*waits) == [7] * 3


async def test_the_trace_has_the_work_of_each_stream(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    rig.device.mark_step(12)
    gate = rig.gate(stream)
    task = asyncio.create_task(_wait(stream.launch(rig.slow(stream))))
    await asyncio.sleep(0)
    gate.open()
    await task
    await asyncio.to_thread(rig.device.close)
    events = rig.trace.events()
    tracks = {e["args"]["name"] for e in events if e["ph"] == "M"}
    if rig.kind != "fake":
        assert "stream forward" in tracks
        steps = [e for e in events if e.get("cat") == "stream forward"]
        assert all(step["args"] == {"step": 12} for step in steps)
        assert max(step["dur"] for step in steps) > 2000
    assert "wake-ups" in tracks


async def test_the_loop_goes_on_while_a_wait_lasts(rig: Rig) -> None:
    stream = rig.device.stream("forward")
    gate = rig.gate(stream)
    task = asyncio.create_task(_wait(stream.launch(int)))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()
    gate.open()
    assert await task == 0


async def test_an_adopted_loop_gets_its_turns(rig: Rig) -> None:
    rig.device.adopt_loop()
    stream = rig.device.stream("forward")
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    slow = rig.slow(stream, 0.001)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        await stream.launch(slow)
    ticker.cancel()
    assert turns >= 3


async def _wait(future: DeviceFuture[object]) -> object:
    return await future
