"""Ending in bounded time: a device may never report and a thread may never return, closing does.

Whatever could block is waited for in a daemon thread. What has not ended when the time is up goes
on by itself and keeps what it works on alive (law 3): memory that a device may still write to is
given to nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from typing import TYPE_CHECKING

from aengine.threads import DaemonPool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

logger = logging.getLogger("aengine")

GRACE = 1.5
"""Seconds that a closing engine, with no request left, waits for what the device has begun."""
EXIT_GRACE = 1.2
"""The same at the interpreter's exit, which has three seconds for everything."""
CLOSING = 10.0
"""Seconds for giving everything back when nothing is known to hang."""


async def ended(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Wait at most so long for `work`; then cancel it."""
    task = asyncio.get_running_loop().create_task(work)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
    elif not task.cancelled() and (error := task.exception()) is not None:
        logger.error("closing the engine", exc_info=error)


async def closed(close: Callable[[], object], seconds: float | None) -> bool:
    """Wait at most so long for `close`, which blocks; whether it is done."""
    pool = DaemonPool(1, "aengine-closing")
    try:
        closing = asyncio.wrap_future(pool.submit(close))
    except RuntimeError:  # the interpreter is ending and starts no threads
        close()
        return True
    finally:
        pool.shutdown(wait=False)
    done, _ = await asyncio.wait([closing], timeout=seconds)
    if done:
        pool.shutdown()  # of a thread that has nothing left to do: nobody finds it afterwards
    if done and (error := closing.exception()) is not None:
        logger.error("closing the engine", exc_info=error)
    return bool(done)


def close_later(close: Callable[[], object]) -> None:
    """Call what blocks in a thread that nobody waits for."""
    pool = DaemonPool(1, "aengine-closing")
    with contextlib.suppress(RuntimeError):  # the interpreter is ending and starts no threads
        pool.submit(close)
    pool.shutdown(wait=False)


def trim_heap() -> None:
    """Give freed memory back to the system.

    The C library keeps the pieces of a model in the heaps of threads that are gone: five engines
    one after another took half a gigabyte more than one, though every one of them was collected.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


async def outcome(future: asyncio.Future[None]) -> None:
    """Await it; cancelling that leaves it alone, and nobody misses its error then."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([future])
    future.result()
