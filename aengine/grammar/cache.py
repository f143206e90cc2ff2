"""Compiled grammars by spec: one compile however many ask, least recently used out first.

Compiles run in threads of this cache. Quick ones and heavy ones have separate threads, so that a
hostile schema that uses its whole time limit holds up no ordinary one. Each caller gets a future
of its own (`asyncio.wrap_future` awaits it): cancelling it withdraws that caller and nobody else.
Errors are not kept: a timeout under load must not condemn a schema for good.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aengine.errors import EngineClosedError, EngineOverloadedError
from aengine.threads import DaemonPool

if TYPE_CHECKING:
    from aengine.grammar.compiler import GrammarCompiler
    from aengine.grammar.protocol import CompiledGrammar
    from aengine.grammar.translate import GrammarSource
    from aengine.request import StructuredOutput

_LIGHT_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarCacheStats:
    """Counters since the cache was made; `entries`, `nbytes` and `pending` are of now."""

    entries: int
    nbytes: int
    pending: int
    hits: int
    misses: int
    evictions: int


@dataclass(slots=True)
class _Flight:
    """One compile under way and everybody who waits for it."""

    waiters: list[Future[CompiledGrammar]] = field(default_factory=list)


class GrammarCache:
    """Thread-safe. Threads start with the first compile; `close` ends them.

    Args:
        compiler: compiles what is not kept; closed together with the cache.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._limits = compiler.limits
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._nbytes = 0
        self._flights: dict[StructuredOutput, _Flight] = {}
        self._light: DaemonPool | None = None
        self._heavy: DaemonPool | None = None
        self._closed = False
        self._hits = self._misses = self._evictions = 0

    def get_nowait(self, structured: StructuredOutput) -> CompiledGrammar | None:
        """The compiled grammar if it is kept, else None; starts nothing."""
        with self._lock:
            return self._get(structured)

    def submit(self, structured: StructuredOutput) -> Future[CompiledGrammar]:
        """A future of the compiled grammar; joins a compile of the same spec that is under way.

        The future fails with GrammarError, GrammarTimeoutError or EngineClosedError.

        Raises:
            EngineOverloadedError: `limits.max_queued` compiles wait already.
            EngineClosedError: the cache was closed.
        """
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            grammar = self._get(structured)
            if grammar is not None:
                future.set_result(grammar)
                return future
            self._misses += 1
            flight = self._flights.get(structured)
            if flight is not None:
                flight.waiters.append(future)
                return future
            if len(self._flights) >= self._limits.max_queued:
                raise EngineOverloadedError(
                    f"{len(self._flights)} grammars are waiting to be compiled",
                    retry_after=self._limits.compile_seconds,
                )
            self._flights[structured] = flight = _Flight([future])
            if self._light is None:
                self._light = DaemonPool(_LIGHT_THREADS, "aengine-grammar")
            self._light.submit(self._prepare, structured, flight)
        return future

    def discard(self, structured: StructuredOutput) -> None:
        """Keep this grammar no longer: the next request compiles it anew."""
        with self._lock:
            self._remove(structured)

    def clear(self) -> None:
        """Keep nothing. Grammars in use live on until their requests end."""
        with self._lock:
            self._kept.clear()
            self._nbytes = 0

    def statistics(self) -> GrammarCacheStats:
        """Counters for logs and tests."""
        with self._lock:
            return GrammarCacheStats(
                entries=len(self._kept),
                nbytes=self._nbytes,
                pending=len(self._flights),
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def close(self) -> None:
        """Fail all that wait with EngineClosedError, kill the workers, end the threads. Idempotent.

        Blocks until a compile that runs inside this process is over (it cannot be stopped, but it
        was shown to be short enough).
        """
        with self._lock:
            self._closed = True
            flights, self._flights = self._flights, {}
            self._kept.clear()
            self._nbytes = 0
        for flight in flights.values():
            _fail(flight, EngineClosedError("the engine was closed"))
        self._compiler.close()
        for pool in (self._light, self._heavy):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _prepare(self, structured: StructuredOutput, flight: _Flight) -> None:
        """First half, in a light thread: check, then compile here or hand on to a heavy thread."""
        if self._abandoned(structured, flight):
            return
        try:
            source = self._compiler.prepare(structured)
            if not source.heavy:
                self._settle(structured, flight, self._compiler.compile_source(source))
                return
            with self._lock:
                if self._closed:
                    return
                if self._heavy is None:
                    self._heavy = DaemonPool(self._limits.max_heavy, "aengine-grammar-heavy")
                self._heavy.submit(self._compile_heavy, structured, flight, source)
        except BaseException as error:
            self._settle(structured, flight, error)

    def _compile_heavy(
        self, structured: StructuredOutput, flight: _Flight, source: GrammarSource
    ) -> None:
        if self._abandoned(structured, flight):
            return
        try:
            self._settle(structured, flight, self._compiler.compile_source(source))
        except BaseException as error:
            self._settle(structured, flight, error)

    def _abandoned(self, structured: StructuredOutput, flight: _Flight) -> bool:
        """Whether everybody who waited has gone; then the flight ends here."""
        with self._lock:
            if not all(waiter.cancelled() for waiter in flight.waiters):
                return False
            if self._flights.get(structured) is flight:
                del self._flights[structured]
            return True

    def _settle(
        self,
        structured: StructuredOutput,
        flight: _Flight,
        outcome: CompiledGrammar | BaseException,
    ) -> None:
        """Keep a grammar, and answer everybody who waits."""
        with self._lock:
            if self._flights.get(structured) is not flight:
                return  # closed meanwhile: all were answered then
            del self._flights[structured]
            if not isinstance(outcome, BaseException):
                self._keep(structured, outcome)
        if isinstance(outcome, BaseException):
            _fail(flight, outcome)
            return
        for waiter in flight.waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(outcome)

    def _get(self, structured: StructuredOutput) -> CompiledGrammar | None:
        grammar = self._kept.get(structured)
        if grammar is not None:
            self._kept.move_to_end(structured)
            self._hits += 1
        return grammar

    def _keep(self, structured: StructuredOutput, grammar: CompiledGrammar) -> None:
        if grammar.nbytes > self._limits.cache_bytes:
            return
        self._kept[structured] = grammar
        self._nbytes += grammar.nbytes
        while self._nbytes > self._limits.cache_bytes:
            oldest = next(iter(self._kept))
            self._remove(oldest)
            self._evictions += 1

    def _remove(self, structured: StructuredOutput) -> None:
        grammar = self._kept.pop(structured, None)
        if grammar is not None:
            self._nbytes -= grammar.nbytes


def _fail(flight: _Flight, error: BaseException) -> None:
    """Give every waiter an error of its own: raising one object in many tasks mixes tracebacks."""
    for waiter in flight.waiters:
        own = copy.copy(error)
        own.__cause__ = error.__cause__
        if waiter.set_running_or_notify_cancel():
            waiter.set_exception(own)
