"""`Chores`: the launch side's background work (capturing graphs), in a thread beside the steps."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from aengine.threads import DaemonPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.device.protocols import Device
    from aengine.execute.launcher import Launcher

logger = logging.getLogger("aengine")


class Chores:
    """Does one piece at a time; nothing waits for it but the end of the engine.

    A piece competes with the steps for the interpreter: so there is a pause after each, and none is
    begun while the host program keeps the interpreter busy.

    Args:
        launcher: whose work it is.
        device: knows how busy the interpreter is.
        pause: seconds from one piece to the next.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        launcher: Launcher,
        device: Device,
        *,
        pause: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher = launcher
        self._device = device
        self._pause = pause
        self._clock = clock
        self._next = 0.0
        self._pool: DaemonPool | None = None
        self._running: asyncio.Future[None] | None = None

    def look(self) -> None:
        """Begin with what has come up, if nothing is being done."""
        if self._running is not None and not self._running.done():
            return
        if self._clock() < self._next or self._device.contended:
            return
        chore = self._launcher.chore()
        if chore is None:
            return
        self._next = self._clock() + self._pause
        if self._pool is None:
            # One thread for all of it: what a thread sets up for the device is kept by thread.
            self._pool = DaemonPool(1, "aengine-chores")
        self._running = asyncio.get_running_loop().run_in_executor(self._pool, _do, chore)

    async def aclose(self) -> None:
        """Wait for the piece that is being done, and end the thread."""
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._pool is not None:
            self._pool.shutdown()


def _do(chore: Callable[[], None]) -> None:
    try:
        chore()
    except Exception as error:
        # The steps do without it, only slower.
        logger.warning("background work failed: %s", error)
