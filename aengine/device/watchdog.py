"""The watchdog: looks at a device regularly while it has work, and sleeps while it has none.

The driver does not call host functions after a context error, and a lost wake-up would look like a
slow kernel. So nobody relies on being told: this thread looks.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL = 0.025
"""Seconds between two looks: an error is known everywhere well within 100 ms."""
logger = logging.getLogger(__name__)


class Patrolled(Protocol):
    """What a watchdog looks at."""

    def patrol(self) -> bool:
        """Fire what was passed, fail everything if the device is lost; whether work is left."""
        ...


class Watchdog:
    """A thread that calls `device.patrol()` until it says that no work is left.

    Args:
        device: held weakly; the thread ends when it is collected.
        name: of the thread.
        interval: seconds between two looks.
    """

    def __init__(self, device: Patrolled, name: str, interval: float = INTERVAL) -> None:
        self._work = threading.Event()
        self._stop = threading.Event()
        device_ref = weakref.ref(device, self._end)
        self._thread = threading.Thread(
            target=_watch, args=(device_ref, self._work, self._stop, interval), daemon=True
        )
        self._thread.name = f"{name}-watchdog"
        self._thread.start()

    def wake(self) -> None:
        """There is work. Cheap when the watchdog is awake already."""
        if not self._work.is_set():
            self._work.set()

    def _end(self, _: object = None) -> None:
        self._stop.set()
        self._work.set()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _watch(
    device_ref: Callable[[], Patrolled | None],
    work: threading.Event,
    stop: threading.Event,
    interval: float,
) -> None:
    while not stop.is_set():
        work.wait()
        if stop.wait(interval):
            return
        # Before the look: work that comes after it sets the event again.
        work.clear()
        device = device_ref()
        if device is None:
            return
        try:
            busy = device.patrol()
        except Exception:
            logger.exception("the device's watchdog failed to look at it")
            busy = True
        if busy:
            work.set()
        del device
