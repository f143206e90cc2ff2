"""The parent's side of `worker`: start, ask, wait no longer than allowed, kill.

`subprocess` starts a fresh interpreter; nothing is forked with locks held, nothing of
`multiprocessing` (resource tracker, semaphores, start methods) is involved.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from aengine.errors import EngineClosedError, GrammarError, GrammarTimeoutError
from aengine.grammar.refusal import refused
from aengine.grammar.vocabulary import encode_vocabulary

if TYPE_CHECKING:
    from aengine.config import GrammarLimits
    from aengine.grammar.translate import GrammarSource
    from aengine.grammar.vocabulary import TokenizerInfo

# Starting Python, importing the library and reading the vocabulary takes 0.5 s on an idle machine.
_START_SECONDS = 60.0


class WorkerPool:
    """Worker processes, started when needed; at most one is kept for the next compile.

    Thread-safe. As many run at once as threads call `check`.
    """

    def __init__(self, tokenizer: TokenizerInfo, limits: GrammarLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._closed = False

    def check(self, source: GrammarSource) -> None:
        """Compile in a worker process; returns when that worked within the time limit.

        Raises:
            GrammarError: the library refuses the grammar, or the worker died (memory).
            GrammarTimeoutError: it took too long; the process was killed.
            EngineClosedError: the pool was closed.
        """
        worker = self._take()
        try:
            error = worker.ask(json.dumps(source.text), self._limits.compile_seconds)
        except TimeoutError as timeout:
            self._drop(worker)
            raise GrammarTimeoutError(
                f"compiling the grammar took longer than {self._limits.compile_seconds:g} s"
            ) from timeout
        except (OSError, EOFError, ValueError) as died:
            self._drop(worker)
            if self.closed:
                raise EngineClosedError("the engine was closed during a compile") from died
            raise GrammarError(
                "the grammar is too complex: the process that compiled it ended early "
                f"(it may use {self._limits.worker_bytes >> 20} MiB)",
                param="structured",
                value=source.spec,
            ) from died
        self._give_back(worker)
        if error is not None:
            raise refused(error, source)

    def close(self) -> None:
        """Kill all workers; a `check` that is waiting raises EngineClosedError. Idempotent."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            self._workers.clear()
            self._idle.clear()
        for worker in workers:
            worker.kill()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        with self._lock:
            return self._closed

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Processes alive now."""
        with self._lock:
            return tuple(worker.pid for worker in self._workers)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if self._idle:
                return self._idle.pop()
        try:
            worker = _Worker(self._tokenizer, self._limits)
        except (OSError, EOFError, ValueError) as error:
            raise GrammarError(
                f"this grammar needs a worker process to compile, and none can start: {error}",
                param="structured",
            ) from error
        with self._lock:
            keep = not self._closed
            if keep:
                self._workers.add(worker)
        if keep:
            return worker
        worker.kill()
        raise EngineClosedError("the engine is closed")

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            keep = not self._closed and not self._idle
            if keep:
                self._idle.append(worker)
        if not keep:
            self._drop(worker)

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.kill()


class _Worker:
    """One process. Used by one thread at a time; `kill` may come from another."""

    def __init__(self, tokenizer: TokenizerInfo, limits: GrammarLimits) -> None:
        package_parent = str(Path(__file__).resolve().parents[2])
        paths = [package_parent, os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "aengine.grammar.worker",
                str(limits.worker_bytes),
                str(limits.compile_seconds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self.pid = self._process.pid
        # If the owner forgets to close the pool, the process still goes with it.
        self._finalizer = weakref.finalize(self, _end, self._process)
        try:
            self._exchange(encode_vocabulary(tokenizer), time.monotonic() + _START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, line: str, seconds: float) -> str | None:
        """Send one line, wait for the answer's `error`.

        Raises:
            TimeoutError: no answer in time.
            OSError, EOFError, ValueError: the process ended or answered nonsense.
        """
        return self._exchange(line.encode() + b"\n", time.monotonic() + seconds)

    def kill(self) -> None:
        """End the process and reap it. Idempotent."""
        self._finalizer()

    def _exchange(self, data: bytes, deadline: float) -> str | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise OSError("the worker has no pipes")
        os.set_blocking(stdin.fileno(), False)
        answer = bytearray()
        pending = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    raise TimeoutError("no answer from the grammar worker")
                for key, _ in ready:
                    if key.fileobj is stdin:
                        pending = pending[os.write(stdin.fileno(), pending) :]
                        if not pending:
                            selector.unregister(stdin)
                    else:
                        chunk = os.read(stdout.fileno(), 65536)
                        if not chunk:
                            raise EOFError("the grammar worker ended")
                        answer += chunk
        error = json.loads(answer)["error"]
        return None if error is None else str(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
