"""`EngineService`: load, serve, give back. The one coroutine an engine runs, and its state.

It is the part of an engine that lives with the loop; the front door `Engine` holds it and nothing
in here holds the front door, so that a forgotten engine can be collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from aengine.engine.chores import Chores
from aengine.engine.core import EngineCore
from aengine.engine.delayed import DelayedSampling
from aengine.engine.delivery import Outbox
from aengine.engine.ending import CLOSING, GRACE, close_later, closed, ended
from aengine.engine.gate import Gate
from aengine.engine.health import EngineState
from aengine.engine.inbox import Inbox
from aengine.engine.intake import Intake
from aengine.engine.lifecycle import Lifecycle
from aengine.engine.messages import Call, Wake
from aengine.engine.metrics import Metrics, registry_of
from aengine.engine.mux_loop import MuxLoop, make_lanes
from aengine.engine.reporting import Reporter
from aengine.engine.spans import spans_of
from aengine.engine.steps import StepLoop
from aengine.engine.swapping import Swapping
from aengine.errors import EngineClosedError, EngineDeadError
from aengine.policy.mux import ChunkedOnly, takes_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aengine.config import EngineConfig
    from aengine.engine.exit_hook import ExitHook
    from aengine.engine.messages import Close, Message
    from aengine.engine.parts import EngineParts, PartsLoader
    from aengine.engine.spans import Spans
    from aengine.outputs import EngineStats

logger = logging.getLogger("aengine")


class EngineService:
    """Runs an engine's parts.

    Args:
        config: the engine's settings.
        loader: makes the parts; runs on this service's loop.
        on_progress: called with (stage, done, total) while loading.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        loader: PartsLoader,
        on_progress: Callable[[str, int, int], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.state = EngineState.NEW
        self.started: Future[None] = Future()
        self.parts: EngineParts | None = None
        """While it serves: afterwards nothing may keep the model alive."""
        self.registry: Any = None
        self.spans: Spans | None = None
        self.death: BaseException | None = None
        self.pid = os.getpid()
        self._exit_hook: ExitHook | None = None
        self.abandoned = False
        """Whether it ended without its loop."""
        self._loader = loader
        self._report = Reporter(on_progress, lambda: self._close is not None)
        self._close: Close | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading: asyncio.Task[EngineParts] | None = None
        self._inbox: Inbox[Message] | None = None
        self._steps: StepLoop | None = None
        self._delayed: DelayedSampling | None = None
        self._chores: Chores | None = None
        self._swapping: Swapping | None = None
        self._core: EngineCore | None = None
        self._gate: Gate | None = None
        self._lifecycle: Lifecycle | None = None

    def starting(self, hook: ExitHook) -> None:
        """`main` is about to be run, for whoever calls this: its context is `on_progress`'s."""
        self.state = EngineState.STARTING
        self._report.carry_context()
        self._exit_hook = hook

    async def main(self) -> None:
        """Load, serve until closed or dead, give everything back."""
        loop = self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(loop)
        interval = self._set_switch_interval()
        parts: EngineParts | None = None
        self._arm()
        try:
            parts = await self._load(loop)
            self._arm()
            self.spans = spans_of(self.config.tracer_provider, model_name=parts.model_name)
            self._build(parts, loop)
            self.state = EngineState.RUNNING
            self.parts = parts
            self.started.set_result(None)
            assert self._steps is not None
            if self._close is not None:
                self._inbox.put(self._close)
            await self._steps.run()
            self.state = EngineState.CLOSED
        except GeneratorExit:
            # Its loop was closed under it and it is collected: nothing can be awaited any more.
            self._ended(interval)
            close_later(self.abandon())
            raise
        except BaseException as error:
            self._die(error)
        self._refuse_leftovers()
        try:
            giving = self._give_back(parts)
            del parts
            await giving
        finally:
            self._ended(interval)

    def _ended(self, interval: float | None) -> None:
        if (hook := self._exit_hook) is not None:
            self._exit_hook = None
            hook.disarm()
        if interval is not None:
            sys.setswitchinterval(interval)

    def _arm(self) -> None:
        if self._exit_hook is not None:
            self._exit_hook.arm()

    async def _load(self, loop: asyncio.AbstractEventLoop) -> EngineParts:
        loading = self._loading = loop.create_task(self._run_loader())
        if self._close is not None:
            loading.cancel()
        try:
            return await loading
        finally:
            self._loading = None

    async def _run_loader(self) -> EngineParts:
        return await self._loader(self.config, self._report)

    async def _give_back(self, parts: EngineParts | None) -> None:
        """End what runs beside the steps, then the parts, each in bounded time."""
        steps, close = self._steps, self._close
        beside = [self._lifecycle, self._delayed, self._chores, self._swapping]
        self._core = self._steps = self._gate = self.parts = None
        self._lifecycle = self._delayed = self._chores = self._swapping = None
        hangs = steps is not None and steps.hangs
        seconds = GRACE if close is None else CLOSING if close.drain else close.grace
        if hangs:
            logger.error("the device did not finish what it had begun: the engine closes without")
            seconds = 0.0
        while beside:
            if (piece := beside.pop()) is not None:
                await ended(piece.aclose(), seconds)
            del piece
        if parts is None:
            return
        if parts.trace_path is not None:
            await closed(parts.write_trace, None)
        # In a thread: closing waits for the device's workers, and in the caller's loop
        # (loop="caller") that wait must not hold up anybody. It holds the steps, too.
        if not await closed(partial(_close_parts, parts, steps), seconds):
            logger.error("closing the engine goes on in the background")

    def _build(self, parts: EngineParts, loop: asyncio.AbstractEventLoop) -> None:
        assert self._inbox is not None
        inbox = self._inbox
        if self.config.loop == "own":
            # On a loop that serves nobody else a wait may spin for a moment, without the GIL.
            parts.device.adopt_loop()
        delayed = self._delayed = DelayedSampling(
            parts, lambda: _wake(inbox), mask_patience=self.config.grammar.mask_patience
        )
        self._core = EngineCore(
            parts,
            inbox,
            Outbox(loop, self._metrics(parts), self.spans),
            delayed,
            Intake(self.config.scheduler),
            self.clock,
        )
        chores = self._chores = Chores(parts.launcher, parts.device)
        gate = self._gate = Gate(self._core, parts.scheduler)
        swapping = self._swapping = Swapping(parts, lambda: _wake(inbox))
        self._lifecycle = Lifecycle(parts, self._core, gate, lambda: _wake(inbox))
        depth = self.config.scheduler.max_steps_in_flight
        pieces = (parts, self._core, inbox, delayed, chores, gate, swapping, self.clock)
        if takes_turns(self.config.mux):
            if isinstance(self.config.mux, ChunkedOnly):
                parts.scheduler.chunk_beside_decode = self.config.mux.chunk
            self._steps = StepLoop(*pieces, max_steps_in_flight=depth)
        else:
            if parts.lanes is None:
                parts.lanes = make_lanes(parts, self.config.cpu_threads)
            self._steps = MuxLoop(
                *pieces, max_steps_in_flight=depth, policy=self.config.mux, lanes=parts.lanes
            )

    def _metrics(self, parts: EngineParts) -> Metrics | None:
        self.registry = registry_of(self.config.metrics)
        if self.registry is None:
            return None
        return Metrics(self.registry, model_name=parts.model_name, stats=parts.scheduler.stats)

    def _die(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            # Only a loop that is being torn down cancels this task: an end, not a fault.
            self.state = EngineState.CLOSED
        else:
            self.death = error
            self.state = EngineState.DEAD
        if not self.started.done():
            self._not_started(self.closed_error() if self.death is None else error)
        elif self._core is not None:
            if self.death is not None:
                logger.error("the engine died", exc_info=error)
            self._core.end(self.closed_error)

    def _not_started(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # another thread gave up at the same time
            self.started.set_exception(error)

    def _refuse_leftovers(self) -> None:
        """Answer the messages that came too late."""
        if self._inbox is None:
            return
        for message in self._inbox.take():
            if isinstance(message, Call):
                message.future.set_exception(self.closed_error())
            elif (channel := getattr(message, "channel", None)) is not None:
                _fail_in_its_loop(channel, self.closed_error())

    def _set_switch_interval(self) -> float | None:
        wanted = self.config.switch_interval
        if wanted is None:
            return None
        before = sys.getswitchinterval()
        sys.setswitchinterval(wanted)
        return before

    # -- from any thread -----------------------------------------------------------------------

    def closed_error(self) -> EngineClosedError | EngineDeadError:
        """Why no request can be taken, as a new exception."""
        if self.forked:
            return EngineClosedError("an engine does not survive a fork: make one in this process")
        if self.state is EngineState.DEAD:
            error = EngineDeadError(f"the engine died: {self.death!r}", cause=self.death)
            error.__cause__ = self.death
            return error
        if self.state in (EngineState.NEW, EngineState.STARTING):
            return EngineClosedError("the engine is not started: use 'async with' or start()")
        if self.state is EngineState.CLOSING:
            return EngineClosedError("the engine is closing")
        return EngineClosedError("the engine is closed")

    def post(self, message: Message) -> bool:
        """Hand a message to the loop. False if nobody will take it any more."""
        if self._inbox is None or self._over():
            return False
        taken = self._inbox.put(message)
        if self._over():
            # It ended between the check and the put: whoever sees that answers what is left.
            self._refuse_leftovers()
        return taken

    @property
    def forked(self) -> bool:
        """Whether this is a copy of the engine in a child process: it has no threads here."""
        return self.pid != os.getpid()

    def _over(self) -> bool:
        return self.forked or self.state in (EngineState.CLOSED, EngineState.DEAD)

    def ask_close(self, close: Close) -> None:
        """End the engine; also while it is still loading, which is then given up."""
        if self.forked:
            self.state = EngineState.CLOSED
            return
        self._close = close
        if self.state is EngineState.RUNNING:
            self.state = EngineState.CLOSING
        self.post(close)
        if self._loading is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stop_loading)

    def _stop_loading(self) -> None:
        if self._loading is not None:
            self._loading.cancel()

    def abandon(self) -> Callable[[], None]:
        """The loop does not come round any more: end without it. Returns what gives the rest back,
        which blocks."""
        self.abandoned = True
        self.state = EngineState.CLOSED
        self._not_started(self.closed_error())
        self._refuse_leftovers()
        parts, steps = self.parts, self._steps
        for channel in () if self._core is None else self._core.channels():
            _fail_in_its_loop(channel, self.closed_error())
        self._core = self._steps = self._gate = self.parts = None
        return partial(_close_parts, parts, steps)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` on the loop between two steps."""
        future: Future[Any] = Future()
        if not self.post(Call(function, future)):
            future.set_exception(self.closed_error())
        return future

    def perform(self, operation: Callable[[Lifecycle], Coroutine[Any, Any, None]]) -> Future[None]:
        """Begin an operation on the loop, between two steps. Cancelling the future cancels it."""
        outcome: Future[None] = Future()

        def begin() -> None:
            assert self._lifecycle is not None
            self._lifecycle.begin(operation(self._lifecycle), outcome)

        def refused(begun: Future[Any]) -> None:
            if (error := begun.exception()) is not None and not outcome.done():
                outcome.set_exception(error)

        self.call(begin).add_done_callback(refused)
        return outcome

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; to be called on the service's loop."""
        assert self.parts is not None
        self.parts.scheduler.reset_prefix_cache()

    @property
    def paused(self) -> bool:
        """Whether new requests wait for `resume`."""
        return (gate := self._gate) is not None and gate.paused

    @property
    def asleep(self) -> bool:
        """Whether requests are refused until `wake`."""
        return (gate := self._gate) is not None and gate.asleep

    def stats(self) -> EngineStats:
        """A snapshot; to be called on the service's loop."""
        assert self._core is not None
        assert self._steps is not None
        steps = self._steps
        stats = self._core.stats(steps=steps.steps_launched, in_flight=steps.in_flight)
        return replace(stats, mux=steps.mux_stats())

    def heartbeat_age(self) -> float | None:
        """Seconds since the step loop last came round; None while it is not running."""
        steps = self._steps
        return None if steps is None else max(0.0, self.clock() - steps.heartbeat)


def _close_parts(parts: EngineParts | None, steps: object) -> None:
    """Give the parts back; what `steps` hold on the device lives until that is done."""
    if parts is not None:
        parts.close()


def _wake(inbox: Inbox[Message]) -> None:
    inbox.put(Wake())


def _fail_in_its_loop(channel: Any, error: EngineClosedError | EngineDeadError) -> None:
    try:
        channel.loop.call_soon_threadsafe(channel.fail, error)
    except RuntimeError:
        logger.debug("request %s: its event loop is closed", channel.request_id)
