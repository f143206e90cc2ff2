"""The fake device: hand-fired orders, faults, races, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.device import FakeDevice, FakeFaults
from aengine.errors import DeviceError, DeviceLostError


def _read(buffer: Any) -> int:
    return buffer.read()


def test_nothing_runs_until_told_and_only_in_order() -> None:
    device = FakeDevice()
    a, b = device.stream("a"), device.stream("b")
    first, second, other = a.launch(lambda: 1), a.launch(lambda: 2), b.launch(lambda: 3)
    assert [future.done() for future in (first, second, other)] == [False] * 3
    assert [op.index for op in device.ready()] == [0, 2]
    with pytest.raises(ValueError, match="not ready"):
        device.run(device.pending[1])
    device.run(device.pending[1], in_order=False)
    assert second.result_nowait() == 2
    assert not first.done()
    assert device.run_all() == 2
    assert first.result_nowait() == 1
    assert [stream.name for stream in (device.stream("a"), device.stream("a"))] == ["a-2", "a-3"]


def test_faults() -> None:
    cause = RuntimeError("bad kernel")
    faults = FakeFaults(raise_at={1: cause}, drop=frozenset({2}), delay={3: 2})
    device = FakeDevice(faults=faults)
    stream = device.stream("a")
    futures = [stream.launch(lambda n=n: n) for n in range(6)]
    device.run_all()
    assert futures[0].result_nowait() == 0
    error = futures[1].exception_nowait()
    assert isinstance(error, DeviceError)
    assert error.__cause__ is cause
    assert not futures[2].done()
    assert futures[3].result_nowait() == 3
    device.close()
    assert isinstance(futures[2].exception_nowait(), DeviceError)


def test_a_delayed_completion_can_be_delivered_by_hand() -> None:
    device = FakeDevice(faults=FakeFaults(delay={0: 99}))
    stream = device.stream("a")
    made = stream.launch(lambda: 4)
    used = stream.launch(lambda x: x + 1, made)
    device.run_all()
    assert not made.done()
    assert used.result_nowait() == 5, "the device's own order does not wait for the report"
    (op,) = device.undelivered
    device.deliver(op)
    assert made.result_nowait() == 4


def test_a_lost_device_names_the_step_of_each() -> None:
    device = FakeDevice(faults=FakeFaults(lose_at=1))
    stream = device.stream("a")
    futures = []
    for step in (5, 6, 7):
        device.mark_step(step)
        futures.append(stream.launch(int))
    device.run_all()
    assert futures[0].result_nowait() == 0
    for future, step in zip(futures[1:], (6, 7), strict=True):
        error = future.exception_nowait()
        assert isinstance(error, DeviceLostError)
        assert error.step_id == step
    assert isinstance(stream.launch(int).exception_nowait(), DeviceLostError)


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_edge_is_a_race_whatever_order_it_ran_in(seed: int) -> None:
    rng = random.Random(seed)
    device = FakeDevice()
    forward, copy = device.stream("forward"), device.stream("copy")
    table = device.buffer("block_tables", 0)
    forward.launch(table.write, 1)
    copy.launch(_read, table)
    device.run_all(rng.choice)
    (race,) = device.races()
    assert race.buffer == "block_tables"


@pytest.mark.parametrize("how", ["edge", "argument", "await"])
async def test_an_edge_an_argument_and_an_await_put_accesses_in_order(how: str) -> None:
    device = FakeDevice()
    forward, copy = device.stream("forward"), device.stream("copy")
    table = device.buffer("block_tables", 0)
    written = forward.launch(table.write, 1)
    if how == "edge":
        copy.wait(written.completion)
        read = copy.launch(_read, table)
    elif how == "argument":
        read = copy.launch(lambda _, t: t.read(), written, table)
    else:
        device.run_all()
        await written
        read = copy.launch(_read, table)
    device.run_all()
    assert await read == 1
    assert not device.races()
    table.write(2)  # the host, after it awaited the reader
    assert not device.races()
    forward.launch(_read, table)
    device.run_all()
    table.write(3)  # the host, without having awaited the second reader
    assert len(device.races()) == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["launch", "fail", "use", "record", "edge", "run", "cancel", "lose"]),
        st.integers(0, 2),
        st.integers(0, 1000),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(
    actions=ACTIONS,
    drop=st.frozensets(st.integers(0, 30), max_size=3),
    delay=st.dictionaries(st.integers(0, 30), st.integers(1, 20), max_size=3),
    native=st.sampled_from(["auto", None]),
)
def test_nothing_waits_for_ever(
    actions: list[tuple[str, int, int]],
    drop: frozenset[int],
    delay: dict[int, int],
    native: str | None,
) -> None:
    """Whatever is launched, dropped, delayed, cancelled or lost: after close every wait has ended,
    and each future has its own value or a device error."""

    async def scenario() -> None:
        device = FakeDevice(faults=FakeFaults(drop=drop, delay=delay), native=native)
        streams = [device.stream(str(i)) for i in range(3)]
        futures: list[Any] = []
        waits: list[asyncio.Task[Any]] = []
        expected: list[int | None] = []

        def add(future: Any, value: int | None) -> None:
            futures.append(future)
            expected.append(value)
            waits.append(asyncio.create_task(_outcome(future)))

        for number, (action, which, choice) in enumerate(actions):
            stream = streams[which]
            if action == "launch":
                add(stream.launch(lambda n=number: n), number)
            elif action == "fail":
                add(stream.launch(_broken), None)
            elif action == "use" and futures:
                source = choice % len(futures)
                add(stream.launch(lambda x: x, futures[source]), expected[source])
            elif action == "record":
                add_point = stream.record()
                waits.append(asyncio.create_task(_outcome(add_point)))
            elif action == "edge" and futures:
                stream.wait(futures[choice % len(futures)].completion)
            elif action == "run" and (ready := device.ready()):
                device.run(ready[choice % len(ready)])
            elif action == "cancel" and waits:
                waits[choice % len(waits)].cancel()
            elif action == "lose" and choice < 100:
                device.lose("by the test")
            if choice % 3 == 0:
                await asyncio.sleep(0)
        device.close()
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert all(
            not isinstance(o, BaseException) or isinstance(o, asyncio.CancelledError)
            for o in outcomes
        )
        for future, value in zip(futures, expected, strict=True):
            assert future.done()
            error = future.exception_nowait()
            if error is None:
                assert future.result_nowait() == value
            else:
                assert isinstance(error, DeviceError)
            assert not future.completion._waiters
        assert device.statistics()["pending"] == 0

    asyncio.run(scenario())


def _broken() -> None:
    raise RuntimeError("broken")


async def _outcome(awaitable: Any) -> Any:
    try:
        return await awaitable
    except DeviceError as error:
        return error.code
