"""`DaemonPool`: an executor whose threads do not keep the interpreter from ending.

The standard library's executor joins its threads before any exit handler runs: a thread that only
an exit handler could end (an engine that nobody closed, a compile in a worker process) would then
keep the program from ending.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class DaemonPool(Executor):
    """Like `ThreadPoolExecutor`, with daemon threads, which start when they are needed.

    Args:
        max_workers: most threads.
        name: their names begin so.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._most = max_workers
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._shut = False
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have a thread call `fn`.

        Raises:
            RuntimeError: after `shutdown`, or no thread can be started.
        """
        future: Future[R] = Future()
        with self._lock:
            if self._shut:
                raise RuntimeError("the pool was shut down")
            # The job first: a thread that found none would count as idle and then take it.
            self._jobs.put(_Job(future, partial(fn, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                self._start()
        return future

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(
            target=_work, args=(self._jobs, self._idle), name=name, daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                self._drop_queued()
                raise
        else:
            self._threads.append(thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more, and end the threads after what is queued. Idempotent.

        Args:
            wait: return when the threads have ended.
            cancel_futures: drop what is queued and has not begun.
        """
        with self._lock:
            self._shut = True
            if cancel_futures:
                self._drop_queued()
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()

    def _drop_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.future.cancel()


class _Job:
    """One call. What it holds is dropped before its future is done: whoever hears of the end finds
    nothing kept alive by this thread."""

    __slots__ = ("_call", "future")

    def __init__(self, future: Future[Any], call: Callable[[], Any]) -> None:
        self.future = future
        self._call: Callable[[], Any] | None = call

    def run(self) -> None:
        call, self._call = self._call, None
        future = self.future
        if call is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            del call
            future.set_exception(error)
            # The traceback holds this frame, and this frame the future.
            del future, self
        else:
            del call
            future.set_result(result)


def _work(jobs: queue.SimpleQueue[_Job | None], idle: threading.Semaphore) -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            idle.release()
            job = jobs.get()
        if job is None:
            jobs.put(None)  # for the next thread
            return
        job.run()
        # Not until the next job comes: that may be a long time.
        del job
