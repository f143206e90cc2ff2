"""`Gate`: whether steps are launched. How a running engine is paused, and quiet for a change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aengine.errors import EngineClosedError, EngineStateError

if TYPE_CHECKING:
    from aengine.engine.channel import Channel
    from aengine.engine.core import EngineCore
    from aengine.engine.messages import Prepared
    from aengine.errors import AEngineError
    from aengine.policy.scheduler import Scheduler


class Gate:
    """Open, draining (who was there finishes, who comes waits) or shut (no step is launched).

    Everything is called on the engine's loop; the flags may be read from any thread.

    Args:
        core: the requests.
        scheduler: holds back who comes while the gate drains.
    """

    def __init__(self, core: EngineCore, scheduler: Scheduler) -> None:
        self.shut = False
        self.asleep = False
        """The KV cache has no memory: only `wake` opens the gate again."""
        self._core = core
        self._scheduler = scheduler
        self._before: frozenset[Channel] | None = None
        self._held: list[int] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def paused(self) -> bool:
        """Whether new requests wait."""
        return self.shut or self._before is not None

    def close(self) -> None:
        """Launch nothing more. Requests stay as they are."""
        self.shut = True

    def drain(self) -> None:
        """Let the requests of now finish, then close. Later ones wait."""
        if not self.paused:
            self._before = frozenset(self._core.channels())

    def reopen(self, because: AEngineError | None = None) -> None:
        """Launch steps again; whoever waits for quiet gets an error."""
        self.shut = False
        self._before = None
        held, self._held = self._held, []
        for seq_id in held:
            self._scheduler.unhold(seq_id)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(because or EngineStateError("the engine was resumed"))

    def closing(self) -> bool:
        """The engine ends: let what waits finish. False: it cannot, there is no memory for it."""
        if not self.asleep:
            self.reopen(EngineClosedError("the engine is closing"))
        return not self.asleep

    def admitted(self, message: Prepared) -> None:
        """A request has come into the scheduler's queue."""
        if self._before is None or self.shut or message.channel in self._before:
            return
        for request in message.requests:
            self._scheduler.hold(request.seq_id)
            self._held.append(request.seq_id)

    async def quiet(self) -> None:
        """Return when the gate is shut and no step is in flight.

        Raises:
            EngineStateError, EngineClosedError: it was opened before that.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def look(self, steps_in_flight: int) -> None:
        """The step loop came round."""
        if steps_in_flight:
            return
        if self._before is not None and self._before.isdisjoint(self._core.channels()):
            self.shut, self._before = True, None
        if self.shut:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
