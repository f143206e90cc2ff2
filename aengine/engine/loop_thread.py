"""`LoopThread`: an event loop in a daemon thread, for threads that have none."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.engine.runtime import loop_factory
from aengine.errors import EngineClosedError, EngineStateError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

LOOK = 0.5
"""Seconds after which a blocked thread looks for signals."""


class LoopThread:
    """Starts at once. Any number of threads may call `run` at the same time.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._ready = threading.Event()
        self._calls: set[Future[Any]] = set()
        # A daemon: a program that forgot to close it ends all the same.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._main())
        finally:
            self._loop = None
            self._ready.set()
            for call in list(self._calls):  # came too late to be run
                call.cancel()

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._end.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until `work` is done in the loop; its result. An interrupt cancels it there.

        Raises:
            EngineClosedError: the thread was stopped, or is another process's.
            EngineStateError: this is the loop's own thread, which cannot wait for itself.
        """
        try:
            call = self._begin(work)
        except BaseException:
            work.close()
            raise
        try:
            while not wait((call,), timeout=LOOK).done:
                continue  # with a signal handler in between: another thread may have got the signal
            return call.result()
        except CancelledError:
            raise EngineClosedError("the engine is closed") from None
        finally:
            call.cancel()  # of no effect unless something else ended the wait
            self._calls.discard(call)

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._pid != os.getpid():
            raise EngineClosedError("an engine does not survive a fork: make one in this process")
        if threading.current_thread() is self._thread:
            raise EngineStateError("a callback of a blocking call cannot make a blocking call")
        if (loop := self._loop) is None:
            raise EngineClosedError("the engine is closed")
        call: Future[T]
        try:
            call = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:
            raise EngineClosedError("the engine is closed") from None
        self._calls.add(call)
        if self._loop is None:  # it ended just now, and may not have seen this call
            call.cancel()
        return call

    def stop(self, timeout: float | None = 2.0) -> None:
        """Cancel what runs, and end the thread. Idempotent.

        Args:
            timeout: most seconds to wait for that.
        """
        loop, end = self._loop, self._end
        if loop is not None and end is not None and self._pid == os.getpid():
            try:
                loop.call_soon_threadsafe(end.set)
            except RuntimeError:  # closed just now
                return
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)
