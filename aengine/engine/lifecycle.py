"""`Lifecycle`: what can be done to a running engine: pause it, put it to sleep, change its weights.

On the engine's loop, beside the step loop: each operation shuts the gate, waits until no step is in
flight, and then changes what no step looks at.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from aengine.errors import AEngineError, ConfigError, DeviceError, EngineStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Future

    from aengine.engine.core import EngineCore
    from aengine.engine.gate import Gate
    from aengine.engine.parts import EngineParts

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]


class Lifecycle:
    """The operations of one engine.

    Args:
        parts: the loaded engine.
        core: its requests.
        gate: stops the steps.
        wake: makes the step loop come round.
    """

    def __init__(
        self, parts: EngineParts, core: EngineCore, gate: Gate, wake: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._core = core
        self._gate = gate
        self._wake = wake
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, operation: Coroutine[Any, Any, T], outcome: Future[T]) -> None:
        """Run an operation; cancelling `outcome` cancels it. It outlives no engine."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(operation)
        self._tasks.add(task)

        def tell(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not outcome.set_running_or_notify_cancel():
                if not task.cancelled():
                    task.exception()  # nobody is there to hear of it
            elif task.cancelled():
                outcome.set_exception(EngineStateError("the engine ended before that was done"))
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def give_up(outcome: Future[T]) -> None:
            if outcome.cancelled() and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(tell)
        outcome.add_done_callback(give_up)

    async def aclose(self) -> None:
        """Cancel the operations that are under way; what the device has begun ends first."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- operations ----------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`."""
        was_paused = self._gate.paused
        if mode == "wait":
            self._gate.drain()
        else:
            self._gate.close()
        if mode == "abort":
            self._abort_all()
        try:
            await self._quiet()
        except asyncio.CancelledError:
            if not was_paused:
                self._gate.reopen()
                self._wake()
            raise

    async def resume(self) -> None:
        """See `Engine.resume`."""
        if self._gate.asleep:
            raise EngineStateError("the engine is asleep: wake() it")
        if self._changing.locked():
            raise EngineStateError("the engine is being changed: it resumes when that is done")
        self._gate.reopen()
        self._wake()

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        async with self._changing:
            if self._gate.asleep:
                return
            was_paused = self._gate.paused
            self._gate.asleep = True  # from now on no request is taken
            try:
                self._gate.close()
                self._abort_all()
                await self._quiet()
                if self._parts.memory is not None:
                    await self._on_stream(self._parts.memory.free_kv)
            except BaseException:
                self._gate.asleep = False
                if not was_paused:
                    self._gate.reopen()
                    self._wake()
                raise
            self._parts.scheduler.reset_prefix_cache()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._changing:
            if not self._gate.asleep:
                return
            if self._parts.memory is not None:
                await self._on_stream(self._parts.memory.make_kv)
            self._gate.asleep = False
            self._gate.reopen()
            self._wake()

    async def update_weights(self, model: str) -> None:
        """See `Engine.update_weights`."""
        memory = self._parts.memory
        if memory is None:
            raise ConfigError("this engine has no weights that could be exchanged")
        async with self._changing:
            gate = self._gate
            if gate.asleep:
                raise EngineStateError("the engine is asleep: wake() it before it gets weights")
            was_paused = gate.paused
            if gate.shut and not self._core.idle:
                raise EngineStateError(
                    "the engine is paused with requests that began with the old weights: "
                    "resume() or abort them first"
                )
            gate.drain()
            try:
                await self._quiet()
                files = await self._parts.text_thread.run(memory.read, model)
                weights = await self._on_stream(memory.load, files)
                await self._on_stream(memory.use, weights)
                self._parts.scheduler.reset_prefix_cache()
            finally:
                if not was_paused:
                    gate.reopen()
                    self._wake()

    # -- means ---------------------------------------------------------------------------------

    def _abort_all(self) -> None:
        for channel in self._core.channels():
            self._core.abort(channel)
        self._core.flush()

    async def _quiet(self) -> None:
        self._wake()
        await self._gate.quiet()

    async def _on_stream(self, function: Callable[..., T], *args: Any) -> T:
        """Run it where all torch work of this engine runs, to its end whatever is cancelled."""
        work = asyncio.ensure_future(_result(self._parts.forward_stream.launch(function, *args)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
        except DeviceError as error:
            if isinstance(error.__cause__, AEngineError):
                raise error.__cause__ from error.__cause__.__cause__
            raise


async def _result(future: Any) -> Any:
    return await future
