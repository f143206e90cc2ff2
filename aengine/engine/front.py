"""The front door: `Engine`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self

from aengine.config import EngineConfig, check_seconds
from aengine.engine.channel import Channel
from aengine.engine.contexts import carried
from aengine.engine.ending import CLOSING, GRACE, closed, outcome, trim_heap
from aengine.engine.exit_hook import ExitHook
from aengine.engine.health import EngineState, Health
from aengine.engine.loading import load_parts
from aengine.engine.many import generate_many
from aengine.engine.messages import Abort, AbortById, Close, Submit
from aengine.engine.operable import Operable
from aengine.engine.prompts import check_options, check_prompt
from aengine.engine.runtime import CallerLoop, OwnLoop
from aengine.engine.service import EngineService
from aengine.engine.stream import Stream
from aengine.errors import ConfigError, EngineStateError, InvalidRequestError, shown
from aengine.request import SamplingParams

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from aengine.engine.many import Advance
    from aengine.engine.messages import Prompt
    from aengine.engine.parts import EngineParts, PartsLoader
    from aengine.engine.runtime import Runtime
    from aengine.errors import AEngineError
    from aengine.outputs import EngineStats, RequestOutput

    Progress = Callable[[str, int, int], None]


logger = logging.getLogger("aengine")

NEVER = 1e18
"""Seconds: a deadline that is later than that is as good as none."""


class Engine(Operable):
    """A language model inside this process, spoken to with asyncio.

    ::

        async with Engine("smollm2-135m") as engine:
            async for chunk in engine.generate("Why is the sky blue?"):
                print(chunk.text, end="")

    Building one does no I/O and needs no event loop. With `loop="own"` (the default) the engine
    works on a loop in a thread of its own, and may be used from any number of loops and threads,
    also from successive `asyncio.run` calls; with `loop="caller"` it works in the loop that starts
    it, which then must stay free. Works on asyncio and uvloop; trio is not supported.

    Args:
        model: a Hugging Face folder, a `.gguf` file, a hub id, or a bundled alias.
        on_progress: called with (stage, done, total) while the engine starts.
        options: the fields of `EngineConfig`, `SchedulerConfig`, `KVCacheConfig` (prefixed with
            `kv_cache_`) and `GrammarLimits` (prefixed with `grammar_`).

    Raises:
        ConfigError: an unknown option, or an impossible value.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        on_progress: Progress | None = None,
        **options: Any,
    ) -> None:
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress={shown(on_progress)} must be callable")
        self.config = EngineConfig.from_options(model, options)
        self._open(self.config, load_parts, on_progress)

    @classmethod
    def from_parts(
        cls, config: EngineConfig, loader: PartsLoader, on_progress: Progress | None = None
    ) -> Self:
        """An engine whose parts come from `loader`: how `aengine.testing` makes scripted ones."""
        engine = cls.__new__(cls)
        engine.config = config
        engine._open(config, loader, on_progress)
        return engine

    def _open(
        self, config: EngineConfig, loader: PartsLoader, on_progress: Progress | None
    ) -> None:
        self._service = EngineService(config, loader, on_progress)
        self._runtime: Runtime | None = None
        self._finalizer: weakref.finalize[[EngineService, Runtime], Engine] | None = None
        self._labels = itertools.count(1)

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Load the model and begin to serve. Idempotent while the engine runs.

        Raises:
            ModelLoadError, ConfigError, OutOfMemoryError: the model cannot be served.
            EngineClosedError: the engine was closed before.
        """
        service = self._service
        if service.forked:
            raise service.closed_error()
        if service.state is EngineState.NEW:
            name = f"aengine-{id(self):x}"
            runtime = OwnLoop(name) if self.config.loop == "own" else CallerLoop(name)
            self._runtime = runtime
            self._finalizer = weakref.finalize(self, _forget, service, runtime)
            self._finalizer.atexit = False
            service.starting(ExitHook(service, runtime))
            runtime.start(service.main)
        elif service.state not in (EngineState.STARTING, EngineState.RUNNING):
            raise service.closed_error()
        try:
            await outcome(asyncio.wrap_future(service.started))
        except asyncio.CancelledError:
            _stop(service)
            await self._ended(2 * GRACE)
            raise
        except BaseException:
            await self._ended(CLOSING)
            raise
        return self

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End the engine and give everything back. Idempotent; may be called from any loop.

        It always ends: a device that does not report within 1.5 seconds after the last request
        is left alone, which is logged; its memory is given back if it ever reports. Cancelling it
        ends the requests at once.

        Args:
            drain: let running and queued requests finish; otherwise they end at once.
            timeout: seconds for that before they are aborted; None: `shutdown_timeout`.

        Raises:
            ConfigError: an impossible `timeout`.
        """
        patience = self.config.shutdown_timeout if timeout is None else timeout
        check_seconds("timeout", patience)
        if self._runtime is None or self._service.forked:
            self._service.state = EngineState.CLOSED
            return
        patience = patience if drain else 0.0
        self._service.ask_close(Close(drain=drain, timeout=patience, grace=GRACE))
        try:
            await self._ended(patience + 2 * GRACE + (CLOSING if drain else 0.0))
        except asyncio.CancelledError:
            _stop(self._service)
            raise

    async def _ended(self, seconds: float) -> None:
        assert self._runtime is not None
        over = asyncio.wrap_future(self._runtime.ended)
        # wait(), not a plain await: how it ended has been told to whoever was concerned.
        waste = self._service.abandoned or self._runtime.gone
        await asyncio.wait([over], timeout=0.0 if waste else seconds)
        if not over.done() and not self._service.abandoned:
            # Its loop is closed, or stuck in somebody's callback.
            logger.error("the loop of %r does not come round: it ends without", self)
            await closed(self._service.abandon(), GRACE)
        if self._finalizer is not None and self._finalizer.alive:
            await closed(trim_heap, GRACE)
        self._detach()

    def terminate(self) -> None:
        """End the engine at once, without waiting for requests. Synchronous, from any thread.

        With `loop="own"` it returns when the engine's thread has ended (a step that is being
        computed ends first, if it does so within 1.5 seconds); with `loop="caller"` the engine
        ends when the loop next runs.
        """
        if self._runtime is None or self._service.forked:
            self._service.state = EngineState.CLOSED
            return
        _stop(self._service)
        self._runtime.join(timeout=2 * GRACE)
        self._detach()

    def _detach(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an exception nobody is left to read: requests that still run are not waited for.
        await self.aclose(drain=exc_type is None)

    def __del__(self) -> None:
        service = getattr(self, "_service", None)
        unclosed = (EngineState.STARTING, EngineState.RUNNING)
        if service is not None and service.state in unclosed and not service.forked:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Engine {self.config.model!r} {self._service.state.value}>"

    # -- requests ------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> Stream:
        """Start a request. Returns at once; the answer comes through the returned stream.

        Args:
            prompt: text (taken as it is), token ids, or chat messages (`{"role", "content"}`
                mappings; the model's chat template applies).
            params: how to sample and when to stop; None: the defaults.
            request_id: a label for logs, metrics and `abort()`; it need not be unique.
            priority: lower is more urgent.
            deadline: seconds from now after which the request ends with what it has produced.
            cache_salt: requests share cached prefixes only with requests of the same salt.

        Raises:
            InvalidRequestError: what can be rejected at once (the rest is raised by the stream).
            EngineClosedError, EngineDeadError: the engine takes no requests.
            EngineStateError: the engine is asleep.
            RuntimeError: no event loop is running; see `aengine.BlockingEngine`.
        """
        service = self._service
        if service.state is not EngineState.RUNNING or service.forked:
            raise service.closed_error()
        if service.asleep:
            raise EngineStateError("the engine is asleep: wake() it")
        check_prompt(prompt)
        params = SamplingParams() if params is None else params
        check_options(params, priority, deadline, request_id, cache_salt)
        channel = Channel(
            request_id=request_id or f"req-{next(self._labels)}",
            n=params.n,
            loop=asyncio.get_running_loop(),
            on_abort=_Abort(service),
        )
        if service.spans is not None:
            channel.span = service.spans.begin(prompt, params)
        now = service.clock()
        taken = service.post(
            Submit(
                channel=channel,
                prompt=prompt if isinstance(prompt, str) else list(prompt),  # type: ignore[arg-type]
                params=carried(params),
                priority=priority,
                arrival=now,
                deadline=None if deadline is None else now + min(deadline, NEVER),
                cache_salt=cache_salt,
            )
        )
        if not taken:
            raise service.closed_error()
        return Stream(channel)

    async def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        concurrency: int | None = None,
        return_exceptions: bool = False,
        on_progress: Advance | None = None,
        progress: bool = False,
        **options: Any,
    ) -> list[RequestOutput | AEngineError]:
        """The answers to many prompts, in the order of the prompts.

        Waits where `generate` would raise `EngineOverloadedError`. Cancelling it drops every
        request that has not finished.

        Args:
            prompts: each as for `generate`; taken from the iterable when there is room.
            params: for all prompts, or a list with one for each.
            concurrency: most requests at once; None: twice `max_num_seqs`.
            return_exceptions: put the error of a prompt in the place of its answer. Otherwise the
                first error ends the batch and is raised.
            on_progress: called in this loop with (prompts done, prompts in all or None); what it
                raises ends the batch.
            progress: show a bar on stderr.
            options: `priority`, `deadline`, `cache_salt`, `request_id` of every request.

        Raises:
            InvalidRequestError: `concurrency` or `params` make no sense.
            AEngineError: what a prompt raised, unless `return_exceptions`.
        """
        return await generate_many(
            self,
            prompts,
            params,
            concurrency=concurrency,
            return_exceptions=return_exceptions,
            on_progress=on_progress,
            progress=progress,
            options=options,
        )

    def abort(self, request_id: str) -> None:
        """Drop every request with this label; unknown labels are ignored. From any thread.

        Raises:
            InvalidRequestError: `request_id` is not a string.
        """
        if not isinstance(request_id, str):
            raise InvalidRequestError(
                f"request_id={shown(request_id)} must be a string",
                param="request_id",
                value=request_id,
            )
        self._service.post(AbortById(request_id))

    # -- sight ---------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """A snapshot, taken between two steps.

        Raises:
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        stats: EngineStats = await asyncio.wrap_future(self._service.call(self._service.stats))
        return stats

    def health(self) -> Health:
        """Whether the engine serves, without asking its loop."""
        service = self._service
        return Health(
            state=service.state.value,
            alive=service.state is EngineState.RUNNING and not service.forked,
            paused=service.paused,
            asleep=service.asleep,
            heartbeat_age=service.heartbeat_age(),
            error=None if service.death is None else repr(service.death),
        )

    @property
    def metrics(self) -> Any:
        """The `prometheus_client.CollectorRegistry` with this engine's series: the one given, or
        its own. None: before the start, and where nothing is counted."""
        return self._service.registry

    def closed_error(self) -> AEngineError:
        """Why no request can be taken now, as a new exception."""
        return self._service.closed_error()

    @property
    def parts(self) -> EngineParts:
        """The loaded parts, for tests and tools.

        Raises:
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        if self._service.parts is None:
            raise self._service.closed_error()
        return self._service.parts


class _Abort:
    """Posts the abort of a channel; holds the service, not the engine."""

    __slots__ = ("_service",)

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def __call__(self, channel: Channel) -> None:
        self._service.post(Abort(channel))


def _stop(service: EngineService) -> None:
    service.ask_close(Close(drain=False, timeout=0.0, grace=GRACE))


def _forget(service: EngineService, runtime: Runtime) -> None:
    """The engine was collected unclosed, maybe in a running loop: do not wait for long."""
    _stop(service)
    runtime.join(timeout=0.5)
