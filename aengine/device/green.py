"""Green contexts: groups of streaming multiprocessors (SMs) with streams of their own.

Each partition is one split of the device into decode's group and the rest for prefill, so the two
are disjoint (two separate splits may overlap). What can be had is found by splitting, not by a
table of chips: the driver rounds a count up to what it can make, and its answer is what counts.
No green context is ever made current: work goes to its streams, which torch takes as they are.

Source: CUDA driver API reference, "Green Contexts".
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aengine.batch import LaneKind, SmPartition
from aengine.device.driver import GREEN, STREAM_NON_BLOCKING, load_driver
from aengine.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.device.driver import Driver

HIGH_PRIORITY = -5
"""Of decode's streams; the driver clamps it to what the device has."""
_DEFAULT_STREAM = 1
_SM_RESOURCE = 1
_NUM_SMS = 16
_PRIORITIES_SUPPORTED = 78
_EIGHTHS = (1, 1.5, 2, 3, 4)
"""Decode's share of the device in the splits that are made by default, in eighths."""


class _Resource(ctypes.Structure):
    """CUdevResource: 144 bytes, of which only the count is for anybody but the driver."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("internal", ctypes.c_ubyte * 92),
        ("sms", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
        # Newer drivers must not write beyond what is ours.
        ("spare", ctypes.c_ubyte * 112),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """What a GPU can do for lanes.

    Args:
        sms: its streaming multiprocessors; 0: there is no GPU.
        unit: the smallest group, and the step between groups; 0: it cannot be split.
        green: every split, by decode's share.
        priorities: whether streams have priorities.
        obstacle: why it cannot be split; None: it can.
    """

    sms: int = 0
    unit: int = 0
    green: tuple[SmPartition, ...] = ()
    priorities: bool = False
    obstacle: str | None = None

    @property
    def kind(self) -> LaneKind:
        """The best that it can do."""
        if self.green:
            return LaneKind.GREEN
        return LaneKind.PRIORITY if self.priorities else LaneKind.PLAIN

    def __str__(self) -> str:
        if self.obstacle is None:
            decode = [each.decode for each in self.green]
            return (
                f"green contexts: {self.sms} SMs, groups of {self.unit} and more; "
                f"decode can have {decode[0]} to {decode[-1]}"
            )
        instead = "stream priorities" if self.priorities else "plain streams"
        return f"{instead} (no green contexts: {self.obstacle})"

    def choose(self, decode_counts: Sequence[int] | None = None) -> tuple[SmPartition, ...]:
        """The splits to make lanes for.

        Args:
            decode_counts: SMs that decode should have at least; default: an eighth to a half.

        Raises:
            ConfigError: a count is below 1, or leaves prefill less than the smallest group.
        """
        if not self.green:
            return ()
        chosen = set()
        if decode_counts is None:
            for eighths in _EIGHTHS:
                fit = [each for each in self.green if each.decode * 8 <= self.sms * eighths]
                chosen.add(fit[-1] if fit else self.green[0])
        for count in decode_counts or ():
            fit = [each for each in self.green if each.decode >= count]
            if count < 1 or not fit:
                raise ConfigError(
                    f"decode_counts: {count} must be at least 1 and at most "
                    f"{self.green[-1].decode}: the device has {self.sms} SMs, and prefill needs a "
                    f"group of at least {self.unit}"
                )
            chosen.add(fit[0])
        return tuple(sorted(chosen, key=lambda each: each.decode))


def probe(driver: Driver | None = None, index: int = 0) -> Splits:
    """What this machine's GPU can do for lanes, and why not more. Makes nothing; never raises.

    Args:
        driver: the loaded driver; default: this process's.
        index: which GPU.
    """
    try:
        driver = driver or load_driver()
        device = driver.device(index)
    except DeviceError as error:
        return Splits(obstacle=str(error))
    sms = _attribute(driver, device, _NUM_SMS)
    priorities = bool(_attribute(driver, device, _PRIORITIES_SUPPORTED))
    if missing := driver.lacks(GREEN):
        obstacle = f"the driver is too old, it has no {missing[0]}"
        return Splits(sms=sms, priorities=priorities, obstacle=obstacle)
    name = _name(driver, device)
    kind = f"a MIG instance ({name})" if "MIG" in name.split() else name
    try:
        whole = _whole(driver, device)
        unit = _split(driver, whole, 1)[0].sms
        green = _every_split(driver, whole, unit)
    except DeviceError as error:
        return Splits(sms=sms, priorities=priorities, obstacle=f"{kind}: {error}")
    if not green:
        obstacle = f"{kind} has {whole.sms} SMs, two groups of at least {unit} need {2 * unit}"
        return Splits(sms=sms, unit=unit, priorities=priorities, obstacle=obstacle)
    return Splits(sms=whole.sms, unit=unit, green=green, priorities=priorities)


class PairHandles(NamedTuple):
    """Streams on the two sides of one split: for each side one to work on, one to capture on."""

    prefill: int
    decode: int
    prefill_capture: int
    decode_capture: int


def take_pair(driver: Driver, index: int, partition: SmPartition) -> PairHandles:
    """Streams on the two sides of one split.

    Raises:
        DeviceError: the driver refuses, or splits otherwise than `probe` saw.
    """
    idle = driver.idle_lanes.get((index, partition.decode))
    if idle:
        return idle.pop()
    device = driver.device(index)
    group, rest = _split(driver, _whole(driver, device), partition.decode)
    if (rest.sms, group.sms) != (partition.prefill, partition.decode):
        raise DeviceError(
            f"the driver split {rest.sms} + {group.sms} SMs where it had split "
            f"{partition.prefill} + {partition.decode}"
        )
    prefill, decode = (_context(driver, device, side) for side in (rest, group))
    return PairHandles(
        prefill=_stream(driver, prefill, 0),
        decode=_stream(driver, decode, HIGH_PRIORITY),
        prefill_capture=_stream(driver, prefill, 0),
        decode_capture=_stream(driver, decode, HIGH_PRIORITY),
    )


def return_pair(driver: Driver, index: int, partition: SmPartition, handles: PairHandles) -> None:
    """Keep idle streams and their contexts for the next taker; never destroy them.

    For the reason see `Driver.return_stream`; and streams that still run something are left alone.
    """
    if all(driver.calls["stream_query"](handle) == 0 for handle in handles):
        driver.idle_lanes.setdefault((index, partition.decode), []).append(handles)


def _attribute(driver: Driver, device: int, attribute: int) -> int:
    value = ctypes.c_int()
    if "device_attribute" in driver.calls:
        driver.calls["device_attribute"](ctypes.byref(value), attribute, device)
    return value.value


def _name(driver: Driver, device: int) -> str:
    text = ctypes.create_string_buffer(256)
    driver.calls["device_name"](text, len(text) - 1, device)
    return text.value.decode(errors="replace")


def _whole(driver: Driver, device: int) -> _Resource:
    resource = _Resource()
    driver.do("device_resource", device, ctypes.addressof(resource), _SM_RESOURCE)
    return resource


def _split(driver: Driver, whole: _Resource, count: int) -> tuple[_Resource, _Resource]:
    """A group of at least `count` SMs, and what remains."""
    group, rest, groups = _Resource(), _Resource(), ctypes.c_uint(1)
    driver.do(
        "resource_split",
        ctypes.addressof(group),
        ctypes.byref(groups),
        ctypes.addressof(whole),
        ctypes.addressof(rest),
        0,
        count,
    )
    if groups.value != 1:
        raise DeviceError(f"the driver made {groups.value} groups of {count} SMs, not 1")
    return group, rest


def _every_split(driver: Driver, whole: _Resource, unit: int) -> tuple[SmPartition, ...]:
    """The splits that leave prefill the smallest group or more, each tried out."""
    found: dict[int, SmPartition] = {}
    count = 1
    while count + unit <= whole.sms:
        try:
            group, rest = _split(driver, whole, count)
        except DeviceError:
            break  # the driver rounds up, and so it may run out before the arithmetic does
        if rest.sms < unit:
            break
        found[group.sms] = SmPartition(kind=LaneKind.GREEN, prefill=rest.sms, decode=group.sms)
        count = group.sms + 1
    return tuple(found.values())


def _context(driver: Driver, device: int, resource: _Resource) -> int:
    described = driver.make("resource_desc", ctypes.addressof(resource), 1)
    return driver.make("green_create", described, device, _DEFAULT_STREAM)


def _stream(driver: Driver, context: int, priority: int) -> int:
    return driver.make("green_stream", context, STREAM_NON_BLOCKING, priority)
