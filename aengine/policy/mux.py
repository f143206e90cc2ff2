"""How prefill and decode share the device in a step: `MuxPolicy.select(load) -> SmPartition`.

A policy sees numbers only: what is to be done, what was measured, and which partitions the device
can have (the driver decides that, see `device.green`). It may keep what it learnt in itself.

Shipped here: `Exclusive`, `ChunkedOnly`, `PriorityStreams`; `Threshold` is in `mux_threshold`,
`SloFeedback` in `mux_slo`. `GuardedMux` wraps a caller's own object.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from aengine.batch import LaneKind, SmPartition
from aengine.errors import ConfigError

logger = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTable:
    """The partitions that a device can have.

    Args:
        plain: the whole device for both.
        priority: both on the whole device, decode's stream first; None where streams have no
            priorities.
        green: disjoint groups, by decode's share, smallest first; empty without green contexts.
    """

    plain: SmPartition
    priority: SmPartition | None = None
    green: tuple[SmPartition, ...] = ()
    all: tuple[SmPartition, ...] = field(init=False)
    """Every partition, plain first."""

    def __post_init__(self) -> None:
        shared = (self.plain,) if self.priority is None else (self.plain, self.priority)
        object.__setattr__(self, "all", shared + self.green)

    @classmethod
    def of_device(cls, sms: int, *, unit: int, minimum: int, priorities: bool = True) -> LaneTable:
        """The table of a device that splits into a group for decode and the rest for prefill.

        Args:
            sms: streaming multiprocessors (CPU: cores).
            unit: group sizes are multiples of this.
            minimum: smallest group.
            priorities: whether streams have priorities.
        """
        smallest = -(-max(minimum, 1) // unit) * unit
        groups = range(smallest, sms - minimum + 1, unit)
        return cls(
            plain=SmPartition(kind=LaneKind.PLAIN, prefill=sms, decode=sms),
            priority=SmPartition(kind=LaneKind.PRIORITY, prefill=sms, decode=sms)
            if priorities
            else None,
            green=tuple(
                SmPartition(kind=LaneKind.GREEN, prefill=sms - decode, decode=decode)
                for decode in groups
            ),
        )

    @property
    def sms(self) -> int:
        return self.plain.decode

    @property
    def without_groups(self) -> SmPartition:
        """What comes nearest to a split where there are no green contexts."""
        return self.plain if self.priority is None else self.priority

    def index(self, partition: object) -> int | None:
        """The place of a partition in `all`."""
        # Nearly always it is one of these very objects, and comparing fields is slow.
        for index, each in enumerate(self.all):
            if each is partition:
                return index
        return self.all.index(partition) if partition in self.all else None

    def for_decode(self, sms: int) -> SmPartition:
        """The smallest group for decode with at least `sms`, or the largest there is."""
        for partition in self.green:
            if partition.decode >= sms:
                return partition
        return self.green[-1] if self.green else self.without_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTimes:
    """One measurement: what ran side by side in `partition`, and how long it took.

    `decode_seconds` is one decode step of `decode_rows` rows with `decode_context` tokens of
    context in all; `prefill_seconds` is what `prefill_tokens` tokens took. Either is None when that
    lane did nothing.
    """

    partition: SmPartition
    decode_rows: int = 0
    decode_context: int = 0
    decode_seconds: float | None = None
    prefill_tokens: int = 0
    prefill_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxLoad:
    """What a policy decides on. Tokens are those still to be computed; times are seconds.

    Args:
        lanes: the partitions to choose from.
        decode_rows, decode_context: decoding sequences, and tokens of context of all of them.
        prefill_running, prefill_waiting: prompt tokens of begun and of waiting prompts.
        oldest_wait: how long the first waiting prompt has waited.
        itl_target, ttft_target: the service-level objectives, if there are any.
        measured: what was measured since the last call.
    """

    lanes: LaneTable
    decode_rows: int = 0
    decode_context: int = 0
    prefill_running: int = 0
    prefill_waiting: int = 0
    oldest_wait: float = 0.0
    itl_target: float | None = None
    ttft_target: float | None = None
    measured: tuple[LaneTimes, ...] = ()

    @property
    def contended(self) -> bool:
        """Whether there is work for both lanes."""
        return self.decode_rows > 0 and self.prefill_running + self.prefill_waiting > 0


@runtime_checkable
class MuxPolicy(Protocol):
    """Chooses a partition for each step. Any object with this method will do."""

    def select(self, load: MuxLoad) -> SmPartition:
        """A partition of `load.lanes`. Called once a step: at most a few microseconds, no I/O."""
        ...


class Exclusive:
    """No split: prefill and decode take turns on the whole device."""

    def select(self, load: MuxLoad) -> SmPartition:
        return load.lanes.plain


class ChunkedOnly:
    """No split; beside decoding rows, a step computes at most `chunk` tokens of prompts.

    Raises:
        ConfigError: `chunk` is less than 1.
    """

    def __init__(self, chunk: int = 512) -> None:
        self.chunk = at_least("chunk", chunk, 1)

    def select(self, load: MuxLoad) -> SmPartition:
        return load.lanes.plain


class PriorityStreams:
    """Both on the whole device, decode's kernels first whenever there is room."""

    def select(self, load: MuxLoad) -> SmPartition:
        return load.lanes.without_groups if load.contended else load.lanes.plain


def takes_turns(policy: MuxPolicy | None) -> bool:
    """Whether a policy never wants prefill and decode side by side."""
    return policy is None or isinstance(policy, (Exclusive, ChunkedOnly))


class GuardedMux:
    """A policy that cannot stop the engine: what raises or makes no sense is "no split".

    The first fault is logged, later ones are only counted.
    """

    def __init__(self, policy: MuxPolicy) -> None:
        self.policy = policy
        self.faults = 0
        self.switches = 0
        self._last: SmPartition | None = None

    def select(self, load: MuxLoad) -> SmPartition:
        """The policy's choice if the device has it, else the plain partition."""
        try:
            chosen = self.policy.select(load)
            if load.lanes.index(chosen) is None:
                raise ValueError(f"{chosen!r} is not among the partitions of this device")
        except Exception as error:
            if not self.faults:
                logger.warning(
                    "mux policy %s failed; this step is not split (said once): %r",
                    type(self.policy).__name__,
                    error,
                )
            self.faults += 1
            chosen = load.lanes.plain
        if self._last is not None and chosen != self._last:
            self.switches += 1
        self._last = chosen
        return chosen


def at_least(name: str, value: object, low: int) -> int:
    """An integer setting, checked.

    Raises:
        ConfigError: not an integer, or below `low`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer")
    if value < low:
        raise ConfigError(f"{name}={value} must be at least {low}")
    return value
