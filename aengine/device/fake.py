"""A device whose work runs when a test says so, in any order, with faults.

Launching only queues. The test picks what runs next (`ready`, `run`, `run_all`), when its
completion is reported (`FakeFaults.delay`, `deliver`), and what goes wrong. Launched functions that
touch a `FakeBuffer` leave a record of who read and wrote what; `races` then says which of those
accesses no stream order, wait edge or host await puts in order, whatever order they ran in.
"""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.device.completions import HostCompletion, Reactor, lost
from aengine.device.fake_memory import Access, FakeBuffer, unordered
from aengine.device.fake_stream import FakeStream
from aengine.device.future import DeviceFuture
from aengine.device.launching import as_device_error, unwrap
from aengine.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from aengine.device.fake_memory import Race
    from aengine.device.trace import Trace

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class FakeFaults:
    """What goes wrong, by the number of the operation (0, 1, ... in launch order, all streams).

    Args:
        raise_at: the operation raises this instead of running.
        lose_at: the device is lost when this operation would run.
        drop: operations that run but whose completion is never reported.
        delay: operations whose completion is reported only after that many further runs.
    """

    raise_at: Mapping[int, Exception] = field(default_factory=dict)
    lose_at: int | None = None
    drop: frozenset[int] = frozenset()
    delay: Mapping[int, int] = field(default_factory=dict)


class FakeOp:
    """One queued operation. `before` is a bit set of all operations that precede it."""

    __slots__ = ("after", "args", "before", "completion", "fn", "future", "index", "name", "stream")

    def __init__(self, index: int, stream: str, name: str, completion: FakeCompletion) -> None:
        self.index = index
        self.stream = stream
        self.name = name
        self.completion = completion
        self.before = 0
        self.after: tuple[HostCompletion, ...] = ()
        self.fn: Callable[..., Any] | None = None
        self.args: tuple[Any, ...] = ()
        self.future: DeviceFuture[Any] | None = None

    def __repr__(self) -> str:
        return f"<op {self.index} {self.name} on {self.stream}>"


class FakeCompletion(HostCompletion):
    """A completion that notes when the host learns of it: that orders what the host does next."""

    __slots__ = ("_device", "past")

    def __init__(self, device: FakeDevice, step_id: int | None) -> None:
        super().__init__(device._reactor, step_id)
        self._device = device
        self.past = 0

    def done(self) -> bool:
        if self._state:
            self._device._host_past |= self.past
        return self._state

    def _woken(self) -> None:
        self._device._host_past |= self.past
        super()._woken()


class FakeDevice:
    """The device of the tests.

    Args:
        faults: what goes wrong.
        native: the extension; None: without it. Default: if it is there.
        trace: where completions and wake-ups are drawn.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        faults: FakeFaults | None = None,
        native: ModuleType | str | None = "auto",
        trace: Trace | None = None,
    ) -> None:
        self._name = name
        self.faults = faults or FakeFaults()
        self._reactor = Reactor(native=native, trace=trace)
        self._queue: dict[int, FakeOp] = {}
        self._delayed: dict[int, tuple[FakeOp, DeviceError | None, int]] = {}
        self._dropped: dict[int, FakeOp] = {}
        self._next_index = 0
        self._executed = 0
        self._stream_past: dict[str, int] = {}
        self._host_past = 0
        self._running: FakeOp | None = None
        self._accesses: list[Access] = []
        self._changed = threading.Condition(threading.RLock())
        self._step_id: int | None = None
        self._loss: str | None = None
        self._closed = False

    # -- the device's contract ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    def stream(self, name: str, *, priority: int = 0) -> FakeStream:
        """A new stream. A name that is taken gets a number."""
        with self._changed:
            if self._closed:
                raise DeviceError("the device is closed")
            unique, number = name, 1
            while unique in self._stream_past:
                number += 1
                unique = f"{name}-{number}"
            self._stream_past[unique] = 0
            return FakeStream(unique, self)

    def mark_step(self, step_id: int | None) -> None:
        """Work launched from now on belongs to this engine step."""
        self._step_id = step_id

    def adopt_loop(self) -> None:
        """Nothing to adopt: no wait of this device spins."""

    @property
    def contended(self) -> bool:
        """Not measured here."""
        return False

    def lead(self, future: DeviceFuture[Any], /) -> float:
        """Nothing is predicted here."""
        return 0.0

    def statistics(self) -> Mapping[str, Any]:
        """Counts of records and wake-ups, the wake-up latency histogram, the share that spun."""
        return self._reactor.counters.snapshot()

    def close(self) -> None:
        """Run and report everything; fail what was dropped. Idempotent."""
        with self._changed:
            self._closed = True
            self.run_all()
            for index in list(self._delayed):
                self.deliver(self._delayed[index][0])
            stuck = [*self._queue.values(), *self._dropped.values()]
            self._queue.clear()
            self._dropped.clear()
            self._changed.notify_all()
        for op in stuck:
            op.completion.fire(DeviceError("the device closed before this completion came"))
        self._reactor.close()

    # -- running it by hand ------------------------------------------------------------------------

    def buffer(self, name: str, value: T) -> FakeBuffer[T]:
        """Memory whose accesses are noted."""
        return FakeBuffer(self, name, value)

    @property
    def pending(self) -> Sequence[FakeOp]:
        """What was launched and has not run, oldest first."""
        with self._changed:
            return list(self._queue.values())

    @property
    def undelivered(self) -> Sequence[FakeOp]:
        """What has run but whose completion is delayed."""
        with self._changed:
            return [op for op, _, _ in self._delayed.values()]

    def ready(self) -> Sequence[FakeOp]:
        """What may run next: its stream's earlier work and the edges before it have run."""
        with self._changed:
            return [op for op in self._queue.values() if self._is_ready(op)]

    def run(self, op: FakeOp, *, in_order: bool = True) -> None:
        """Run one operation and report it (unless a fault delays or drops that).

        Args:
            in_order: refuse what is not ready; False runs it all the same, as broken hardware
                or a missing edge would.

        Raises:
            ValueError: it is not pending, or not ready.
        """
        with self._changed:
            if op.index not in self._queue:
                raise ValueError(f"{op} has run already")
            if in_order and not self._is_ready(op):
                raise ValueError(f"{op} is not ready; pass in_order=False to run it all the same")
            if self.faults.lose_at == op.index:
                self.lose(f"lost at {op}")
                return
            del self._queue[op.index]
            error = self._execute(op)
            self._report(op, error)
            self._changed.notify_all()

    def run_all(self, pick: Callable[[Sequence[FakeOp]], FakeOp] | None = None) -> int:
        """Run what is ready until nothing is; `pick` chooses (default: the oldest).

        Returns:
            The number of operations run.
        """
        count = 0
        while ready := self.ready():
            self.run(pick(ready) if pick else ready[0])
            count += 1
        return count

    def deliver(self, op: FakeOp) -> None:
        """Report a delayed completion now."""
        with self._changed:
            _, error, _ = self._delayed.pop(op.index)
        op.completion.fire(error)

    def lose(self, reason: str = "device lost") -> None:
        """The device is gone: all that is pending and all that comes fails, naming its step."""
        with self._changed:
            self._loss = reason
            victims = [*self._queue.values(), *(op for op, _, _ in self._delayed.values())]
            victims += self._dropped.values()
            self._queue.clear()
            self._delayed.clear()
            self._dropped.clear()
            self._changed.notify_all()
        for op in victims:
            op.completion.fire(lost(reason, op.completion.step_id))

    @contextlib.contextmanager
    def playing(self, *, seed: int = 0) -> Iterator[None]:
        """Inside the `with`, a thread runs what is ready, in a random order that respects edges."""
        rng = random.Random(seed)  # the order of a test, not a secret
        stop = threading.Event()

        def play() -> None:
            while not stop.is_set():
                with self._changed:
                    if ready := self.ready():
                        self.run(rng.choice(ready))
                    else:
                        # Work that waits for another device becomes ready without a notification.
                        self._changed.wait(0.005 if self._queue else 0.5)

        thread = threading.Thread(target=play, name=f"{self._name}-player", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            with self._changed:
                self._changed.notify_all()
            thread.join()

    def races(self) -> Sequence[Race]:
        """Pairs of accesses that nothing orders. Empty is what a test asserts."""
        with self._changed:
            return unordered(self._accesses)

    # -- what the streams do -----------------------------------------------------------------------

    def _enqueue(
        self,
        stream: str,
        name: str,
        after: tuple[HostCompletion, ...],
        fn: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
    ) -> FakeOp:
        completion = FakeCompletion(self, self._step_id)
        with self._changed:
            if self._closed:
                raise DeviceError("the device is closed")
            op = FakeOp(self._next_index, stream, name, completion)
            self._next_index += 1
            op.fn, op.args, op.after = fn, args, after
            op.before = self._stream_past[stream] | self._host_past
            for edge in after:
                op.before |= edge.past if isinstance(edge, FakeCompletion) else 0
            completion.past = op.before | 1 << op.index
            self._stream_past[stream] = completion.past
            if self._loss is None:
                self._queue[op.index] = op
                self._changed.notify_all()
        if self._loss is not None:
            completion.fire(lost(self._loss, completion.step_id))
        return op

    def _is_ready(self, op: FakeOp) -> bool:
        earlier = any(o.stream == op.stream and o.index < op.index for o in self._queue.values())
        return not earlier and all(self._passed(edge) for edge in op.after)

    def _passed(self, edge: HostCompletion) -> bool:
        """Whether the device is past `edge`; a delayed or dropped report does not hold it up."""
        if not isinstance(edge, FakeCompletion) or edge._device is not self:
            return edge.done()
        return not any(op.completion is edge for op in self._queue.values())

    def _execute(self, op: FakeOp) -> DeviceError | None:
        fn, args, future = op.fn, op.args, op.future
        op.fn, op.args, op.future = None, (), None
        if fn is None or future is None:
            return None
        self._running = op
        try:
            if op.index in self.faults.raise_at:
                raise self.faults.raise_at[op.index]
            future._put(fn(*(self._value(arg) for arg in args)))
        except BaseException as error:
            return as_device_error(error, fn)
        finally:
            self._running = None
        return None

    def _value(self, arg: Any) -> Any:
        """As on a real device, the value is there once the work ran, reported or not."""
        if isinstance(arg, DeviceFuture) and not arg.completion._state:
            delayed = [e for o, e, _ in self._delayed.values() if o.completion is arg.completion]
            ran = any(op.completion is arg.completion for op in self._dropped.values())
            if (delayed and delayed[0] is None) or ran:
                return arg.handle()
            if delayed and delayed[0] is not None:
                raise delayed[0]
        return unwrap(arg)

    def _report(self, op: FakeOp, error: DeviceError | None) -> None:
        self._executed += 1
        if op.index in self.faults.drop:
            self._dropped[op.index] = op
        elif op.index in self.faults.delay:
            due = self._executed + self.faults.delay[op.index]
            self._delayed[op.index] = (op, error, due)
        else:
            op.completion.fire(error)
        for waiting, _, due in list(self._delayed.values()):
            if self._executed >= due:
                self.deliver(waiting)

    def _note(self, buffer: str, *, writes: bool) -> None:
        with self._changed:
            op = self._running
            if op is not None:
                access = Access(buffer, repr(op), writes, op.completion.past, 1 << op.index)
            else:
                # The host's own accesses are a sequence: each is a node of the order like an op.
                bit = 1 << self._next_index
                self._next_index += 1
                self._host_past |= bit
                access = Access(buffer, "host", writes, self._host_past, bit)
            self._accesses.append(access)
