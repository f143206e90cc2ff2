"""`Stream`: what `Engine.generate` returns. Iterate it, await it, abort it, or just drop it.

A class and not an async generator: a generator cannot be closed while it is being read, and its
clean-up needs an await that a second cancellation loses. Here every way out is one synchronous
abort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType
    from typing import Any

    from aengine.engine.channel import Channel
    from aengine.outputs import Chunk, RequestOutput


class Stream:
    """A running request.

    `async for chunk in stream` yields deltas (`Chunk`); `await stream` gives the whole
    (`RequestOutput`), also after a part was iterated. Leaving it in any way before its end
    (`break`, cancellation, a timeout, garbage collection) aborts the request.
    """

    __slots__ = ("__weakref__", "_channel")

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def request_id(self) -> str:
        """The label given to `generate`, or the one made for it."""
        return self._channel.request_id

    def abort(self) -> None:
        """Drop the request: synchronous, from any thread, any number of times.

        The reader, if there is one, gets what was generated and `finish_reason="abort"`.
        """
        self._channel.abort()

    async def aclose(self) -> None:
        """Same as `abort()`, in the form that `contextlib.aclosing` wants."""
        self._channel.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next delta.

        Raises:
            StopAsyncIteration: after the last chunk, which carries `finish_reason`.
            RequestError: this request failed.
            EngineDeadError, EngineClosedError: the engine ended.
            ReaderConflictError: another task reads this stream at the same time.
        """
        chunk = await self._channel.next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._gather().__await__()

    async def _gather(self) -> RequestOutput:
        while await self._channel.next() is not None:
            pass
        if (error := self._channel.deadline_error()) is not None:
            raise error
        return self._channel.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.abort()

    def __del__(self) -> None:
        # getattr: __init__ may not have run. abort() is a no-op for a finished request.
        if (channel := getattr(self, "_channel", None)) is not None:
            channel.abort()

    def __repr__(self) -> str:
        state = "finished" if self._channel.finished else "running"
        return f"<Stream {self.request_id} {state}>"
