"""The reactor: how "the device passed this point" becomes "this coroutine runs again".

A `HostCompletion` is fired by some thread (a CPU worker, the CUDA notifier, a watchdog, a test).
Each waiter is an asyncio future plus the `LoopPort` of its event loop; firing hands the futures to
their ports, and a port wakes its loop once however many completions came meanwhile.

Nothing here takes a lock. Registration writes the waiter first and looks at the state second;
firing writes the state first and looks at the waiters second; so at least one side sees the other.
A lock would have to be safe against finalisers that run in the middle of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from aengine.device.counters import Counters
from aengine.device.native import load_native
from aengine.errors import DeviceError, DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import ModuleType

    from aengine.device.trace import Trace


class _Port(Protocol):
    """Where a fired waiter goes. Called from any thread; never blocks, never raises."""

    def post(self, waiter: Any, /) -> None: ...


class LoopPort:
    """The way into one event loop: posted futures are resolved there, one wake-up for many.

    With the extension the wake-up is an eventfd that the loop reads; without it, the loop's own
    `call_soon_threadsafe`. A closed loop takes nothing any more: what is posted to it is dropped.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, counters: Counters, native: ModuleType | None
    ) -> None:
        self._loop = weakref.ref(loop)
        self._counters = counters
        self._posted: deque[asyncio.Future[None]] = deque()
        self._armed = False
        self._bell = None if native is None else native.Queue()
        if self._bell is not None:
            loop.add_reader(self._bell.fileno(), self._drain)

    @property
    def dead(self) -> bool:
        """Whether the loop is closed or gone."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    def post(self, waiter: asyncio.Future[None], /) -> None:
        """Resolve `waiter` in its loop. Any thread."""
        self._posted.append(waiter)
        if not self._armed:
            # Two threads may both come here; the second wake-up then finds nothing to do.
            self._armed = True
            self._ring()

    def _ring(self) -> None:
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._posted.clear()
        else:
            bell = self._bell
            if bell is not None:
                bell.ring()
            if bell is None or self._bell is not bell:  # never had one, or left the loop just now
                try:
                    loop.call_soon_threadsafe(self._drain)
                except RuntimeError:  # closed between the look and the call
                    self._posted.clear()

    def _drain(self) -> None:
        # Disarm first: whoever posts after the last pop then rings again.
        self._armed = False
        if self._bell is not None:
            for number in self._bell.drain():
                self._ticket_came(number)
        woken = 0
        while self._posted:
            waiter = self._posted.popleft()
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        self._counters.add("loop_wakeups")
        self._counters.add("waiters_woken", woken)

    def _ticket_came(self, number: int) -> None:
        """A ticket of the extension's queue came back (only some devices hand any out)."""

    def detach(self) -> None:
        """Leave the loop (in its thread). What is posted later takes the loop's own way in."""
        loop = self._loop()
        bell, self._bell = self._bell, None
        # After the change: who rang the old bell before it has posted by now, and who rings it
        # later sees the change and takes the loop's way in.
        self._drain()
        if bell is not None:
            if loop is not None and not loop.is_closed():
                loop.remove_reader(bell.fileno())
            bell.close()

    def detach_soon(self) -> None:
        """`detach` from any thread."""
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: nothing to leave
                loop.call_soon_threadsafe(self.detach)


class _ThreadPort:
    """Wakes a thread that waits on a lock."""

    __slots__ = ()

    def post(self, waiter: threading.Lock, /) -> None:
        waiter.release()


class Reactor:
    """The wake-up path of one device.

    Args:
        native: the extension module; None: the pure-Python way. Default: whatever is there.
        trace: where completions and wake-ups are drawn.
    """

    def __init__(self, *, native: ModuleType | str | None = "auto", trace: Trace | None = None):
        self.native = load_native() if isinstance(native, str) else native
        self.trace = trace
        self.counters = Counters()
        self._ports: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopPort] = (
            weakref.WeakKeyDictionary()
        )
        # The same once more, as a list: other threads can copy that while a loop joins.
        self._all: list[weakref.ref[LoopPort]] = []

    def port(self) -> LoopPort:
        """The port of the running loop.

        Raises:
            RuntimeError: no loop runs in this thread.
        """
        loop = asyncio.get_running_loop()
        port = self._ports.get(loop)
        if port is None:
            port = self._ports[loop] = self._make_port(loop)
            self._all = [r for r in self._all if (p := r()) is not None and not p.dead]
            self._all.append(weakref.ref(port))
        return port

    def ports(self) -> list[LoopPort]:
        """The ports of all loops that have waited so far."""
        return [port for ref in list(self._all) if (port := ref()) is not None]

    def close(self) -> None:
        """Leave every loop: no descriptor of ours stays registered in a loop that lives on."""
        for port in self.ports():
            port.detach_soon()

    def _make_port(self, loop: asyncio.AbstractEventLoop) -> LoopPort:
        return LoopPort(loop, self.counters, self.native)


class HostCompletion:
    """A point on a stream that some host thread reports as passed, once.

    Args:
        reactor: its device's wake-up path.
        step_id: the engine step that the work belongs to, for error messages.
    """

    __slots__ = ("__weakref__", "_error", "_fired_ns", "_reactor", "_state", "_waiters", "step_id")

    def __init__(self, reactor: Reactor, step_id: int | None = None) -> None:
        self._reactor = reactor
        self._state = False
        self._error: DeviceError | None = None
        self._fired_ns = 0
        self._waiters: dict[Any, _Port] = {}
        self.step_id = step_id
        reactor.counters.add("records")

    def __repr__(self) -> str:
        word = "pending" if not self._state else "failed" if self._error else "done"
        return f"<{type(self).__name__} {word}>"

    def done(self) -> bool:
        """Whether the point was passed, or cannot be any more; never blocks."""
        return self._state

    def belongs_to(self, reactor: Reactor) -> bool:
        """Whether the device of `reactor` made this."""
        return self._reactor is reactor

    def error(self) -> DeviceError | None:
        """Why the work before the point failed; None if it did not, or is not done."""
        return self._error

    def check(self) -> None:
        """Raise if the work failed.

        Raises:
            DeviceError: the work before the point failed. A new object per call: one exception
                shared by many raisers would collect all their tracebacks.
        """
        if self._error is not None:
            error = copy.copy(self._error)
            error.__cause__ = self._error.__cause__
            raise error

    def fire(self, error: DeviceError | None = None) -> bool:
        """Report the point as passed (or failed). Any thread; only the first call counts."""
        if self._state:
            return False
        self._error = error
        self._fired_ns = time.perf_counter_ns()
        self._state = True
        self._reactor.counters.add("completed" if error is None else "failed")
        waiters = self._waiters
        while waiters:
            try:
                waiter, port = waiters.popitem()
            except KeyError:  # its awaiter was cancelled between the look and the pop
                break
            port.post(waiter)
        return True

    def __await__(self) -> Generator[Any, None, None]:
        """Resume when the point was passed. Cancelling abandons the wait, nothing else.

        Raises:
            DeviceError: the work before the point failed.
        """
        counters = self._reactor.counters
        counters.add("waits")
        if self.done():
            counters.add("waits_done_at_once")
        else:
            yield from self._suspend(self._reactor.port())
            self._woken()
        self.check()

    def _suspend(self, port: LoopPort) -> Generator[Any, None, None]:
        """Wait for `fire` in the running loop."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = port
        try:
            if not self._state:
                yield from waiter
        except BaseException:
            self._reactor.counters.add("waits_abandoned")
            raise
        finally:
            self._waiters.pop(waiter, None)

    def _woken(self) -> None:
        now = time.perf_counter_ns()
        passed = self._passed_ns() or now
        self._reactor.counters.observe_wakeup(now - passed)
        if self._reactor.trace is not None:
            self._reactor.trace.span("wake-up", passed, now, track="wake-ups")

    def _passed_ns(self) -> int:
        """When the point was passed, as far as this thread knows; 0: it does not."""
        return self._fired_ns

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Block this thread (never an event loop's) until the point was passed.

        Args:
            timeout: seconds; None waits without limit.

        Returns:
            Whether the point was passed in time. Errors are `check`'s to raise.
        """
        if self.done():
            return True
        lock = threading.Lock()
        lock.acquire()
        self._waiters[lock] = _ThreadPort()
        try:
            return self.done() or lock.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            self._waiters.pop(lock, None)


def lost(reason: str, step_id: int | None) -> DeviceLostError:
    """The error of a point that the device will never reach."""
    where = "" if step_id is None else f" (step {step_id})"
    return DeviceLostError(f"{reason}{where}", step_id=step_id)
