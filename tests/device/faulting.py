"""A kernel that faults, in a process of its own: prints what each waiter heard, and how soon.

python faulting.py [python]       "python": without the extension
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import torch

from aengine.device import CudaDevice
from aengine.errors import DeviceError


def fault() -> None:
    """Index far out of range: a device-side assertion."""
    table = torch.zeros(4, device="cuda")
    index = torch.full((32,), 1_000_000, device="cuda", dtype=torch.int64)
    table[index] += 1.0


async def outcome(awaitable: object) -> tuple[str, int | None, float]:
    try:
        await awaitable  # type: ignore[misc]
    except DeviceError as error:
        return type(error).__name__, getattr(error, "step_id", None), time.perf_counter()
    return "done", None, time.perf_counter()


async def main(native: object) -> None:
    device = CudaDevice(native=native)
    forward, copy = device.stream("forward"), device.stream("copy")
    await forward.launch(torch.cuda._sleep, 1000)
    device.mark_step(7)
    hit = forward.launch(fault)
    device.mark_step(8)
    after = copy.launch(lambda _: torch.ones(4, device="cuda"), hit)
    points = [forward.record() for _ in range(20)]
    tasks = [asyncio.create_task(outcome(x)) for x in (hit, after, *points)]
    # When the driver itself first says so, found by asking all the time in another thread.
    known = await asyncio.to_thread(first_seen, forward)
    results = await asyncio.gather(*tasks)
    late = forward.launch(lambda: 1)
    print(  # noqa: T201
        json.dumps(
            {
                "kinds": sorted({kind for kind, _, _ in results}),
                "steps": sorted({step for _, step, _ in results if step is not None}),
                "late": type(late.exception_nowait()).__name__,
                "after_known_ms": max(at - known for _, _, at in results) * 1e3,
                "pending": device.statistics()["pending"],
            }
        )
    )
    device.close()


def first_seen(stream: object) -> float:
    while stream.query() in (0, 600):  # type: ignore[attr-defined]
        time.sleep(0.0005)
    return time.perf_counter()


if __name__ == "__main__":
    asyncio.run(main(None if "python" in sys.argv else "auto"))
