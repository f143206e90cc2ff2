"""`FakeEngine`: a scripted engine that remembers its streams; `EngineFactory`: one for a session.

A test's engine keeps weak references to the streams it gave out, so that the leak check can name
the request that nobody finished.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from aengine.engine.front import Engine
from aengine.errors import ConfigError
from aengine.testing.engine import scripted
from aengine.testing.replies import Replies
from aengine.testing.scripted import Faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.engine.messages import Prompt
    from aengine.engine.stream import Stream
    from aengine.testing.replies import ReplySource


class WatchedEngine(Engine):
    """An engine that knows which of its streams are still open."""

    shared = False
    """Whether it belongs to a session, not to a test."""

    def generate(self, prompt: Prompt, *args: Any, **options: Any) -> Stream:
        """See `Engine.generate`."""
        stream = super().generate(prompt, *args, **options)
        self._given().add(stream)
        return stream

    def open_streams(self) -> list[Stream]:
        """The streams that somebody holds and that have not ended."""
        return [stream for stream in self._given() if not stream._channel.finished]

    @property
    def open(self) -> bool:
        """Whether it was started and has not ended."""
        return self.health().state in ("starting", "running", "closing")

    def _given(self) -> weakref.WeakSet[Stream]:
        given: weakref.WeakSet[Stream] = self.__dict__.setdefault("_streams", weakref.WeakSet())
        return given


class FakeEngine(WatchedEngine):
    """A scripted engine. See `fake_engine`."""

    faults: Faults

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """See `Engine.aclose`. A dropped completion comes when that is over, to end its thread."""
        try:
            await super().aclose(drain=drain, timeout=timeout)
        finally:
            self.faults.release()

    def terminate(self) -> None:
        """See `Engine.terminate`. A dropped completion comes when that is over."""
        super().terminate()
        self.faults.release()


def fake_engine(
    replies: ReplySource = "Hello from the fake engine.",
    *,
    faults: Faults | None = None,
    num_blocks: int = 4096,
    max_model_len: int = 8192,
    **options: Any,
) -> FakeEngine:
    """An engine that answers what the test says, token by token, without a model.

    Scheduling, streaming, cancellation, structured output and errors are a real engine's; a token
    is a byte. The same requests give the same answers in whatever order they come.

    Args:
        replies: one answer for all prompts; a mapping of a part of the prompt to the answer, whose
            first match decides; or a function of the prompt's text.
        faults: what goes wrong, and when.
        num_blocks: KV blocks.
        max_model_len: longest prompt plus answer, in bytes.
        options: as of `aengine.Engine`.

    Raises:
        ConfigError: an unknown option, or an impossible value.
    """
    faults = faults or Faults()
    engine = scripted(
        FakeEngine,
        Replies(replies),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        faults=faults,
        **options,
    )
    engine.faults = faults
    return engine


class EngineFactory:
    """Engines that outlive a test: a real model is loaded once and shared by all that ask.

    Args:
        watch: told of every engine made.
    """

    def __init__(self, watch: Callable[[WatchedEngine], None]) -> None:
        self._watch = watch
        self._shared: dict[str, WatchedEngine] = {}
        self._fakes: list[weakref.ref[WatchedEngine]] = []

    async def __call__(self, model: str, **options: Any) -> Engine:
        """A running engine, the same one for the same arguments, usable from every event loop.

        It is closed at the end of the session. If a test closed or killed it, a new one is loaded.

        Args:
            model, options: as of `aengine.Engine`.

        Raises:
            ConfigError: `loop="caller"` (a shared engine serves loops that come and go), or a bad
                option.
            ModelLoadError, OutOfMemoryError: the model cannot be served.
        """
        if options.get("loop", "own") != "own":
            raise ConfigError("a shared engine runs in its own loop: leave out loop=")
        key = repr((model, sorted(options.items())))
        engine = self._shared.get(key)
        if engine is None or engine.health().state not in ("new", "starting", "running"):
            engine = self._shared[key] = WatchedEngine(model, **options)
            engine.shared = True
            self._watch(engine)
        return await engine.start()

    def fake(self, replies: ReplySource = "Hello from the fake engine.", **how: Any) -> FakeEngine:
        """A fake engine for a fixture of a wide scope, to be closed by that fixture.

        Arguments and errors as of `fake_engine`.
        """
        engine = fake_engine(replies, **how)
        engine.shared = True
        self._watch(engine)
        self._fakes.append(weakref.ref(engine))
        return engine

    def close(self) -> list[WatchedEngine]:
        """Close the shared engines. Returns the fakes that nobody closed."""
        for engine in self._shared.values():
            engine.terminate()
        self._shared.clear()
        return [fake for ref in self._fakes if (fake := ref()) is not None and fake.open]
