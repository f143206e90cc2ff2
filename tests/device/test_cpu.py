"""What only the CPU device has: its threads, its promptness in letting go, its volume."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from aengine.device import CpuDevice, HostCompletion, Reactor, Trace
from aengine.device.native import load_native
from aengine.errors import DeviceError


async def test_each_stream_is_one_named_thread() -> None:
    device = CpuDevice(name="cpu")
    forward, copy = device.stream("forward"), device.stream("copy")

    def where() -> tuple[int, str, str]:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        return threading.get_ident(), threading.current_thread().name, comm.read_text().strip()

    first, second, other = await asyncio.gather(
        forward.launch(where), forward.launch(where), copy.launch(where)
    )
    assert first == second
    assert first[0] != other[0]
    assert first[1] == "cpu-forward"
    assert first[2] == "cpu-forward"
    device.close()


async def test_the_initializer_runs_once_on_each_thread() -> None:
    seen: list[int] = []
    device = CpuDevice(initializer=lambda: seen.append(threading.get_ident()))
    streams = [device.stream(str(i)) for i in range(3)]
    threads = await asyncio.gather(*(s.launch(threading.get_ident) for s in streams * 3))
    assert sorted(seen) == sorted(set(threads))
    device.close()


async def test_an_initializer_that_fails_fails_the_work() -> None:
    device = CpuDevice(initializer=lambda: 1 / 0)
    stream = device.stream("s")
    with pytest.raises(DeviceError, match="could not start") as caught:
        await stream.launch(int)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    device.close()


@pytest.mark.parametrize("native", ["auto", None])
async def test_nothing_of_a_step_stays_in_the_worker(native: str | None) -> None:
    class Thing:
        pass

    device = CpuDevice(native=native)
    stream = device.stream("s")
    gc.disable()
    try:
        for fails in (False, True):
            thing, made = Thing(), []
            used = weakref.ref(thing)

            def work(_: Thing, made: Any = made, fails: bool = fails) -> Any:
                value = Thing()
                made.append(weakref.ref(value))
                if fails:
                    raise ValueError
                return value

            future = stream.launch(work, thing)
            del thing
            try:
                await future
            except DeviceError:
                await stream.record()  # the raised copy's frames are this test's, not the worker's
            del future
            await asyncio.sleep(0)
            assert made[0]() is None or fails
            assert used() is None or fails
            gc.collect()
            assert made[0]() is None
            assert used() is None
    finally:
        gc.enable()
    device.close()


async def test_work_that_waits_for_another_device_ends_when_ours_closes() -> None:
    device = CpuDevice()
    stream = device.stream("s")
    never = HostCompletion(Reactor())
    stream.wait(never)
    future = stream.launch(lambda: "after the edge")
    await asyncio.to_thread(device.close)
    assert future.result_nowait() == "after the edge"
    with pytest.raises(TypeError, match="no completion"):
        stream.wait(asyncio.get_running_loop().create_future())  # type: ignore[arg-type]


@pytest.mark.parametrize("native", ["auto", None])
async def test_a_hundred_thousand_from_four_threads_and_none_lost(native: str | None) -> None:
    if native and load_native() is None:
        pytest.skip("the extension is not built")
    device = CpuDevice(native=native)
    streams = [device.stream(str(i)) for i in range(2)]
    each = 25_000

    async def in_a_loop(offset: int) -> int:
        total = 0
        for start in range(offset, offset + each, 500):
            numbers = range(start, start + 500)
            futures = [streams[n % 2].launch(_same, n) for n in numbers]
            total += sum([await future for future in futures])
        return total

    totals = await asyncio.gather(
        *(asyncio.to_thread(lambda i=i: asyncio.run(in_a_loop(i * each))) for i in range(4))
    )
    assert sum(totals) == sum(range(4 * each))
    counts = device.statistics()
    assert counts["completed"] == counts["launches"] == 4 * each
    assert counts["pending"] == 0
    device.close()


def _same(value: int) -> int:
    return value


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_thread_and_no_descriptor_outlives_close() -> None:
    async def once() -> None:
        device = CpuDevice()
        await device.stream("s").launch(int)
        device.close()

    async def many() -> tuple[int, int]:
        await once()
        await asyncio.sleep(0)
        before = _descriptors()
        for _ in range(20):
            await once()
            await asyncio.sleep(0)
        gc.collect()
        return before, _descriptors()

    threads = threading.active_count()
    before, after = asyncio.run(many())
    assert after <= before
    assert threading.active_count() == threads


def test_a_device_that_is_dropped_unclosed_ends_its_threads() -> None:
    device = CpuDevice(name="dropped")
    device.stream("s").launch(int).completion.wait_sync(5)
    (thread,) = [t for t in threading.enumerate() if t.name == "dropped-s"]
    del device
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_importing_the_room_and_using_the_cpu_needs_no_torch() -> None:
    code = (
        "import sys, asyncio, aengine.device as d\n"
        "names = [getattr(d, n) for n in d.__all__ if n != 'CudaDevice']\n"
        "async def main():\n"
        "    c = d.CpuDevice(); print(await c.stream('s').launch(lambda: 6)); c.close()\n"
        "asyncio.run(main())\n"
        "d.CudaDevice\n"
        "assert 'torch' not in sys.modules and 'cuda' not in sys.modules\n"
        "c = d.CpuDevice(); c.stream('s').launch(lambda: 6)\n"  # left open: exit must not hang
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "6", "")


def test_without_the_extension_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    load_native.cache_clear()
    blocked = pytest.MonkeyPatch()
    blocked.setitem(sys.modules, "aengine_ext._completions", None)
    try:
        with caplog.at_level("INFO", logger="aengine.device.native"):
            for _ in range(3):
                device = CpuDevice()
                assert asyncio.run(_await(device.stream("s").launch(lambda: 8))) == 8
                device.close()
    finally:
        blocked.undo()
        load_native.cache_clear()
    assert len(caplog.records) == 1
    assert "pure-Python" in caplog.text


async def _await(future: Any) -> Any:
    return await future


def test_a_trace_is_json_that_a_viewer_reads(tmp_path: Path) -> None:
    trace = Trace(limit=3)
    with trace.measure("outer", track="engine", rows=3):
        trace.span("inner", 1000, 3500, track="engine")
    trace.span("third", 10, 5)
    trace.span("one too many", 0, 1)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert set(spans) == {"inner", "outer", "third"}
    assert (spans["inner"]["ts"], spans["inner"]["dur"]) == (1.0, 2.5)
    assert spans["third"]["dur"] == 0
    assert spans["outer"]["args"] == {"rows": 3}
    assert spans["inner"]["tid"] == spans["outer"]["tid"] != spans["third"]["tid"]
    assert trace.dropped == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.json"]
