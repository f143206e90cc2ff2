"""`BlockingEngine`: the same engine for scripts and notebooks that do not speak asyncio.

It keeps a small event loop in a thread of its own to read the streams, so it works inside a running
loop too, and adds no second implementation.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

from aengine.engine.front import Engine
from aengine.engine.loop_thread import LoopThread
from aengine.errors import EngineClosedError

if TYPE_CHECKING:
    import os
    from collections.abc import Coroutine, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import TypeVar

    from aengine.engine.health import Health
    from aengine.engine.lifecycle import PauseMode
    from aengine.engine.messages import Prompt
    from aengine.engine.stream import Stream
    from aengine.errors import AEngineError
    from aengine.outputs import Chunk, EngineStats, RequestOutput
    from aengine.request import SamplingParams

    T = TypeVar("T")


class BlockingEngine:
    """An `Engine` whose calls block. Takes the same arguments. Usable from any number of threads.

    ::

        with BlockingEngine("smollm2-135m") as engine:
            print(engine.generate("Why is the sky blue?").text)

    Raises:
        ConfigError: an unknown option, or an impossible value.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._open(Engine(model, **options))

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """The facade of an engine that is not started yet; it then belongs to the facade."""
        facade = cls.__new__(cls)
        facade._open(engine)
        return facade

    def _open(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: LoopThread | None = None

    def start(self) -> Self:
        """Load the model and begin to serve. Idempotent while the engine runs.

        Raises:
            ModelLoadError, ConfigError, OutOfMemoryError: the model cannot be served.
            EngineClosedError: the engine was closed before.
        """
        if self._loop is not None:
            return self
        loop = LoopThread("aengine-blocking")
        try:
            loop.run(self._engine.start())
        except BaseException:
            self._engine.terminate()
            loop.stop()
            raise
        self._loop = loop
        weakref.finalize(self, loop.stop, 0.0).atexit = False
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=exc_type is None)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End the engine and its helper thread; arguments as of `Engine.aclose`. Idempotent.

        Raises:
            ConfigError: an impossible `timeout`.
        """
        loop, self._loop = self._loop, None
        if loop is None:
            self._engine.terminate()
            return
        try:
            loop.run(self._engine.aclose(drain=drain, timeout=timeout))
        except ValueError:  # an impossible timeout: nothing was done
            self._loop = loop
            raise
        except EngineClosedError:  # in a forked child, or closed by another thread
            self._engine.terminate()
        except BaseException:
            self.terminate()
            loop.stop()
            raise
        loop.stop()

    def terminate(self) -> None:
        """End the engine at once, as `Engine.terminate`, and its helper thread."""
        loop, self._loop = self._loop, None
        self._engine.terminate()
        if loop is not None:
            loop.stop()

    # -- requests ------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The whole answer; arguments and errors as `Engine.generate`."""
        return self._run(_gather(self._engine, prompt, params, options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Chunk]:
        """The answer as it comes; leaving the iteration early drops the request."""
        stream = self._run(_start(self._engine, prompt, params, options))
        try:
            while (chunk := self._run(_next(stream))) is not None:
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
        return self._run(self._engine.generate_many(prompts, params, **options))

    def abort(self, request_id: str) -> None:
        """Drop every request with this label, as `Engine.abort`."""
        self._engine.abort(request_id)

    # -- operation -----------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "abort") -> None:
        """Launch no more steps, as `Engine.pause`."""
        self._run(self._engine.pause(mode))

    def resume(self) -> None:
        """Launch steps again, as `Engine.resume`."""
        self._run(self._engine.resume())

    def sleep(self) -> None:
        """Give the KV cache's memory back, as `Engine.sleep`."""
        self._run(self._engine.sleep())

    def wake(self) -> None:
        """Make the KV cache again, as `Engine.wake`."""
        self._run(self._engine.wake())

    def update_weights(self, model: str | os.PathLike[str]) -> None:
        """Exchange the weights, as `Engine.update_weights`."""
        self._run(self._engine.update_weights(model))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as `Engine.reset_prefix_cache`."""
        self._run(self._engine.reset_prefix_cache())

    def stats(self) -> EngineStats:
        """A snapshot, as `Engine.stats`."""
        return self._run(self._engine.stats())

    def health(self) -> Health:
        """Whether the engine serves, as `Engine.health`."""
        return self._engine.health()

    @property
    def metrics(self) -> Any:
        """The registry with its series, as `Engine.metrics`."""
        return self._engine.metrics

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if (loop := self._loop) is None:
            work.close()
            raise self._engine.closed_error()
        return loop.run(work)

    def __repr__(self) -> str:
        return f"<BlockingEngine around {self._engine!r}>"


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
