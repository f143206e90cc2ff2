"""The inbox: how any thread hands work to the engine's loop without blocking."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

M = TypeVar("M")
N = TypeVar("N")


class Inbox(Generic[M]):
    """A many-to-one queue. `put` and `take` from any thread; `wait` in the engine's loop only.

    `on_wake` is called in the engine's loop when messages came, also while nobody waits for one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.on_wake: Callable[[], None] | None = None
        self._loop = loop
        self._messages: deque[M] = deque()
        self._signalled = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: M) -> bool:
        """Queue a message. False if the engine's loop is gone and nobody will take it."""
        self._messages.append(message)
        if self._signalled:
            # A wake-up is on its way and takes this message too: it was appended before.
            return True
        self._signalled = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            return False
        return True

    def _wake(self) -> None:
        self._signalled = False
        if self.on_wake is not None:
            self.on_wake()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[M]:
        """All messages queued so far, oldest first."""
        taken: list[M] = []
        with contextlib.suppress(IndexError):  # empty; the check and the pop are one operation
            while True:
                taken.append(self._messages.popleft())
        return taken

    def take_next(self, kind: type[N]) -> N | None:
        """The oldest message, if it is of that kind. In the engine's loop only."""
        if self._messages and isinstance(self._messages[0], kind):
            return cast("N", self._messages.popleft())
        return None

    async def wait(self, timeout: float | None = None) -> None:
        """Return when there is a message, or after `timeout` seconds."""
        if self._messages:
            return
        self._waiter = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(max(0.0, timeout), self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
