"""The scheduler coroutine: decide, launch, and while the device works, settle what it finished.

Forward N+1 is launched before the tokens of N reach the host (law 2). There is no await between
`schedule()` and the launch (law 1), so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aengine.batch import StepResult
from aengine.engine.lateness import Lateness
from aengine.engine.messages import Abort, AbortById, Call, Close, Prepared, Submit
from aengine.errors import DeviceLostError, EngineClosedError, RequestAbortedError
from aengine.policy.planning import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aengine.batch import StepPlan
    from aengine.device.future import DeviceFuture
    from aengine.engine.chores import Chores
    from aengine.engine.core import EngineCore
    from aengine.engine.delayed import DelayedSampling
    from aengine.engine.gate import Gate
    from aengine.engine.inbox import Inbox
    from aengine.engine.messages import Message
    from aengine.engine.parts import EngineParts
    from aengine.engine.swapping import Swapping
    from aengine.execute.launcher import StepOutput


T = TypeVar("T")

PULSE = 1.0
"""Seconds after which an idle engine comes round: an older heartbeat means that it hangs."""
WATCH = 0.1
"""Seconds between looks at the clock while the loop waits for the device, which may be long."""


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device. Holding it keeps alive what the device still uses (law 3)."""

    plan: StepPlan
    output: DeviceFuture[StepOutput]


class StepLoop:
    """The loop of one engine.

    Args:
        parts: the loaded engine.
        core: its requests.
        inbox: what callers say.
        delayed: samples the rows that wait for a grammar mask.
        chores: what the launch side wants done beside the steps.
        gate: whether steps may be launched.
        swapping: copies blocks to and from the host.
        clock: monotonic seconds.
        max_steps_in_flight: steps launched before the oldest must have settled.
    """

    def __init__(
        self,
        parts: EngineParts,
        core: EngineCore,
        inbox: Inbox[Message],
        delayed: DelayedSampling,
        chores: Chores,
        gate: Gate,
        swapping: Swapping,
        clock: Callable[[], float],
        *,
        max_steps_in_flight: int,
    ) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._core = core
        self._inbox = inbox
        self._delayed = delayed
        self._chores = chores
        self._gate = gate
        self._swapping = swapping
        self._clock = clock
        self._depth = max_steps_in_flight
        self._steps: deque[LaunchedStep] = deque()
        self._close_at: float | None = None
        self._grace = 0.0
        self._give_up_at: float | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._halt: asyncio.Future[None] | None = None
        self.hangs = False
        """Whether the loop ended without what the device had begun."""
        self._lateness = Lateness(clock)
        self.steps_launched = 0
        self.heartbeat = clock()

    @property
    def in_flight(self) -> int:
        return len(self._steps)

    def mux_stats(self) -> Mapping[str, Any]:
        """How the lanes were used; nothing to tell where there are none."""
        return {}

    async def run(self) -> None:
        """Serve until told to close. Device errors come out; faults of one step or row do not.

        What callers say is heard while the loop waits for the device, too; and when it closes, that
        wait is given up in the end: a completion may never come.
        """
        loop = asyncio.get_running_loop()
        halt = self._halt = loop.create_future()
        self._inbox.on_wake = self._hear
        serving = loop.create_task(self._serve())
        collected = False
        try:
            await asyncio.wait([serving, halt], return_when=asyncio.FIRST_COMPLETED)
        except GeneratorExit:
            collected = True
            raise
        finally:
            self._inbox.on_wake = None
            if self._watching is not None:
                self._watching.cancel()
            if not serving.done() and not collected:
                serving.cancel()  # abandons the wait, not the work
                await asyncio.wait([serving])
        if halt.done():
            self.hangs = not halt.exception()
            halt.result()
        else:
            serving.result()

    async def _serve(self) -> None:
        while True:
            self.heartbeat = self._clock()
            self._take_messages()
            self._gate.look(len(self._steps) + self._swapping.in_flight)
            if self._core.closing and self._core.idle and not self._steps:
                return
            if (early := self._earliness()) > 0.0:
                await self._inbox.wait(early)
                continue
            plan = None if self._gate.shut else self._schedule(Work.ALL)
            if plan is not None:
                await self._step(plan)
            elif self._steps:
                await self._step_or_message()
            else:
                # Never for long, so that the heartbeat of an idle engine goes on.
                patience = self._patience()
                await self._inbox.wait(PULSE if patience is None else min(PULSE, patience))

    def _schedule(self, work: Work) -> StepPlan | None:
        """The next step of a lane; the copies decided with it are launched."""
        plan = self._scheduler.schedule(self._clock(), work)
        self._swapping.begin()
        return plan

    def _hear(self) -> None:
        """Messages came, or it is time for something: whatever the loop waits for just now."""
        try:
            self._take_messages()
        except BaseException as error:
            if self._halt is not None and not self._halt.done():
                self._halt.set_exception(error)

    def _watch(self) -> None:
        """Look at the clock while the device works."""
        self._watching = None
        now = self._clock()
        if (patience := self._patience()) is not None and patience <= 0:
            self._hear()
        if self._core.closing and self._core.idle:
            if self._give_up_at is None:
                self._give_up_at = now + self._grace
            elif now >= self._give_up_at and self._halt is not None and not self._halt.done():
                self._halt.set_result(None)
        self._keep_watch()

    def _keep_watch(self) -> None:
        if self._watching is None and (self.in_flight or self._core.closing):
            self._watching = asyncio.get_running_loop().call_later(WATCH, self._watch)

    def _earliness(self) -> float:
        """Seconds to wait before the next step is decided; 0.0: now."""
        if len(self._steps) != self._depth - 1 or not self._steps:
            return 0.0
        return self._lateness.wait(self._parts.device.lead(self._steps[-1].output))

    async def _step(self, plan: StepPlan) -> None:
        stream, launcher = self._parts.forward_stream, self._parts.launcher
        self._parts.device.mark_step(plan.step_id)
        self._core.launched(init.request.seq_id for init in plan.slot_inits)
        self.steps_launched += 1
        if not plan.constrained:
            output = launcher.replay(plan) or stream.launch(self._wanted(launcher.run), plan)
        else:
            begin = self._wanted(launcher.begin)
            begun = launcher.replay_begin(plan) or stream.launch(begin, plan)
            # A mask needs the token before it, and that comes with the step before.
            while self._steps:
                await self._settle_oldest()
            output = await self._delayed.sample(plan, begun, stream)
        self._steps.append(LaunchedStep(plan, output))
        self._keep_watch()
        self._lateness.launched()
        self._chores.look()
        while len(self._steps) >= self._depth:
            await self._settle_oldest()

    def _wanted(self, run: Callable[[StepPlan], T]) -> Callable[[StepPlan], T]:
        """The same, which does nothing if by then the engine closes and has nobody to compute for:
        on a CPU a launched step may still wait for its turn."""
        core = self._core

        @functools.wraps(run)  # the trace shows its name
        def run_if_wanted(plan: StepPlan) -> T:
            if core.closing and core.idle:
                raise EngineClosedError("the engine closed before this step began")
            return run(plan)

        return run_if_wanted

    async def _step_or_message(self) -> None:
        """Nothing to launch yet: go on when the oldest step is done, or when somebody speaks."""
        oldest = self._steps[0].output
        loop = asyncio.get_running_loop()
        waits = [
            loop.create_task(_reached(oldest)),
            loop.create_task(self._inbox.wait(self._patience())),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()  # abandons the wait, not the work
        await asyncio.wait(waits)
        if oldest.done():
            await self._settle_oldest()

    async def _settle_oldest(self) -> None:
        result = await result_of(self._steps[0])
        self._steps.popleft()
        self._settle(result)

    def _settle(self, result: StepResult) -> None:
        updates = self._scheduler.update(result, self._clock())
        self._swapping.begin()
        self._core.settle(self._delayed.advance(updates, result.step_id))

    def _take_messages(self) -> None:
        for message in self._inbox.take():
            match message:
                case Submit():
                    self._core.submit(message)
                case Prepared():
                    self._core.admit(message)
                    self._gate.admitted(message)
                case Abort():
                    self._core.abort(message.channel)
                case AbortById():
                    self._core.abort_id(message.request_id)
                case Call():
                    self._call(message)
                case Close():
                    self._close(message)
        if self._close_at is not None and self._clock() >= self._close_at:
            self._close_at = None
            self._core.fail_all(lambda: RequestAbortedError("the engine closed before the end"))
        for seq_id, error in self._delayed.take_faults():
            self._core.fail_sequence(seq_id, error)
        self._core.expire()
        self._core.flush()

    def _call(self, message: Call) -> None:
        if not message.future.set_running_or_notify_cancel():
            return
        try:
            message.future.set_result(message.function())
        except BaseException as error:
            message.future.set_exception(error)

    def _close(self, message: Close) -> None:
        self._core.closing = True
        patience = message.timeout if self._gate.closing() and message.drain else 0.0
        until = self._clock() + patience
        self._close_at = until if self._close_at is None else min(self._close_at, until)
        self._grace = message.grace
        self._keep_watch()

    def _patience(self) -> float | None:
        """Seconds until the next thing that happens without a message."""
        times = [t for t in (self._scheduler.next_deadline(), self._close_at) if t is not None]
        return min(times) - self._clock() if times else None


async def _reached(output: DeviceFuture[StepOutput]) -> None:
    """Return when the step is done, well or not: settling it tells which."""
    with contextlib.suppress(Exception):
        await output


async def result_of(step: LaunchedStep) -> StepResult:
    """What a step brought. A fault of the step ends its rows with the error, the others go on.

    Raises:
        DeviceLostError: the device is gone.
    """
    try:
        return (await step.output).to_host()
    except DeviceLostError:
        raise
    except Exception as error:
        return failed(step.plan, error)


def failed(plan: StepPlan, error: Exception) -> StepResult:
    """The result of a step that failed as a whole."""
    return StepResult(
        step_id=plan.step_id,
        token_ids=[0] * int(plan.samples.sum()),
        errors=dict.fromkeys(range(plan.num_rows), error),
    )
