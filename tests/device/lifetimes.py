"""Drops every reference at once after each launch, and sees whether the values survive.

Run as a program (it sets the allocator by its environment):

    python lifetimes.py ROUNDS [--unheld]

Tensors cross streams, with delays put into random streams, while other work takes whatever memory
was given back. With `--unheld` it does the same in plain torch without holding anything; that run
is expected to lose values, which shows that the test can fail. Prints the number of wrong copies.
"""

from __future__ import annotations

import asyncio
import random
import sys

import torch

from aengine.device import CudaDevice

SIZE = 1 << 16


def make(number: int, cycles: int) -> torch.Tensor:
    if cycles:
        torch.cuda._sleep(cycles)
    return torch.full((SIZE,), number, device="cuda", dtype=torch.int32)


def to_host(values: torch.Tensor, cycles: int) -> torch.Tensor:
    if cycles:
        torch.cuda._sleep(cycles)
    host = torch.empty(SIZE, dtype=torch.int32, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


def delay(rng: random.Random) -> int:
    return rng.randrange(400_000) if rng.random() < 0.4 else 0


async def held(rounds: int) -> int:
    rng, wrong = random.Random(3), 0
    device = CudaDevice()
    device.adopt_loop()
    forward, copy, other = (device.stream(name) for name in ("forward", "copy", "other"))
    pinned = torch.empty(SIZE, dtype=torch.int32, pin_memory=True)
    del pinned
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    waiting = []
    for number in range(rounds):
        made = forward.launch(make, number, delay(rng))
        waiting.append((number, copy.launch(to_host, made, delay(rng))))
        del made
        forward.launch(make, -1, 0)
        other.launch(make, -2, delay(rng))
        if len(waiting) >= 16:
            for expected, future in waiting:
                wrong += int((await future != expected).any())
            waiting.clear()
    for expected, future in waiting:
        wrong += int((await future != expected).any())
    torch.cuda.set_sync_debug_mode("default")
    device.close()
    return wrong


def unheld(rounds: int) -> int:
    rng, wrong = random.Random(3), 0
    forward, copy = torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(rounds):
        with torch.cuda.stream(forward):
            made = make(number, 0)
            event = torch.cuda.Event()
            event.record(forward)
        with torch.cuda.stream(copy):
            copy.wait_event(event)
            host = to_host(made, 200_000 + delay(rng))
            del made
        with torch.cuda.stream(forward):
            make(-1, 0)
        torch.cuda.synchronize()
        wrong += int((host != number).any())
    return wrong


if __name__ == "__main__":
    count = int(sys.argv[1])
    print(unheld(count) if "--unheld" in sys.argv else asyncio.run(held(count)))  # noqa: T201
