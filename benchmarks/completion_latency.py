"""How soon a coroutine runs again after the GPU is done, at what cost, and beside a busy host.

    python benchmarks/completion_latency.py [--quick] [--json FILE] [--simulated LIBRARY] [PART ...]

Parts: latency, ticker, busy, million, idle, launch. Everything a part compares is measured in the
same run. Overhead is the time from the launch's return to the resumption, minus the median of the
same with a loop of `cuEventQuery` that does nothing else; the two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import platform
import resource
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from spin_kernel import Gate, Kernels

from aengine.device import CudaDevice, WaitPolicy
from aengine.device.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

US = 1e3


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


class Bench:
    """One run's settings and results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick: bool = options.quick
        self.simulated: str | None = options.simulated
        self.driver = Driver(self.simulated or "libcuda.so.1")
        self.rows: list[dict[str, Any]] = []

    def device(self, **options: Any) -> CudaDevice:
        guard = lambda _: contextlib.nullcontext()  # noqa: E731  (no torch op is launched here)
        return CudaDevice(driver=self.driver, guard=guard, **options)

    def row(self, **fields: Any) -> None:
        self.rows.append(fields)
        texts = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in fields.items()]
        print("  ".join(texts), flush=True)

    # -- latency -----------------------------------------------------------------------------------

    def latency(self) -> None:
        """p50 and p99 overhead of each way of waiting, and the share of a core it takes."""
        sizes = {300: 400, 500: 400, 1000: 300, 2000: 300, 8000: 150, 20000: 100}
        no_spin = WaitPolicy(spin_whole=0, block_limit=0, polite_spin=0)
        ways: dict[str, dict[str, Any]] = {
            "cuEventSynchronize": {"blocking": True},
            "aengine, own loop": {"own": True},
            "aengine, own loop, uvloop": {"own": True, "uv": True},
            "aengine, caller's loop": {},
            "host function on a side stream": {"policy": no_spin},
            "pure Python (no extension)": {"native": None},
        }
        for microseconds, count in sizes.items():
            count = count // 8 if self.quick else count
            for name, options in ways.items():
                uv = options.get("uv", False)
                options = {k: v for k, v in options.items() if k != "uv"}
                _run(partial(self.alternate, name, microseconds, count, **options), uv=uv)

    async def alternate(
        self,
        name: str,
        microseconds: int,
        count: int,
        *,
        own: bool = False,
        native: Any = "auto",
        policy: WaitPolicy | None = None,
        blocking: bool = False,
    ) -> None:
        """Wait in turns by a busy loop and by the way in question, after the same launch."""
        device = self.device(native=native, policy=policy)
        if own:
            device.adopt_loop()
        stream, kernels = device.stream("bench"), Kernels(device, self.simulated)
        call = kernels.call(stream.handle, microseconds * 1000)
        launch = _launcher(stream, kernels, call, native)
        query = self.driver.calls["event_query"]
        busy: list[float] = []
        taken: list[float] = []
        cpu = wall = 0.0
        for number in range(2 * count + 40):
            point = launch()
            cpu_before, start = time.process_time(), time.perf_counter_ns()
            if number % 2 == 0:
                while query(point.event.handle):
                    pass
            elif blocking:
                self.driver.event_synchronize(point.event.handle)
            else:
                await point
            duration = time.perf_counter_ns() - start
            if number >= 40:
                (taken if number % 2 else busy).append(duration)
                if number % 2:
                    cpu += time.process_time() - cpu_before
                    wall += duration / 1e9
        device.close()
        base = statistics.median(busy)
        self.row(
            part="latency",
            way=name,
            op_ms=microseconds / 1000,
            p50_us=(statistics.median(taken) - base) / US,
            p99_us=(percentile(taken, 0.99) - base) / US,
            max_us=(max(taken) - base) / US,
            busy_p99_us=(percentile(busy, 0.99) - base) / US,
            core=round(cpu / wall, 3),
        )

    # -- the host's loop beside an engine's --------------------------------------------------------

    def ticker(self) -> None:
        """Lag of a 1 ms ticker in the host's loop, idle and beside an engine thread."""
        idle = asyncio.run(_tick(1.0 if self.quick else 3.0))
        self.row(part="ticker", beside="nothing", p50_us=idle[0], p99_us=idle[1], max_us=idle[2])
        for step_us in (500, 2000, 8000):
            stop = threading.Event()
            thread = threading.Thread(target=self.engine, args=(step_us, 1, stop, {}))
            thread.start()
            lag = asyncio.run(_tick(1.0 if self.quick else 3.0))
            stop.set()
            thread.join()
            self.row(
                part="ticker",
                beside=f"{step_us / 1000} ms steps",
                p50_us=lag[0],
                p99_us=lag[1],
                max_us=lag[2],
                p99_over_idle_us=lag[1] - idle[1],
            )

    def engine(
        self,
        step_us: int,
        depth: int,
        stop: threading.Event,
        out: dict[str, float],
        policy: WaitPolicy | None = None,
    ) -> None:
        """An engine's thread: 0.3 ms of Python a step, a launch list, and an await at `depth`."""

        async def steps() -> None:
            device = self.device(policy=policy)
            device.adopt_loop()
            stream, kernels = device.stream("bench"), Kernels(device, self.simulated)
            prepared = stream.prepare([kernels.call(stream.handle, step_us * 1000)])
            flying = [prepared.launch() for _ in range(depth)]
            done, began = 0, time.perf_counter()
            while not stop.is_set():
                _python(0.0003)
                flying.append(prepared.launch())
                await flying.pop(0)
                done += 1
                if done == 20:
                    began = time.perf_counter()
            out["steps"] = (done - 20) / (time.perf_counter() - began)
            for point in flying:
                await point
            device.close()

        asyncio.run(steps())

    def busy(self) -> None:
        """Steps a second of an engine thread beside a host thread that runs pure Python."""
        seconds = 0.7 if self.quick else 2.0
        policies = {"default": WaitPolicy(), "no early GIL": WaitPolicy(hold_spin=0)}
        for step_us, depth in ((6000, 1), (6000, 2), (2000, 1), (2000, 2)):
            for name, policy in policies.items():
                if step_us == 6000 and name != "default":
                    continue
                rates = {}
                for busy in (0.0, 0.5, 1.0):
                    stop, out = threading.Event(), {}
                    args = (step_us, depth, stop, out, policy)
                    thread = threading.Thread(target=self.engine, args=args)
                    thread.start()
                    _hog(seconds, busy)
                    stop.set()
                    thread.join()
                    rates[busy] = out["steps"]
                self.row(
                    part="busy",
                    policy=name,
                    step_ms=step_us / 1000,
                    depth=depth,
                    idle_steps_s=rates[0.0],
                    kept_50=round(rates[0.5] / rates[0.0], 3),
                    kept_100=round(rates[1.0] / rates[0.0], 3),
                )

    # -- a million awaits --------------------------------------------------------------------------

    def million(self) -> None:
        """Awaits beside a thread that keeps the GIL and calls the driver: none lost, no growth."""
        total, batch = (20_000 if self.quick else 1_000_000), 500
        stop = threading.Event()
        calls = 0

        async def main() -> None:
            nonlocal calls
            device = self.device()
            stream = device.stream("bench")
            other = device.stream("other")

            def nag() -> None:
                nonlocal calls
                query = self.driver.calls["stream_query"]
                with device.current():
                    while not stop.is_set():
                        query(other.handle)
                        calls += 1

            interval = sys.getswitchinterval()
            sys.setswitchinterval(0.0005)
            thread = threading.Thread(target=nag)
            thread.start()
            sizes, began, done = [], time.perf_counter(), 0
            gate = Gate(device)
            for number in range(total // batch):
                gate.close(stream.handle)
                points = [stream.record() for _ in range(batch)]
                tasks = [asyncio.create_task(_await(point)) for point in points]
                await asyncio.sleep(0)  # all of them wait now
                gate.open()
                await asyncio.gather(*tasks)
                done += batch
                if number % max(total // batch // 10, 1) == 0:
                    gc.collect()
                    sizes.append(_resident())
            stop.set()
            thread.join()
            sys.setswitchinterval(interval)
            stats = device.statistics()
            device.close()
            self.row(
                part="million",
                awaits=done,
                seconds=time.perf_counter() - began,
                pending=stats["pending"],
                suspended=stats["waits"] - stats["waits_done_at_once"],
                loop_wakeups_a_batch=stats["loop_wakeups"] / (total / batch),
                driver_calls_beside=calls,
                resident_mb=[round(size) for size in sizes],
            )

        asyncio.run(main())

    # -- costs -------------------------------------------------------------------------------------

    def idle(self) -> None:
        """CPU share of a device that waits for nothing."""

        async def main() -> None:
            device = self.device()
            device.adopt_loop()
            await device.stream("bench").record()
            await asyncio.sleep(0.2)
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.sleep(1 if self.quick else 4)
            share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            device.close()
            self.row(part="idle", cpu=round(share, 5))

        asyncio.run(main())

    def launch(self) -> None:
        """Host time of a launch, a record and a launch list."""
        device = self.device()
        stream, kernels = device.stream("bench"), Kernels(device, self.simulated)
        prepared = stream.prepare([kernels.call(stream.handle, 1000)])
        ways: dict[str, Callable[[], object]] = {
            "record()": stream.record,
            "launch(empty)": lambda: stream.launch(int),
            "launch list of one kernel": prepared.launch,
        }
        for name, way in ways.items():
            taken = []
            for number in range(3000):
                start = time.perf_counter_ns()
                point = way()
                taken.append(time.perf_counter_ns() - start)
                if number % 100 == 99:
                    point = getattr(point, "completion", point)
                    point.wait_sync()
            self.row(
                part="launch",
                way=name,
                p50_us=statistics.median(taken) / US,
                p99_us=percentile(taken, 0.99) / US,
            )
        device.close()


def _launcher(stream: Any, kernels: Kernels, call: Any, native: Any) -> Callable[[], Any]:
    if native is None:
        return lambda: stream.launch(kernels.run, call).completion
    prepared = stream.prepare([call])
    return lambda: prepared.launch()


async def _await(point: Awaitable[None]) -> None:
    await point


def _run(main: Callable[[], Any], *, uv: bool) -> Any:
    if uv:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    return asyncio.run(main())


async def _tick(seconds: float) -> tuple[float, float, float]:
    lags, until = [], time.perf_counter() + seconds
    while (now := time.perf_counter()) < until:
        await asyncio.sleep(0.001)
        lags.append((time.perf_counter() - now - 0.001) * 1e6)
    return statistics.median(lags), percentile(lags, 0.99), max(lags)


def _python(seconds: float) -> int:
    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        count += 1
    return count


def _hog(seconds: float, busy: float) -> None:
    """This thread runs pure Python for a share of the time (in bouts of 10 ms)."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if busy:
            _python(0.01 * busy)
        if busy < 1:
            time.sleep(0.01 * (1 - busy))


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parts = ["latency", "ticker", "busy", "million", "idle", "launch"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--quick", action="store_true", help="a fraction of the rounds")
    parser.add_argument("--json", help="write the rows there")
    parser.add_argument("--simulated", help="a driver library that plays a GPU (tests)")
    options = parser.parse_args()
    bench = Bench(options)
    print(f"Python {platform.python_version()}, {platform.machine()}", flush=True)
    for part in options.parts:
        getattr(bench, part)()
    if options.json:
        Path(options.json).write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    main()
