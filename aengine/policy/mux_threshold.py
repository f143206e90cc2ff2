"""`Threshold`: the more rows decode, the larger decode's group of SMs.

It reads the four fields of SGLang's PD-multiplexing YAML (sgl-project/sglang PR 12275), with the
same meaning where that is defined, and refuses what has none.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aengine.errors import ConfigError
from aengine.policy.mux import LaneTable, MuxLoad, at_least

if TYPE_CHECKING:
    from aengine.batch import SmPartition

SMALLEST_DECODE_GROUP = 16
"""Automatic divisions give decode at least this many SMs, and never more than prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """From `decode_rows` rows on: this many SMs for each side."""

    prefill: int
    decode: int
    decode_rows: int


class Threshold:
    """Divisions with thresholds, or divisions spread evenly over the device's.

    Args:
        divisions: manual divisions in any order; empty: automatic ones.
        groups: the number of groups, the two unsplit ones included (automatic divisions).
        divisor: rows at which the last automatic division is reached.
        split_token_budget: a prefill turn computes about `split_token_budget / tokens` layers.

    Raises:
        ConfigError: a number is too small, or two divisions have the same threshold.
    """

    def __init__(
        self,
        divisions: Sequence[Division] = (),
        *,
        groups: int = 8,
        divisor: int = 36,
        split_token_budget: int = 65_536,
    ) -> None:
        self.groups = at_least("sm_group_num", groups, 3)
        self.divisor = at_least("decode_bs_divisor", divisor, 1)
        self.split_token_budget = at_least("split_forward_token_budget", split_token_budget, 1)
        for division in divisions:
            at_least("manual_divisions: prefill SMs", division.prefill, 1)
            at_least("manual_divisions: decode SMs", division.decode, 1)
            at_least("manual_divisions: threshold", division.decode_rows, 0)
        self.divisions = tuple(sorted(divisions, key=lambda each: each.decode_rows))
        self._thresholds = [division.decode_rows for division in self.divisions]
        if len(set(self._thresholds)) < len(self._thresholds):
            raise ConfigError(
                f"manual_divisions: thresholds {self._thresholds} must differ from each other"
            )
        self._planned: tuple[LaneTable, tuple[SmPartition, ...]] | None = None

    @classmethod
    def from_mapping(cls, fields: Mapping[str, object]) -> Threshold:
        """From the four YAML fields: `sm_group_num`, `manual_divisions` (rows of prefill SMs,
        decode SMs, threshold), `split_forward_token_budget`, `decode_bs_divisor`.

        Raises:
            ConfigError: an unknown field or a value without a meaning; the message says which.
        """
        known = (
            "sm_group_num",
            "manual_divisions",
            "split_forward_token_budget",
            "decode_bs_divisor",
        )
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"unknown PD-multiplexing field {name!r}; {hint}")
        groups = at_least("sm_group_num", fields.get("sm_group_num", 8), 3)
        divisions = _divisions(fields.get("manual_divisions"))
        if divisions and len(divisions) != groups - 2:
            raise ConfigError(
                f"manual_divisions has {len(divisions)} rows, but sm_group_num={groups} leaves "
                f"{groups - 2} split groups (the first and the last are not split); "
                f"{len(divisions)} rows need sm_group_num={len(divisions) + 2}"
            )
        budget = fields.get("split_forward_token_budget", 65_536)
        return cls(
            divisions,
            groups=groups,
            divisor=at_least("decode_bs_divisor", fields.get("decode_bs_divisor", 36), 1),
            split_token_budget=at_least("split_forward_token_budget", budget, 1),
        )

    def check(self, lanes: LaneTable) -> None:
        """Compare the divisions with a device.

        Raises:
            ConfigError: a division has more SMs than the device.
        """
        for division in self.divisions:
            total = division.prefill + division.decode
            if total > lanes.sms:
                raise ConfigError(
                    f"division [{division.prefill}, {division.decode}] needs at least {total} SMs "
                    f"and the device has {lanes.sms}"
                )

    def select(self, load: MuxLoad) -> SmPartition:
        """The division for this many decoding rows; no split if one side has nothing to do."""
        if not load.contended:
            return load.lanes.plain
        planned = self.partitions(load.lanes)
        if not planned:
            return load.lanes.without_groups
        rows = load.decode_rows
        if self.divisions:
            # Fewer rows than the lowest threshold: its division, the smallest for decode.
            index = max(0, bisect_right(self._thresholds, rows) - 1)
        else:
            index = min(len(planned), max(1, rows * len(planned) // self.divisor)) - 1
        return planned[index]

    def partitions(self, lanes: LaneTable) -> tuple[SmPartition, ...]:
        """The device's partitions for the divisions, in order of threshold.

        A count that the device cannot have becomes the next larger one for decode.
        """
        if self._planned is not None and self._planned[0] is lanes:
            return self._planned[1]
        if self.divisions:
            self.check(lanes)
            found = tuple(lanes.for_decode(division.decode) for division in self.divisions)
        else:
            found = _spread(lanes, self.groups - 2)
        self._planned = (lanes, found)
        return found


def _divisions(rows: object) -> list[Division]:
    if rows is None:
        return []
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
        raise ConfigError(f"manual_divisions={rows!r} must be a list of rows")
    found = []
    for row in rows:
        if isinstance(row, (str, bytes)) or not isinstance(row, Sequence) or len(row) != 3:
            raise ConfigError(
                f"manual_divisions: {row!r} must be three numbers: "
                "prefill SMs, decode SMs, decode rows from which it holds"
            )
        found.append(
            Division(
                prefill=at_least("manual_divisions: prefill SMs", row[0], 1),
                decode=at_least("manual_divisions: decode SMs", row[1], 1),
                decode_rows=at_least("manual_divisions: threshold", row[2], 0),
            )
        )
    return found


def _spread(lanes: LaneTable, count: int) -> tuple[SmPartition, ...]:
    """At most `count` partitions, evenly over those that favour prefill."""
    fit = [
        partition
        for partition in lanes.green
        if partition.prefill >= partition.decode >= SMALLEST_DECODE_GROUP
    ] or list(lanes.green[:1])
    if len(fit) <= count:
        return tuple(fit)
    if count == 1:
        return (fit[0],)
    return tuple(fit[round(i * (len(fit) - 1) / (count - 1))] for i in range(count))
