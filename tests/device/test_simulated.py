"""What only the CUDA device has, against the driver library that plays a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from aengine.device import CudaDevice, WaitPolicy
from aengine.device.driver import Driver
from aengine.device.native import load_native
from aengine.errors import ConfigError, DeviceError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.device.conftest import Simulated

pytestmark = pytest.mark.skipif(load_native() is None, reason="the extension is not built")


@pytest.fixture(params=["native", "python"])
def device(
    request: pytest.FixtureRequest, fake_driver: Driver, simulated: Simulated
) -> Iterator[CudaDevice]:
    made = _device(fake_driver, native="auto" if request.param == "native" else None)
    yield made
    made.close()


def _device(driver: Driver, **options: Any) -> CudaDevice:
    return CudaDevice(driver=driver, guard=lambda _: contextlib.nullcontext(), **options)


async def test_a_lost_device_fails_everything_and_names_the_steps(
    device: CudaDevice, simulated: Simulated
) -> None:
    forward, copy = device.stream("forward"), device.stream("copy")
    device.mark_step(41)
    before = forward.launch(simulated.kernel, forward, 0.01)
    device.mark_step(42)
    hit = forward.launch(lambda: (simulated.kernel(forward, 0.02), simulated.fault(forward)))
    device.mark_step(43)
    after = copy.launch(lambda *_: 0, hit)
    tasks = [asyncio.create_task(_outcome(future)) for future in (before, hit, after)]
    assert await tasks[0] is None
    for task, step in zip(tasks[1:], (42, 43), strict=True):
        error = await task
        assert isinstance(error, DeviceLostError)
        assert error.step_id == step
        assert f"step {step}" in str(error)
    device.mark_step(44)
    late = forward.launch(lambda: pytest.fail("ran on a lost device"))
    assert isinstance(late.exception_nowait(), DeviceLostError)
    assert isinstance(await _outcome(forward.record()), DeviceLostError)
    with pytest.raises(DeviceLostError):
        device.stream("more")
    assert device.statistics()["pending"] == 0


async def test_waiters_of_other_threads_hear_of_the_loss(
    device: CudaDevice, simulated: Simulated
) -> None:
    stream = device.stream("forward")
    future = stream.launch(lambda: (simulated.kernel(stream, 0.05), simulated.fault(stream)))
    heard = await asyncio.gather(
        asyncio.to_thread(lambda: asyncio.run(_outcome(future))),
        asyncio.to_thread(lambda: (future.completion.wait_sync(), future.completion.error())[1]),
        _outcome(future),
    )
    assert all(isinstance(error, DeviceLostError) for error in heard)


async def test_a_wrong_prediction_is_harmless(fake_driver: Driver, simulated: Simulated) -> None:
    device = _device(fake_driver)
    stream = device.stream("forward")
    for _ in range(4):
        stream.pace.learn("Simulated.kernel", 60_000_000_000)  # a minute
    await stream.launch(simulated.kernel, stream, 0.005)  # the suite's timeout is the assertion
    for _ in range(8):
        stream.pace.learn("Simulated.kernel", 1000)
    device.adopt_loop()
    await stream.launch(simulated.kernel, stream, 0.02)
    assert stream.pace.expect("Simulated.kernel") == 1000
    device.close()


async def test_work_that_repeats_is_spun_for(fake_driver: Driver, simulated: Simulated) -> None:
    device = _device(fake_driver)
    device.adopt_loop()
    stream = device.stream("forward")
    for _ in range(20):
        await stream.launch(simulated.kernel, stream, 0.002)
    expected = stream.pace.expect("Simulated.kernel")
    assert expected is not None
    assert expected > 1_900_000
    assert device.statistics()["waits_spun"] >= 10
    device.close()


def _long_wait(device: CudaDevice) -> tuple[Any, ctypes.c_uint32]:
    """A wait that is taken to last a minute, and the word that ends it."""
    stream, gate = device.stream("long"), ctypes.c_uint32(0)
    calls = [("cuStreamWaitValue32_v2", (stream.handle, ctypes.addressof(gate), 1, 0))]
    for _ in range(4):
        stream.pace.learn("long", 60_000_000_000)
    return stream.prepare(calls, key="long").launch(gate), gate


@pytest.mark.timeout(20)
async def test_what_a_thread_brings_ends_a_long_wait(
    fake_driver: Driver, simulated: Simulated
) -> None:
    """On the device's own loop, whose thread the wait blocks. The timeout is the assertion."""
    device = _device(fake_driver, policy=WaitPolicy(block_limit=10**12))
    device.adopt_loop()
    point, gate = _long_wait(device)
    loop, brought = asyncio.get_running_loop(), []

    def bring() -> None:
        brought.append(threading.get_ident())
        gate.value = 1

    timer = threading.Timer(0.02, lambda: loop.call_soon_threadsafe(bring))
    timer.start()
    await point
    assert brought == [threading.get_ident()]
    point, gate = _long_wait(device)
    done = loop.run_in_executor(None, time.sleep, 0.01)
    done.add_done_callback(lambda _: bring())
    await point
    assert done.done()
    await asyncio.to_thread(timer.join)
    device.close()
    del point
    port = device.reactor.port()
    port.detach()
    assert "call_soon_threadsafe" not in vars(loop)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("known", [False, True])
async def test_a_long_wait_leaves_room_for_a_short_one(
    fake_driver: Driver, simulated: Simulated, known: bool
) -> None:
    """Two streams awaited in one loop: the end of each is heard while the other is waited for."""
    device = _device(fake_driver, policy=WaitPolicy(block_limit=10**12))
    device.adopt_loop()
    short = device.stream("short")
    if known:
        for _ in range(4):
            await short.launch(simulated.kernel, short, 0.005)
    point, gate = _long_wait(device)
    steps: list[int] = []

    async def step() -> None:
        for number in range(5):
            await short.launch(simulated.kernel, short, 0.005)
            steps.append(number)
        gate.value = 1

    async def long() -> None:
        await point

    await asyncio.gather(step(), long())
    assert steps == [0, 1, 2, 3, 4]
    assert not device.reactor.port().awaited
    device.close()


async def test_a_prediction_waits_for_what_its_work_waits_for(
    fake_driver: Driver, simulated: Simulated
) -> None:
    device = _device(fake_driver)
    first, second, third = (device.stream(name) for name in ("first", "second", "third"))
    for _ in range(4):
        await second.launch(simulated.kernel, second, 0.002)
        await third.launch(simulated.kernel, third, 0.002)
    point, gate = _long_wait(device)
    first.wait(point)
    between = first.record()
    second.wait(point)
    behind = second.launch(simulated.kernel, second, 0.002)
    third.wait(behind.completion)
    last = third.launch(simulated.kernel, third, 0.002)
    ends = [p.predicted_end() for p in (point, behind.completion, last.completion)]
    assert ends == sorted(ends)
    assert ends[1] - ends[0] > 1_900_000
    assert ends[2] - ends[1] > 1_900_000
    assert between.predicted_end() is None, "there is no experience with it"
    gate.value = 1
    await last
    device.patrol()
    assert not last.completion._edges, "what it followed is let go"
    device.close()


@pytest.mark.timeout(20)
async def test_a_host_function_that_never_comes_is_not_needed(
    fake_driver: Driver, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be stuck behind another stream's work; the watchdog is put to sleep here too."""
    device = _device(fake_driver)
    monkeypatch.setattr(device, "patrol", lambda: None)
    device.adopt_loop()
    stream = device.stream("s")
    for _ in range(4):
        stream.pace.learn("Simulated.kernel", 1_000_000)
    monkeypatch.setitem(fake_driver.calls, "launch_host", lambda *_: 0)
    await stream.launch(simulated.kernel, stream, 0.05)
    monkeypatch.undo()
    device.close()


async def test_launch_lists(fake_driver: Driver, simulated: Simulated) -> None:
    device = _device(fake_driver)
    stream = device.stream("forward")
    source, target = ctypes.create_string_buffer(b"tokens"), ctypes.create_string_buffer(6)
    gate = ctypes.c_uint32(0)
    prepared = stream.prepare(
        [
            ("cuStreamWaitValue32_v2", (stream.handle, ctypes.addressof(gate), 1, 0)),
            (simulated.kernel_address(), (stream.handle, 1_000_000)),
            (
                "cuMemcpyDtoHAsync_v2",
                (ctypes.addressof(target), ctypes.addressof(source), 6, stream.handle),
            ),
        ]
    )
    thing = {1}.__class__("held")
    held = weakref.ref(thing)
    points = [prepared.launch(thing) for _ in range(5)]
    del thing
    gc.collect()
    assert held() is not None
    gate.value = 1
    await points[0]
    assert target.raw == b"tokens"
    await points[4]
    device.patrol()
    gc.collect()
    assert held() is None
    assert [point.sequence for point in points] == [1, 2, 3, 4, 5]
    with pytest.raises(DeviceError, match="cuNoSuchThing"):
        stream.prepare([("cuNoSuchThing", ())])
    device.close()


async def test_a_record_that_failed_half_way_passes_for_no_other(
    fake_driver: Driver, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _device(fake_driver)
    stream = device.stream("forward")
    await stream.record()
    with monkeypatch.context() as patch:
        patch.setitem(fake_driver.calls, "event_record", lambda event, stream: 1)
        failed = stream.record()  # its word is written, its event is not
    with pytest.raises(DeviceError, match="recording"):
        await failed
    gate = ctypes.c_uint32(0)
    held_up = stream.prepare(
        [("cuStreamWaitValue32_v2", (stream.handle, ctypes.addressof(gate), 1, 0))]
    ).launch()
    await asyncio.sleep(0.01)
    assert not held_up.done()
    gate.value = 1
    await held_up
    device.close()


async def test_an_interrupt_during_a_launch_is_the_threads(
    fake_driver: Driver, simulated: Simulated
) -> None:
    device = _device(fake_driver)
    stream = device.stream("forward")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.launch(interrupted)
    assert await stream.launch(lambda: 1) == 1
    device.close()


async def test_launch_lists_need_the_extension(fake_driver: Driver) -> None:
    device = _device(fake_driver, native=None)
    with pytest.raises(DeviceError, match="extension"):
        device.stream("forward").prepare([])
    device.close()


async def test_streams_are_distinct_and_never_destroyed(fake_cuda: Path) -> None:
    fake_driver = Driver(str(fake_cuda))  # its own: a driver keeps the streams of closed devices
    device = _device(fake_driver)
    streams = [device.stream("s") for _ in range(8)]
    first = {stream.handle for stream in streams}
    assert len(first) == 8
    with pytest.raises(ConfigError):
        device.wrap_stream("again", streams[0].handle)
    handle = fake_driver.make("stream_create", 1, 0)
    wrapped = device.wrap_stream("theirs", handle)
    await wrapped.record()
    device.close()
    other = _device(fake_driver)
    streams = [other.stream("s") for _ in range(12)]
    again = [handle for s in streams for handle in (s.handle, *s.take_idle_lanes())]
    assert first <= set(again)
    assert handle not in again
    assert len(set(again)) == len(again) == 24
    other.close()


def test_there_is_a_limit_and_an_index(fake_driver: Driver) -> None:
    with pytest.raises(DeviceError, match="INVALID_DEVICE"):
        _device(fake_driver, index=1)
    device = _device(fake_driver)
    for _ in range(64):
        device.stream("s")
    with pytest.raises(DeviceError, match="64 streams"):
        device.stream("s")
    device.close()
    with pytest.raises(DeviceError, match="no CUDA driver"):
        Driver("libno-such-driver.so")


async def test_an_edge_to_another_device_is_refused_while_open(
    device: CudaDevice, fake_driver: Driver, simulated: Simulated
) -> None:
    other = _device(fake_driver)
    theirs, ours = other.stream("theirs"), device.stream("ours")
    future = theirs.launch(simulated.kernel, theirs, 0.02)
    with pytest.raises(DeviceError, match="another device"):
        ours.wait(future.completion)
    failed = ours.launch(lambda x: x, future)
    assert isinstance(failed.exception_nowait(), DeviceError)
    await future
    ours.wait(future.completion)
    assert await ours.launch(lambda x: x, future) == 0
    await asyncio.to_thread(other.close)


async def test_close_gives_up_on_work_that_hangs(fake_driver: Driver, simulated: Simulated) -> None:
    device = _device(fake_driver, close_timeout=0.05)
    stream = device.stream("forward")
    future = stream.launch(simulated.kernel, stream, 0.5)
    await asyncio.to_thread(device.close)
    assert "closed" in str(future.exception_nowait())
    while fake_driver.calls["stream_query"](stream.handle):  # noqa: ASYNC110  (a driver poll)
        await asyncio.sleep(0.02)


class Watching:
    """The extension, and how long each wait in it was allowed to spin."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.allowed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def wait_flag(self, word: int, target: int, spin_from: int, limit: int, *hold: bool) -> Any:
        self.allowed.append(limit - max(spin_from, time.perf_counter_ns()))
        return self._native.wait_flag(word, target, spin_from, limit, *hold)


@pytest.mark.parametrize("own", [False, True])
async def test_only_an_adopted_loop_is_blocked_for_long(
    fake_driver: Driver, simulated: Simulated, own: bool
) -> None:
    watching = Watching(load_native())
    policy = WaitPolicy()
    device = _device(fake_driver, native=watching, policy=policy)
    if own:
        device.adopt_loop()
    stream = device.stream("forward")
    for _ in range(12):
        await stream.launch(simulated.kernel, stream, 0.008)
    assert watching.allowed
    if own:
        assert max(watching.allowed) > policy.polite_spin
    else:
        assert max(watching.allowed) <= policy.polite_spin
    device.close()


async def test_bookkeeping_does_not_grow(device: CudaDevice, simulated: Simulated) -> None:
    stream = device.stream("forward")
    for _ in range(20):
        stream.launch(simulated.kernel, stream, 0.005)
        points = [stream.record() for _ in range(20)]
        tasks = [asyncio.create_task(_outcome(point)) for point in points]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    (port,) = device.reactor.ports()
    device.patrol()  # what the watchdog does every 25 ms
    assert not stream.pending
    assert not port._posted
    assert len(port._watched) <= 2
    assert len(stream.take_idle_lanes()) <= 3


async def test_a_device_that_is_dropped_unclosed_ends_its_watchdog(fake_driver: Driver) -> None:
    device = _device(fake_driver)
    thread = device._watchdog._thread
    del device
    gc.collect()
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive()


def test_no_thread_outlives_close(fake_driver: Driver) -> None:
    before = set(threading.enumerate())
    for native in ("auto", None):
        device = _device(fake_driver, native=native, policy=WaitPolicy())
        stream = device.stream("s")
        stream.record()
        device.close()
    assert set(threading.enumerate()) <= before


async def _outcome(awaitable: Any) -> BaseException | None:
    try:
        await awaitable
    except DeviceError as error:
        return error
    return None
