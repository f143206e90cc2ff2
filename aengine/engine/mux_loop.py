"""`MuxLoop`: prefill and decode as two coroutines over one KV pool, each on its own lane.

A policy chooses the partition before each step. A sequence goes from prefill to decode when its
prefill has settled (the scheduler sees to that), and decode's next step has a device edge behind
that prefill: the host never waits for the device. There is no await between deciding a step and
launching it, in either loop, so nothing needs a lock (law 1).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aengine.batch import LaneKind
from aengine.device.lanes import open_lanes
from aengine.engine.lane_meter import LaneMeter, label
from aengine.engine.messages import Wake
from aengine.engine.steps import PULSE, LaunchedStep, StepLoop, result_of
from aengine.policy.mux import GuardedMux, LaneTable, MuxLoad
from aengine.policy.planning import Work

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aengine.batch import SmPartition, StepPlan
    from aengine.device.lanes import Lanes
    from aengine.device.protocols import Completion, Stream
    from aengine.engine.parts import EngineParts
    from aengine.policy.mux import MuxPolicy


def make_lanes(parts: EngineParts, cores: int | None) -> Lanes:
    """The lanes of an engine that was loaded without.

    `cores` of a CPU to share out, default: those of this process.
    """
    if cores is None:
        here = getattr(os, "sched_getaffinity", None)
        cores = len(here(0)) if here is not None else os.cpu_count() or 1
    return open_lanes(
        parts.device, parts.forward_stream, cores=cores, set_threads=parts.set_threads
    )


@dataclass(slots=True, eq=False)
class _LaneStep(LaunchedStep):
    """A step of one lane, and what tells how long it took."""

    partition: SmPartition
    launched_at: float
    launched_ns: int
    other_then: object
    """What the other lane was doing at the launch."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Lane:
    """One of the two kinds of work and where it stands."""

    work: Work
    depth: int
    steps: deque[_LaneStep] = field(default_factory=deque)
    busy: StepPlan | None = None
    """The step whose sample still waits for a mask."""
    partition: SmPartition | None = None
    """Where it works, or last did."""
    last: Completion | None = None
    """Its newest work there."""
    settled_at: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        return not self.steps and self.busy is None

    @property
    def doing(self) -> object:
        """Something that is the same object as long as the lane does the same."""
        return self.busy or (self.steps[0].plan if self.steps else None)


class MuxLoop(StepLoop):
    """A loop for each lane.

    Args:
        policy: chooses the partition.
        lanes: what it can choose from.
        others: as of `StepLoop`.
    """

    def __init__(self, *args: Any, policy: MuxPolicy, lanes: Lanes, **options: Any) -> None:
        super().__init__(*args, **options)
        self._policy = GuardedMux(policy)
        self._lanes = lanes
        priority = lanes.of_kind(LaneKind.PRIORITY)
        self._table = LaneTable(
            plain=lanes.plain.partition,
            priority=priority[0] if priority else None,
            green=lanes.of_kind(LaneKind.GREEN),
        )
        self._partition = self._table.plain
        self._meter = LaneMeter(self._clock())
        # One prefill step at a time: behind it the policy chooses anew.
        self._prefill = _Lane(work=Work.PREFILL, depth=1)
        self._decode = _Lane(work=Work.DECODE, depth=self._depth)
        self._join: Completion | None = None
        """The end of a prefill that decode has no edge behind yet."""

    @property
    def in_flight(self) -> int:
        lanes = (self._prefill, self._decode)
        return sum(len(lane.steps) + (lane.busy is not None) for lane in lanes)

    def mux_stats(self) -> Mapping[str, Any]:
        """Switches, faults of the policy, and the times by partition."""
        self._meter.use(self._partition, self._clock())
        counts = {"switches": self._policy.switches, "faults": self._policy.faults}
        return {"lanes": self._lanes.why, **counts, **self._meter.stats()}

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        lanes = [loop.create_task(self.prefill_loop()), loop.create_task(self.decode_loop())]
        try:
            while not (self._core.closing and self._core.idle and not self.in_flight):
                self.heartbeat = self._clock()
                patience = self._patience()
                patience = PULSE if patience is None else min(PULSE, patience)
                news = loop.create_task(self._inbox.wait(patience))
                await asyncio.wait([news, *lanes], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                await asyncio.wait([news])
                for lane in lanes:
                    if lane.done():
                        lane.result()  # a lane ends only by an error
                self._take_messages()
                self._gate.look(self.in_flight + self._swapping.in_flight)
                self._stir()
        finally:
            for lane in lanes:
                lane.cancel()  # abandons the waits, not the work
            await asyncio.wait(lanes)

    async def prefill_loop(self) -> None:
        """Compute prompts, as long as the engine lives. Device errors come out."""
        await self._run(self._prefill)

    async def decode_loop(self) -> None:
        """Compute next tokens, as long as the engine lives. Device errors come out."""
        await self._run(self._decode)

    async def _run(self, lane: _Lane) -> None:
        while True:
            self.heartbeat = self._clock()
            lane.news.clear()
            if (plan := self._decide(lane)) is not None:
                await self._launch(lane, plan)
                while len(lane.steps) >= lane.depth:
                    await self._settle_step(lane)
            elif lane.steps:
                await self._settle_step(lane)
            else:
                await lane.news.wait()

    def _decide(self, lane: _Lane) -> StepPlan | None:
        now = self._clock()
        chosen = self._policy.select(self._load(now))
        if self._prefill.idle:
            # Not beside a running prefill: its SMs would be given to decode as well.
            self._meter.use(self._partition, now)
            self._partition = chosen
        plan = None if self._gate.shut else self._schedule(lane.work)
        if plan is not None:
            plan.partition = self._partition
        return plan

    def _load(self, now: float) -> MuxLoad:
        ahead = self._scheduler.ahead(now)
        running = self._prefill.busy or (
            self._prefill.steps[0].plan if self._prefill.steps else None
        )
        return MuxLoad(
            lanes=self._table,
            decode_rows=ahead.decode_rows,
            decode_context=ahead.decode_context,
            prefill_running=ahead.prefill_begun + (running.num_tokens if running else 0),
            prefill_waiting=ahead.prefill_waiting,
            oldest_wait=ahead.oldest_wait,
            measured=self._meter.take(),
        )

    def _enter(self, lane: _Lane) -> Stream:
        """The lane's stream in this partition.

        What it does there comes after all that either lane did in another partition, whose SMs
        were not shared out like this.
        """
        pair = self._lanes.pair(self._partition)
        stream = pair.prefill if lane is self._prefill else pair.decode
        for each in (self._prefill, self._decode):
            if each.last is not None and each.partition != self._partition:
                stream.wait(each.last)
        lane.partition = self._partition
        if lane is self._decode and self._join is not None:
            stream.wait(self._join)
            self._join = None
        return stream

    async def _launch(self, lane: _Lane, plan: StepPlan) -> None:
        self._parts.device.mark_step(plan.step_id)
        self._core.launched(init.request.seq_id for init in plan.slot_inits)
        self.steps_launched += 1
        stream, partition = self._enter(lane), self._partition
        at, at_ns, other = self._clock(), time.perf_counter_ns(), self._other(lane).doing
        launcher = self._parts.launcher_of(stream)
        if not plan.constrained:
            run = self._wanted(launcher.run)
            output = launcher.replay(plan) or stream.launch(run, plan)
            lane.last = output.completion
        else:
            begin = self._wanted(launcher.begin)
            begun = launcher.replay_begin(plan) or stream.launch(begin, plan)
            lane.last, lane.busy = begun.completion, plan
            # A mask needs the token before it, and that comes with the step before.
            while lane.steps:
                await self._settle_step(lane)
            output = await self._delayed.sample(plan, begun, stream)
            lane.last, lane.busy = output.completion, None
            self._inbox.put(Wake())  # masks may have failed
        lane.steps.append(_LaneStep(plan, output, partition, at, at_ns, other))
        self._chores.look()

    def _other(self, lane: _Lane) -> _Lane:
        return self._decode if lane is self._prefill else self._prefill

    async def _settle_step(self, lane: _Lane) -> None:
        step = lane.steps[0]
        result = await result_of(step)
        self._measure(lane, step)
        lane.steps.popleft()
        if lane is self._prefill:
            self._join = step.output.completion
        self._settle(result)
        self._stir()
        if self._gate.shut or (self._core.closing and self._core.idle):
            self._inbox.put(Wake())

    def _measure(self, lane: _Lane, step: _LaneStep) -> None:
        now, other = self._clock(), self._other(lane).doing
        seconds = now - max(step.launched_at, lane.settled_at)
        lane.settled_at = now
        alone = step.other_then is None and other is None
        if lane is self._prefill:
            self._meter.prefilled(step.partition, step.plan, seconds, alone=alone)
        else:
            beside = other is not None and step.other_then is other
            self._meter.decoded(step.partition, step.plan, seconds, beside=beside, alone=alone)
        if (trace := self._parts.trace) is not None:
            args = {
                "step": step.plan.step_id,
                "partition": label(step.partition),
                "tokens": step.plan.num_tokens,
            }
            track = f"lane {lane.work.name.lower()}"
            end = time.perf_counter_ns()
            trace.span(f"step {step.plan.step_id}", step.launched_ns, end, track=track, args=args)

    def _stir(self) -> None:
        """Something changed that may be work for a lane."""
        self._prefill.news.set()
        self._decode.news.set()
