"""Background work of the launch side: one piece at a time, with pauses, never under contention."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

from aengine.engine.chores import Chores

if TYPE_CHECKING:
    import pytest


class Launcher:
    def __init__(self, *chores: Any) -> None:
        self.left = list(chores)

    def chore(self) -> Any:
        return self.left.pop(0) if self.left else None


class Device:
    contended = False


def made(launcher: Launcher, device: Device, now: list[float]) -> Chores:
    return Chores(launcher, device, pause=1.0, clock=lambda: now[0])  # type: ignore[arg-type]


async def test_one_piece_at_a_time_in_one_thread() -> None:
    gate, names = threading.Event(), []

    def piece() -> None:
        gate.wait(10)
        names.append(threading.current_thread().name)

    launcher, now = Launcher(piece, piece), [0.0]
    chores = made(launcher, Device(), now)
    chores.look()
    now[0] = 2.0
    chores.look()
    assert len(launcher.left) == 1, "the first piece is still being done"
    gate.set()
    while launcher.left:
        chores.look()
        await asyncio.sleep(0.001)
    await chores.aclose()
    assert len(names) == 2
    assert len(set(names)) == 1
    assert not any(t.name.startswith("aengine-chores") for t in threading.enumerate())


async def test_a_pause_after_each_and_none_beside_a_busy_host() -> None:
    done: list[int] = []
    launcher, now, device = Launcher(*[lambda: done.append(1)] * 3), [0.0], Device()
    chores = made(launcher, device, now)
    device.contended = True
    chores.look()
    assert len(launcher.left) == 3
    device.contended = False
    chores.look()
    assert chores._running is not None
    await chores._running
    chores.look()
    assert len(launcher.left) == 2
    now[0] = 1.5
    while len(launcher.left) == 2:
        chores.look()
        await asyncio.sleep(0.001)
    await chores.aclose()
    assert len(done) == 2


async def test_a_failure_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    chores = made(Launcher(lambda: 1 / 0), Device(), [0.0])
    with caplog.at_level(logging.WARNING, "aengine"):
        chores.look()
        await chores.aclose()
    assert "division by zero" in caplog.text


async def test_closing_without_work_starts_no_thread() -> None:
    chores = made(Launcher(), Device(), [0.0])
    chores.look()
    await chores.aclose()
    assert not any(t.name.startswith("aengine-chores") for t in threading.enumerate())
