"""`Swapping`: the copies of KV blocks to and from the host, on a stream of their own.

The scheduler decides them and counts them as launched; here they are launched at once, awaited
beside the step loop, and reported. A step never waits for a copy: a sequence on its way back takes
part when its copy has ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.batch import BlockCopy
    from aengine.device.future import DeviceFuture
    from aengine.device.protocols import Stream
    from aengine.engine.parts import EngineParts

logger = logging.getLogger("aengine")


class Swapping:
    """Launches and follows copies.

    Args:
        parts: the loaded engine.
        wake: makes the step loop come round.
    """

    def __init__(self, parts: EngineParts, wake: Callable[[], None]) -> None:
        self._scheduler = parts.scheduler
        self._blocks = parts.host_blocks
        self._stream: Stream | None = None
        if self._blocks is not None:
            self._stream = parts.device.stream("copy")
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Copies that have not been reported."""
        return len(self._tasks)

    def begin(self) -> None:
        """Launch what the scheduler has decided. To be called after each of its decisions.

        Raises:
            DeviceError: the device is closed or lost.
        """
        if self._blocks is None or self._stream is None:
            return
        if self._fault is not None:
            raise self._fault
        for copy in self._scheduler.take_copies():
            done = self._stream.launch(self._blocks.copy_blocks, copy)
            task = asyncio.get_running_loop().create_task(self._follow(copy, done))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _follow(self, copy: BlockCopy, done: DeviceFuture[None]) -> None:
        try:
            await done
            ok = True
        except DeviceError as error:
            # If the device is lost, the next step says so.
            logger.warning("copying KV blocks failed, they are computed again: %s", error)
            ok = False
        self._scheduler.copied(copy.copy_id, ok=ok)
        self.begin()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._fault = self._fault or task.exception()
        self._wake()

    async def aclose(self) -> None:
        """Wait for no copy any more. What the device has begun ends when the device closes."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
