"""`EngineService`: load, serve, give back. The one coroutine an engine runs, and its state.

It is the part of an engine that lives with the loop; the front door `Engine` holds it and nothing
in here holds the front door, so that a forgotten engine can be collected.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aengine.engine.chores import Chores
from aengine.engine.core import EngineCore
from aengine.engine.delayed import DelayedSampling
from aengine.engine.delivery import Outbox
from aengine.engine.gate import Gate
from aengine.engine.inbox import Inbox
from aengine.engine.intake import Intake
from aengine.engine.lifecycle import Lifecycle
from aengine.engine.messages import Call, Wake
from aengine.engine.metrics import Metrics
from aengine.engine.mux_loop import MuxLoop, make_lanes
from aengine.engine.steps import StepLoop
from aengine.errors import EngineClosedError, EngineDeadError
from aengine.policy.mux import ChunkedOnly, takes_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aengine.config import EngineConfig
    from aengine.engine.messages import Close, Message
    from aengine.engine.parts import EngineParts, PartsLoader
    from aengine.outputs import EngineStats

logger = logging.getLogger("aengine")


class EngineState(enum.Enum):
    """The life of an engine."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"
    DEAD = "dead"


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
        on_progress: Callable[[str, int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = clock
        self.state = EngineState.NEW
        self.started: Future[None] = Future()
        self.parts: EngineParts | None = None
        """While it serves: afterwards nothing may keep the model alive."""
        self.death: BaseException | None = None
        self.pid = os.getpid()
        self._loader = loader
        self.on_progress = on_progress
        self._close: Close | None = None
        self._inbox: Inbox[Message] | None = None
        self._loop_thread: int | None = None
        self._steps: StepLoop | None = None
        self._delayed: DelayedSampling | None = None
        self._chores: Chores | None = None
        self._core: EngineCore | None = None
        self._gate: Gate | None = None
        self._lifecycle: Lifecycle | None = None

    async def main(self) -> None:
        """Load, serve until closed or dead, give everything back."""
        loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._inbox = Inbox(loop)
        interval = self._set_switch_interval()
        parts: EngineParts | None = None
        try:
            parts = await self._loader(self.config, self.on_progress)
            self._build(parts, loop)
            self.state = EngineState.RUNNING
            self.parts = parts
            self.started.set_result(None)
            assert self._steps is not None
            if self._close is not None:
                self._inbox.put(self._close)
            await self._steps.run()
            self.state = EngineState.CLOSED
        except BaseException as error:
            self._die(error)
        finally:
            self._refuse_leftovers()
            lifecycle, self._lifecycle = self._lifecycle, None
            if lifecycle is not None:
                await lifecycle.aclose()
                del lifecycle
            self._core = self._steps = self._gate = self.parts = None
            delayed, self._delayed = self._delayed, None
            if delayed is not None:
                await delayed.aclose()
                del delayed
            chores, self._chores = self._chores, None
            if chores is not None:
                await chores.aclose()
                del chores
            if parts is not None:
                # In a thread: closing waits for the device's workers, and in the caller's loop
                # (loop="caller") that wait must not hold up anybody.
                await asyncio.shield(loop.run_in_executor(None, parts.close))
            if interval is not None:
                sys.setswitchinterval(interval)

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
            Outbox(loop, self._metrics(parts)),
            delayed,
            Intake(self.config.scheduler),
            self.clock,
        )
        chores = self._chores = Chores(parts.launcher, parts.device)
        gate = self._gate = Gate(self._core, parts.scheduler)
        self._lifecycle = Lifecycle(parts, self._core, gate, lambda: _wake(inbox))
        depth = self.config.scheduler.max_steps_in_flight
        pieces = (parts, self._core, inbox, delayed, chores, gate, self.clock)
        if takes_turns(self.config.mux):
            if isinstance(self.config.mux, ChunkedOnly):
                parts.scheduler.chunk_beside_decode = self.config.mux.chunk
            self._steps = StepLoop(*pieces, max_steps_in_flight=depth)
        else:
            parts.lanes = make_lanes(parts, self.config.cpu_threads)
            self._steps = MuxLoop(
                *pieces, max_steps_in_flight=depth, policy=self.config.mux, lanes=parts.lanes
            )

    def _metrics(self, parts: EngineParts) -> Metrics | None:
        registry = self.config.metrics
        if registry is None:
            return None
        return Metrics(registry, model_name=parts.model_name, stats=parts.scheduler.stats)

    def _die(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            # Only a loop that is being torn down cancels this task: an end, not a fault.
            self.state = EngineState.CLOSED
        else:
            self.death = error
            self.state = EngineState.DEAD
        if not self.started.done():
            self.started.set_exception(self.closed_error() if self.death is None else error)
        elif self._core is not None:
            if self.death is not None:
                logger.error("the engine died", exc_info=error)
            self._core.end(self.closed_error)

    def _refuse_leftovers(self) -> None:
        """Answer the messages that came too late."""
        assert self._inbox is not None
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

    def _over(self) -> bool:
        return self.state in (EngineState.CLOSED, EngineState.DEAD)

    def ask_close(self, close: Close) -> None:
        """End the engine; also while it is still loading, which then ends first."""
        self._close = close
        if self.state is EngineState.RUNNING:
            self.state = EngineState.CLOSING
        self.post(close)

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


def _wake(inbox: Inbox[Message]) -> None:
    inbox.put(Wake())


def _fail_in_its_loop(channel: Any, error: EngineClosedError | EngineDeadError) -> None:
    try:
        channel.loop.call_soon_threadsafe(channel.fail, error)
    except RuntimeError:
        logger.debug("request %s: its event loop is closed", channel.request_id)
