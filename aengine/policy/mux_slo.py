"""`SloFeedback`: keep inter-token latency under a target at the least loss of prefill speed.

Each partition has a *slowdown* of decode and one of prefill, relative to either alone on the whole
device. They begin as estimates and are corrected by what is measured. A choice is safe if decode's
predicted step, with its spread, meets the target; the policy takes the safe choice that slows
prefill least. No split is among the choices, so where nothing is at risk nothing is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aengine.batch import LaneKind
from aengine.errors import ConfigError
from aengine.policy.mux import at_least

if TYPE_CHECKING:
    from aengine.batch import SmPartition
    from aengine.policy.mux import LaneTable, LaneTimes, MuxLoad

_LEARNING_RATE = 0.2
_SPREADS = 2.0


@dataclass(slots=True)
class _Average:
    """A moving average and the average distance from it."""

    mean: float
    spread: float = 0.0
    seen: int = 0

    @property
    def high(self) -> float:
        """What it seldom exceeds."""
        return self.mean + _SPREADS * self.spread

    def add(self, value: float) -> None:
        # The first measurement replaces the estimate, the next ones correct it.
        rate = max(_LEARNING_RATE, 1.0 / (self.seen + 1))
        self.spread += rate * (abs(value - self.mean) - self.spread) if self.seen else 0.0
        self.mean += rate * (value - self.mean)
        self.seen += 1


class _DecodeAlone:
    """How long a decode step takes alone on the device, by its rows and tokens of context.

    A moving average a size class of rows, and one slope for the context: where prompts keep coming
    nothing is alone for a while, and contexts grow all the time.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        """By size class: seconds, tokens of context."""
        self._covariance = self._variance = 0.0

    def add(self, rows: int, context: int, seconds: float) -> None:
        """One step was measured."""
        size = rows.bit_length()
        if size not in self._means:
            self._means[size] = seconds, context
            return
        mean, usual = self._means[size]
        more, further = seconds - mean, context - usual
        self._covariance += _LEARNING_RATE * (more * further - self._covariance)
        self._variance += _LEARNING_RATE * (further * further - self._variance)
        self._means[size] = mean + _LEARNING_RATE * more, usual + _LEARNING_RATE * further

    def predict(self, rows: int, context: int) -> float | None:
        """Seconds, from the nearest size class that was measured; None: there is none."""
        if not self._means:
            return None
        size = rows.bit_length()
        mean, usual = self._means[min(self._means, key=lambda each: abs(each - size))]
        slope = self._covariance / self._variance if self._variance else 0.0
        # At most in proportion: a slope is noise where contexts hardly differed.
        slope = min(max(slope, 0.0), mean / usual if usual else 0.0)
        return max(mean / 2, mean + slope * (context - usual))


@dataclass(slots=True)
class _Slowdowns:
    decode: _Average
    prefill: _Average


class SloFeedback:
    """A policy that learns the device's latency table while it serves.

    Args:
        itl: target of the inter-token latency, seconds; `MuxLoad.itl_target` overrides it.
        margin: share of the target that a prediction may use up.
        patience: steps for which a choice that is kinder to prefill must have been safe before it
            is taken; a choice that stops being safe is left at once.

    Raises:
        ConfigError: the target or the margin is not above 0, or the patience is below 1.
    """

    def __init__(
        self, itl: float | None = None, *, margin: float = 0.9, patience: int = 16
    ) -> None:
        if itl is not None and not (math.isfinite(itl) and itl > 0):
            raise ConfigError(f"itl={itl} must be above 0 seconds")
        if not 0 < margin <= 1:
            raise ConfigError(f"margin={margin} must be above 0 and at most 1")
        self._patience = at_least("patience", patience, 1)
        self._itl = itl
        self._margin = margin
        self._decode_alone = _DecodeAlone()
        self._prefill_alone: _Average | None = None
        """Seconds per prompt token alone on the device."""
        self._lanes: LaneTable | None = None
        self._table: list[_Slowdowns] = []
        """In the order of the device's partitions."""
        self._current: int | None = None
        self._kinder_for = 0

    def select(self, load: MuxLoad) -> SmPartition:
        """The safe partition that slows prefill least, or the one that slows decode least."""
        self._adopt(load.lanes)
        for times in load.measured:
            self._learn(times, load.lanes)
        target = self._itl if load.itl_target is None else load.itl_target
        if target is None or not load.contended:
            # Nothing is at risk. The last choice under contention is kept for the next time.
            return load.lanes.plain
        alone = self._decode_alone.predict(load.decode_rows, load.decode_context)
        if alone is None:
            # Nothing was measured yet, so there is nothing to compare with the target.
            return load.lanes.without_groups
        return load.lanes.all[self._choose(alone, target * self._margin)]

    def latency_table(self, lanes: LaneTable) -> dict[SmPartition, tuple[float, float]]:
        """Slowdown of decode and of prefill by partition, as known now."""
        self._adopt(lanes)
        pairs = zip(lanes.all, self._table, strict=True)
        return {each: (entry.decode.mean, entry.prefill.mean) for each, entry in pairs}

    def _adopt(self, lanes: LaneTable) -> None:
        """Begin with estimates for a device that was not seen before."""
        if self._lanes is not lanes and self._lanes != lanes:
            self._table = [_estimate(partition, lanes) for partition in lanes.all]
            self._current = None
        self._lanes = lanes

    def _choose(self, alone: float, bound: float) -> int:
        best = self._best(alone, bound)
        current = self._current
        if current is None or alone * self._table[current].decode.high > bound:
            return self._settle_on(best)
        if self._table[best].prefill.mean >= self._table[current].prefill.mean:
            self._kinder_for = 0
            return current
        self._kinder_for += 1
        return self._settle_on(best) if self._kinder_for >= self._patience else current

    def _settle_on(self, index: int) -> int:
        self._current = index
        self._kinder_for = 0
        return index

    def _best(self, alone: float, bound: float) -> int:
        gentlest, lowest = 0, math.inf
        best: int | None = None
        cost = math.inf
        for index, entry in enumerate(self._table):
            high = entry.decode.mean + _SPREADS * entry.decode.spread
            if high < lowest:
                gentlest, lowest = index, high
            if alone * high <= bound and entry.prefill.mean < cost:
                best, cost = index, entry.prefill.mean
        return gentlest if best is None else best

    def _learn(self, times: LaneTimes, lanes: LaneTable) -> None:
        decode, per_token = times.decode_seconds, None
        if times.prefill_seconds is not None and times.prefill_tokens > 0:
            per_token = times.prefill_seconds / times.prefill_tokens
        if per_token is None:
            if decode is not None:
                self._decode_alone.add(times.decode_rows, times.decode_context, decode)
            return
        if decode is None:
            self._prefill_alone = _added(self._prefill_alone, per_token)
            return
        index = lanes.index(times.partition)
        if index is None:
            return
        entry = self._table[index]
        alone = self._decode_alone.predict(times.decode_rows, times.decode_context)
        if alone:
            entry.decode.add(decode / alone)
        if self._prefill_alone is not None and self._prefill_alone.mean:
            entry.prefill.add(per_token / self._prefill_alone.mean)


def _added(average: _Average | None, value: float) -> _Average:
    average = average or _Average(value)
    average.add(value)
    return average


def _estimate(partition: SmPartition, lanes: LaneTable) -> _Slowdowns:
    """Slowdowns before anything was measured.

    Fitted to one H200 (8,192-token prefill beside 32 decoding rows): decode on 16, 24, 32, 48, 64
    of 132 SMs is 4.7, 3.3, 2.6, 2.0, 1.6 times slower, prefill on the rest 1.16 to 1.83 times.
    """
    if partition.kind is LaneKind.PLAIN:
        return _Slowdowns(_Average(14.0), _Average(1.04))
    if partition.kind is LaneKind.PRIORITY:
        return _Slowdowns(_Average(3.2), _Average(1.18))
    decode_share = partition.decode / lanes.sms
    prefill_share = partition.prefill / lanes.sms
    decode = max(1.0, 0.85 * decode_share**-0.8)
    return _Slowdowns(_Average(decode), _Average(1.02 * prefill_share**-0.95))
