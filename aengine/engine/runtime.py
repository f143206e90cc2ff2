"""Where the engine's coroutine runs: on a loop of its own in a thread, or in the caller's loop.

Same coroutine, same tests. Both are tasks that the engine owns (law 7): nothing of the user's
cancels them, and no scope stays open across `__aenter__` and `__aexit__`.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    Main = Callable[[], Coroutine[Any, Any, None]]


class Runtime(Protocol):
    """Runs the engine's main coroutine. `ended` is done when it is over, with its error if any."""

    ended: Future[None]

    @property
    def gone(self) -> bool:
        """Whether the loop is closed, so that the coroutine can never end."""
        ...

    def start(self, main: Main) -> None: ...

    def join(self, timeout: float | None) -> bool:
        """Block until the coroutine is over, if this thread may; True if it is over."""
        ...


class OwnLoop:
    """A thread with an event loop of its own: uvloop's where there is one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self.ended: Future[None] = Future()

    @property
    def gone(self) -> bool:
        return False

    def start(self, main: Main) -> None:
        # A daemon, so that an engine somebody forgot does not keep the interpreter from ending;
        # the engine's exit hook ends it in an orderly way before that.
        self._thread = threading.Thread(
            target=self._run, args=(main,), name=self._name, daemon=True
        )
        self._thread.start()

    def _run(self, main: Main) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(main())
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def join(self, timeout: float | None) -> bool:
        if self._thread is None or self._thread is threading.current_thread():
            return self.ended.done()
        self._thread.join(timeout)
        return not self._thread.is_alive()


class CallerLoop:
    """A task in the loop of whoever starts the engine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended: Future[None] = Future()

    @property
    def gone(self) -> bool:
        return self._loop is not None and self._loop.is_closed() and not self.ended.done()

    def start(self, main: Main) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(main(), name=self._name)
        self._task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # The loop is being torn down around us (asyncio.run cancels every task at its end).
            self.ended.set_result(None)
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def join(self, timeout: float | None) -> bool:
        return self.ended.done()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes uvloop's loops where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
