"""Lanes: for each way of sharing the device a pair of streams, one for prefill, one for decode.

All are made at start, because making one costs a millisecond and a captured graph belongs to the
stream that it was captured on. `open_lanes` makes what the device can do: green contexts (see
`green`), else priorities, else plain streams; on a CPU worker threads with a share of the cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aengine.batch import LaneKind, SmPartition
from aengine.device.cpu import CpuDevice
from aengine.device.cuda import CudaDevice
from aengine.device.green import HIGH_PRIORITY, PairHandles, probe, return_pair, take_pair
from aengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aengine.device.protocols import Device, Stream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LanePair:
    """Two streams whose work may run at once, each on its part of the device."""

    partition: SmPartition
    prefill: Stream
    decode: Stream
    prefill_capture: int | None = None
    """A stream (handle) like prefill's, on which its graphs are captured and nothing runs."""
    decode_capture: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Lanes:
    """The lanes of one engine.

    Args:
        pairs: the plain one first.
        why: what the device can do, and why not more.
        give_back: called by `close`, after the device has closed.
    """

    pairs: Sequence[LanePair]
    why: str
    give_back: Sequence[Callable[[], None]] = ()
    _by_partition: dict[SmPartition, LanePair] = field(init=False)

    def __post_init__(self) -> None:
        self._by_partition = {pair.partition: pair for pair in self.pairs}

    @property
    def plain(self) -> LanePair:
        return self.pairs[0]

    def of_kind(self, kind: LaneKind) -> tuple[SmPartition, ...]:
        """The partitions of one kind, smallest share of decode first."""
        found = (pair.partition for pair in self.pairs if pair.partition.kind is kind)
        return tuple(sorted(found, key=lambda each: each.decode))

    def pair(self, partition: SmPartition) -> LanePair:
        """The streams of a partition.

        Raises:
            KeyError: the device has no such partition.
        """
        return self._by_partition[partition]

    def close(self) -> None:
        """Give the streams back. After the device has closed: then nothing of theirs runs."""
        for give_back in self.give_back:
            give_back()
        self.give_back = ()


def open_lanes(
    device: Device,
    forward: Stream,
    *,
    cores: int,
    set_threads: Callable[[int], object] | None = None,
    decode_counts: Sequence[int] | None = None,
) -> Lanes:
    """Make the lanes of a device.

    Args:
        device: an open device.
        forward: the stream of steps that are not split; it is the plain pair's decode stream.
        cores: cores of a CPU device to share out.
        set_threads: sets the number of threads that computing uses on the calling thread.
        decode_counts: SMs (CPU: cores) of decode in each split; default: some of the possible.

    Raises:
        ConfigError: a count leaves one side nothing.
        DeviceError: the driver refuses.
    """
    if isinstance(device, CudaDevice):
        return _cuda_lanes(device, forward, decode_counts)
    if isinstance(device, CpuDevice):
        return _core_lanes(device, forward, cores, set_threads, decode_counts)
    return _core_lanes(device, forward, cores, None, decode_counts)


def use_threads(count: int) -> None:
    """torch computes with `count` threads on this thread from now on; others keep their number."""
    import torch

    # A thread's first use of torch takes over the number that was set last, anywhere. Let that
    # happen before this thread gets its own.
    torch.get_num_threads()
    torch.set_num_threads(count)


def _plain(device: Device, forward: Stream, total: int) -> LanePair:
    partition = SmPartition(kind=LaneKind.PLAIN, prefill=total, decode=total)
    return LanePair(partition=partition, prefill=device.stream("prefill"), decode=forward)


def _cuda_lanes(device: CudaDevice, forward: Stream, decode_counts: Sequence[int] | None) -> Lanes:
    driver = device.driver
    give_back: list[Callable[[], None]] = []
    found = probe(driver, device.index)
    pairs = [_plain(device, forward, found.sms)]
    if found.priorities:
        with device.current():
            # None of the device's own: it must not be asked how it is doing while it captures.
            capture = driver.take_stream(device.context, HIGH_PRIORITY)
        give_back.append(lambda: driver.return_stream(capture, device.context, HIGH_PRIORITY))
        pairs.append(
            LanePair(
                partition=SmPartition(kind=LaneKind.PRIORITY, prefill=found.sms, decode=found.sms),
                prefill=pairs[0].prefill,
                decode=device.stream("decode-first", priority=HIGH_PRIORITY),
                decode_capture=capture,
            )
        )
    for partition in found.choose(decode_counts):
        handles = take_pair(driver, device.index, partition)
        pairs.append(
            LanePair(
                partition=partition,
                prefill=device.wrap_stream(f"prefill-{partition.prefill}", handles.prefill),
                decode=device.wrap_stream(f"decode-{partition.decode}", handles.decode),
                prefill_capture=handles.prefill_capture,
                decode_capture=handles.decode_capture,
            )
        )

        def idle(partition: SmPartition = partition, handles: PairHandles = handles) -> None:
            return_pair(driver, device.index, partition, handles)

        give_back.append(idle)
    return Lanes(pairs=pairs, why=str(found), give_back=give_back)


def _core_lanes(
    device: Device,
    forward: Stream,
    cores: int,
    set_threads: Callable[[int], object] | None,
    decode_counts: Sequence[int] | None,
) -> Lanes:
    """A worker thread a lane; each computes with its share of the cores."""
    pairs = [_plain(device, forward, cores)]
    if decode_counts is None:
        decode_counts = sorted({cores // 4, cores // 2} - {0})
    for decode in decode_counts:
        if not 0 < decode < cores:
            raise ConfigError(
                f"decode_counts: {decode} of {cores} cores; each side needs at least 1"
            )
        pair = LanePair(
            partition=SmPartition(kind=LaneKind.GREEN, prefill=cores - decode, decode=decode),
            prefill=device.stream(f"prefill-{cores - decode}"),
            decode=device.stream(f"decode-{decode}"),
        )
        if set_threads is not None:
            # The first thing that its thread does: the setting belongs to the thread.
            pair.prefill.launch(set_threads, pair.partition.prefill)
            pair.decode.launch(set_threads, pair.partition.decode)
        pairs.append(pair)
    return Lanes(pairs=pairs, why=f"{cores} cores: worker threads with a share of them")
