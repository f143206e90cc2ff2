"""`BlockingEngine`: the same engine for scripts and notebooks that do not speak asyncio.

It keeps a small event loop in a thread of its own to read the streams (anyio's portal), so it works
inside a running loop too, and adds no second implementation.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from anyio.from_thread import start_blocking_portal

from aengine.engine.front import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from anyio.from_thread import BlockingPortal

    from aengine.engine.messages import Prompt
    from aengine.engine.stream import Stream
    from aengine.errors import AEngineError
    from aengine.outputs import Chunk, EngineStats, RequestOutput
    from aengine.request import SamplingParams


class BlockingEngine:
    """An `Engine` whose calls block. Takes the same arguments.

    ::

        with BlockingEngine("smollm2-135m") as engine:
            print(engine.generate("Why is the sky blue?").text)

    Raises:
        ConfigError: an unknown option, or an impossible value.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._open(Engine(model, **options))

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """The facade of an engine that is not started yet; it then belongs to the facade."""
        facade = cls.__new__(cls)
        facade._open(engine)
        return facade

    def _open(self, engine: Engine) -> None:
        self._engine = engine
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        with self._stack:
            portal = self._stack.enter_context(start_blocking_portal())
            portal.call(self._engine.start)
            self._portal = portal
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=exc_type is None)

    def close(self, *, drain: bool = True) -> None:
        """End the engine and its helper thread. Idempotent."""
        portal, self._portal = self._portal, None
        if portal is not None:
            with self._stack:
                portal.call(_aclose, self._engine, drain)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The whole answer; arguments and errors as `Engine.generate`."""
        result: RequestOutput = self._running().call(_gather, self._engine, prompt, params, options)
        return result

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """The answer as it comes; leaving the iteration early drops the request."""
        portal = self._running()
        stream = portal.call(_start, self._engine, prompt, params, options)
        try:
            while (chunk := portal.call(_next, stream)) is not None:
                yield chunk
        finally:
            stream.abort()

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput | AEngineError]:
        """The answers to many prompts; arguments and errors as `Engine.generate_many`.

        Callbacks run in the facade's helper thread.
        """
        many = partial(self._engine.generate_many, prompts, params, **options)
        return self._running().call(many)

    def stats(self) -> EngineStats:
        """A snapshot, as `Engine.stats`."""
        return self._running().call(self._engine.stats)

    def _running(self) -> BlockingPortal:
        if self._portal is None:
            raise self._engine.closed_error()
        return self._portal


async def _start(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
) -> Stream:
    return engine.generate(prompt, params, **options)


async def _gather(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
) -> RequestOutput:
    return await engine.generate(prompt, params, **options)


async def _next(stream: Stream) -> Chunk | None:
    return await anext(stream, None)


async def _aclose(engine: Engine, drain: bool) -> None:
    await engine.aclose(drain=drain)
