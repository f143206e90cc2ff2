"""`Channel`: the caller's side of one request. Lives in the caller's loop, holds what is unread.

The engine keeps the channel, the user keeps a `Stream`; neither keeps the other alive through a
reference cycle, so that dropping the stream is seen at once. Unread deltas of one completion are
merged into one chunk: a slow reader finds its text coalesced and memory stays bounded by it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aengine.errors import AEngineError, DeadlineExceededError, ReaderConflictError
from aengine.outputs import Chunk, CompletionOutput, RequestMetrics, RequestOutput, Usage
from aengine.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.batch import TokenLogprobs
    from aengine.engine.spans import OpenSpan


@dataclass(slots=True)
class _Gathered:
    """Everything delivered for one completion index so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *chunk.logprobs]
        if chunk.finish_reason is not None:
            self.last = chunk


def merge(older: Chunk, newer: Chunk) -> Chunk:
    """One chunk that says what the two said."""
    logprobs = older.logprobs
    if newer.logprobs is not None:
        logprobs = (*(older.logprobs or ()), *newer.logprobs)
    return replace(
        newer,
        text=older.text + newer.text,
        token_ids=older.token_ids + newer.token_ids,
        logprobs=logprobs,
        prompt_logprobs=older.prompt_logprobs or newer.prompt_logprobs,
    )


class Channel:
    """What the engine delivered to one request and nobody has read yet.

    All methods but `abort` and the constructor run in the caller's loop. `abort` may be called from
    any thread, any number of times, and never blocks.
    """

    def __init__(
        self,
        *,
        request_id: str,
        n: int,
        loop: asyncio.AbstractEventLoop,
        on_abort: Callable[[Channel], None],
    ) -> None:
        self.request_id = request_id
        self.n = n
        self.loop = loop
        self._on_abort = on_abort
        self._unread: dict[int, Chunk] = {}
        self._gathered = [_Gathered() for _ in range(n)]
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._open = n
        self._error: AEngineError | None = None
        self._abort_asked = False
        self.span: OpenSpan | None = None
        """What tells its end to the host's tracing, if anybody does. The engine's."""

    @property
    def finished(self) -> bool:
        """Whether the engine will deliver nothing more."""
        return self._open == 0 or self._error is not None

    def abort(self) -> None:
        """Ask the engine to drop the request."""
        if not self.finished and not self._abort_asked:
            self._abort_asked = True
            self._on_abort(self)

    def deliver(self, chunk: Chunk) -> None:
        """Take a chunk from the engine."""
        if self.finished:
            return
        self._gathered[chunk.index].add(chunk)
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self._open -= 1
        older = self._unread.get(chunk.index)
        self._unread[chunk.index] = chunk if older is None else merge(older, chunk)
        self._wake()

    def fail(self, error: AEngineError) -> None:
        """End with an error, which the reader gets after what is unread."""
        if not self.finished:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Chunk | None:
        """The next chunk, or None at the end.

        Raises:
            AEngineError: the request failed; everything delivered before was returned before.
            ReaderConflictError: another task is reading already, or another loop's.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error.fresh()
            if self._open == 0:
                return None
            await self._wait()
        index = next(iter(self._unread))
        return self._unread.pop(index)

    async def _wait(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise ReaderConflictError(
                "a stream is read in the event loop that called generate()",
                request_id=self.request_id,
            )
        if self._waiter is not None:
            raise ReaderConflictError(
                f"request {self.request_id!r} already has a reader: a stream has one at a time",
                request_id=self.request_id,
            )
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            # Synchronous on purpose: anything awaited here is lost under a second cancellation.
            self.abort()
            raise
        finally:
            self._waiter = None

    def result(self) -> RequestOutput:
        """Everything delivered, as one result.

        Raises:
            AEngineError: the request failed.
        """
        if self._error is not None:
            raise self._error.fresh()
        assert self._open == 0
        completions = tuple(
            CompletionOutput(
                index=index,
                text="".join(part.texts),
                token_ids=tuple(part.token_ids),
                finish_reason=part.last.finish_reason,
                stop_reason=part.last.stop_reason,
                logprobs=None if part.logprobs is None else tuple(part.logprobs),
            )
            for index, part in enumerate(self._gathered)
            if part.last is not None and part.last.finish_reason is not None
        )
        lasts = [part.last for part in self._gathered if part.last is not None]
        usages = [last.usage for last in lasts if last.usage is not None]
        first = lasts[0]
        return RequestOutput(
            request_id=self.request_id,
            completions=completions,
            usage=Usage(
                prompt_tokens=max((u.prompt_tokens for u in usages), default=0),
                cached_tokens=max((u.cached_tokens for u in usages), default=0),
                completion_tokens=sum(u.completion_tokens for u in usages),
            ),
            metrics=first.metrics or RequestMetrics(),
            prompt_logprobs=self._prompt_logprobs,
        )

    def deadline_error(self) -> AEngineError | None:
        """The error of a request whose deadline passed before it produced a single token."""
        parts = self._gathered
        if all(p.last and p.last.finish_reason is FinishReason.DEADLINE for p in parts) and not any(
            p.token_ids for p in parts
        ):
            return DeadlineExceededError(
                "the deadline passed before the first token", request_id=self.request_id
            )
        return None
