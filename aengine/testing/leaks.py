"""`LeakCheck`: what a test opened and left open, by name.

Only looks, from outside: at the streams that watched engines gave out, at the tasks of the test's
loop, at threads. What goes away by itself within a moment (a dropped stream, a cancelled task) is
no leak.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable

    from aengine.testing.fake import WatchedEngine

GRACE = 0.25
"""Seconds that an end on its way is waited for, in so many looks."""
LOOKS = 50
PACKAGE = str(Path(__file__).resolve().parents[1])
EXECUTORS = ("asyncio_", "uvloop_", "AnyIO worker thread", "ThreadPoolExecutor-")
"""Their threads end with their loop or pool, not with a test."""
ENGINE_THREADS = ("aengine-text", "aengine-masks", "cpu-", "cuda-", "aengine-blocking")
KINDS = ("streams", "tasks", "engines", "threads")


class LeakFound(Exception):
    """A test left something open; the message names it."""


class LeakCheck:
    """Compares what is open after a test with what was open before it.

    Args:
        engines: the engines whose streams are watched.
        ignore: kinds of leaks to pass over: "streams", "tasks", "engines", "threads".

    Raises:
        ValueError: there is no such kind.
    """

    def __init__(self, engines: WeakSet[WatchedEngine], ignore: Iterable[str] = ()) -> None:
        self._ignore = frozenset(ignore)
        if unknown := self._ignore - set(KINDS):
            raise ValueError(f"no kinds of leaks: {sorted(unknown)}; there are {', '.join(KINDS)}")
        self._engines = engines
        self._old_engines = WeakSet(engines)
        self._old_streams = WeakSet(s for engine in engines for s in engine.open_streams())
        self._old_threads = WeakSet(threading.enumerate())

    def around(
        self, test: Callable[..., Coroutine[Any, Any, Any]]
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The same test, followed by the check in the same loop."""

        @functools.wraps(test)
        async def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                before = asyncio.all_tasks()
            except RuntimeError:  # not asyncio's loop: only pytest's own thread can look
                return await test(*args, **kwargs)
            result = await test(*args, **kwargs)
            await self.settle_in_loop(before)
            return result

        return checked

    async def settle_in_loop(self, before: Collection[asyncio.Task[Any]]) -> None:
        """Wait a moment for what is ending; then name what is not, and end it.

        Raises:
            LeakFound: something stayed open.
        """
        await asyncio.sleep(0)
        # Held from here on: a loop knows its tasks only weakly.
        tasks = [] if "tasks" in self._ignore else _new_tasks(before)
        if self._found(tasks):
            gc.collect()  # a stream dropped in a cycle
        for _ in range(LOOKS):
            if not self._found(tasks):
                return
            await asyncio.sleep(GRACE / LOOKS)
        if found := self._found(tasks):
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=GRACE)
            for engine in self._end():
                await engine.aclose(drain=False)
            raise LeakFound(_message(found))

    def settle(self) -> None:
        """The same for a test without a loop, or whose loop nobody can ask.

        Raises:
            LeakFound: something stayed open.
        """
        if self._found():
            gc.collect()
        for _ in range(LOOKS):
            if not self._found():
                return
            time.sleep(GRACE / LOOKS)
        if found := self._found():
            for engine in self._end():
                engine.terminate()
            raise LeakFound(_message(found))

    def _end(self) -> list[WatchedEngine]:
        """Abort the streams that are left; the engines that the caller has to close."""
        for stream in self._streams():
            stream.abort()
        return [] if "engines" in self._ignore else self._new_engines()

    def _found(self, tasks: Collection[asyncio.Task[Any]] = ()) -> list[str]:
        found = [f"task {_describe(task)} still runs" for task in tasks if not task.done()]
        if "streams" not in self._ignore:
            found += [f"stream {s!r} was neither finished nor dropped" for s in self._streams()]
        if "engines" not in self._ignore:
            found += [f"engine {engine!r} was not closed" for engine in self._new_engines()]
        if "threads" not in self._ignore:
            found += [f"thread {thread.name!r} still runs" for thread in self._threads()]
        return found

    def _streams(self) -> list[Any]:
        streams = [stream for engine in self._engines for stream in engine.open_streams()]
        return [stream for stream in streams if stream not in self._old_streams]

    def _new_engines(self) -> list[WatchedEngine]:
        return [e for e in self._engines if e.open and not e.shared and e not in self._old_engines]

    def _threads(self) -> list[threading.Thread]:
        open_engines = [engine for engine in self._engines if engine.open]
        expected = EXECUTORS + (ENGINE_THREADS if open_engines else ())
        own = {f"aengine-{id(engine):x}" for engine in open_engines}
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self._old_threads
            and thread.name not in own
            and not thread.name.startswith(expected)
        ]


def _new_tasks(before: Collection[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    new = asyncio.all_tasks() - set(before) - {asyncio.current_task()}
    return [task for task in new if not _is_ours(task)]


def _is_ours(task: asyncio.Task[Any]) -> bool:
    """Whether a task belongs to an engine in this loop, which is named by itself."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and str(code.co_filename).startswith(PACKAGE)


def _describe(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return f"{task.get_name()!r} ({getattr(coroutine, '__qualname__', coroutine)!s})"


def _message(found: list[str]) -> str:
    return "the test leaked:\n" + "\n".join(f"  - {line}" for line in found)
