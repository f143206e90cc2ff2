"""`LaneMeter`: what ran side by side and how long it took, for the policy and for `stats()`.

Times are those between settling steps, as the host sees them: they include what a step waited for
its lane, which is what a reader of the stream feels too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from aengine.policy.mux import LaneTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aengine.batch import SmPartition, StepPlan


class LaneMeter:
    """Times of the steps of both lanes. A step is `beside` if the other lane was busy throughout.

    Args:
        now: the clock at the start, seconds.
    """

    def __init__(self, now: float) -> None:
        self._fresh: list[LaneTimes] = []
        self._beside: list[tuple[int, int, float]] = []
        self._since = now
        self._share: defaultdict[SmPartition, float] = defaultdict(float)
        self._decode: defaultdict[SmPartition, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def use(self, partition: SmPartition, now: float) -> None:
        """From the last call until now the device was shared like this."""
        self._share[partition] += now - self._since
        self._since = now

    def decoded(
        self, partition: SmPartition, plan: StepPlan, seconds: float, *, beside: bool, alone: bool
    ) -> None:
        """A decode step is done. Neither `beside` nor `alone`: prefill came or went meanwhile."""
        total = self._decode[partition]
        total[0] += seconds
        total[1] += 1
        rows, context = plan.num_rows, int(plan.starts.sum()) + plan.num_rows
        if beside:
            self._beside.append((rows, context, seconds))
        elif alone:
            self._fresh.append(
                LaneTimes(
                    partition=partition,
                    decode_rows=rows,
                    decode_context=context,
                    decode_seconds=seconds,
                )
            )

    def prefilled(
        self, partition: SmPartition, plan: StepPlan, seconds: float, *, alone: bool
    ) -> None:
        """A prefill step is done, and with it the decode steps beside it."""
        steps, self._beside = self._beside, []
        if not steps and not alone:
            return
        count = len(steps)
        self._fresh.append(
            LaneTimes(
                partition=partition,
                decode_rows=steps[-1][0] if steps else 0,
                decode_context=steps[-1][1] if steps else 0,
                decode_seconds=sum(step[2] for step in steps) / count if steps else None,
                prefill_tokens=plan.num_tokens,
                prefill_seconds=seconds,
            )
        )

    def take(self) -> tuple[LaneTimes, ...]:
        """What was measured since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def stats(self) -> Mapping[str, Any]:
        """Share of time and mean decode step (seconds) by partition."""
        whole = sum(self._share.values())
        return {
            "share": {label(p): spent / whole for p, spent in self._share.items() if whole},
            "decode_step": {label(p): t / n for p, (t, n) in self._decode.items()},
        }


def label(partition: SmPartition) -> str:
    """A partition's name in stats and traces."""
    return f"{partition.kind.value} {partition.prefill}+{partition.decode}"
