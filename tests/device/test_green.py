"""Lanes: what a GPU can be split into, on a driver that plays GPUs of many sizes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import pytest

from aengine.batch import LaneKind, SmPartition
from aengine.device import CpuDevice, CudaDevice, FakeDevice
from aengine.device import driver as driver_module
from aengine.device.driver import Driver
from aengine.device.green import HIGH_PRIORITY, Splits, probe
from aengine.device.lanes import Lanes, open_lanes, use_threads
from aengine.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHIPS = [(78, 2, 4), (108, 2, 4), (114, 8, 8), (132, 8, 8), (148, 8, 8), (188, 8, 8)]
"""SMs, alignment and smallest group."""


class Chip:
    """A driver of its own on the playing library, which has one GPU at a time."""

    def __init__(self, library: Path) -> None:
        self.driver = Driver(str(library))
        self._library = ctypes.PyDLL(str(library))

    def become(
        self,
        sms: int,
        unit: int = 8,
        minimum: int = 8,
        *,
        refusal: int = 0,
        priorities: bool = True,
        name: bytes = b"Simulated GPU",
    ) -> None:
        self._name = ctypes.create_string_buffer(name)
        self._library.fakeSms(sms, unit, minimum, refusal, int(priorities), self._name)

    def ask(self, what: str, stream: Any = None) -> int:
        function = getattr(self._library, what)
        if stream is None:
            return int(function())
        function.argtypes = (ctypes.c_void_p,)
        return int(function(stream.handle))

    def sms_of(self, stream: Any) -> set[int]:
        first = self.ask("fakeFirstSm", stream)
        return set(range(first, first + self.ask("fakeNumSms", stream)))

    def device(self) -> CudaDevice:
        return CudaDevice(driver=self.driver, guard=lambda _: contextlib.nullcontext())


@pytest.fixture
def chip(fake_cuda: Path) -> Iterator[Chip]:
    made = Chip(fake_cuda)
    made.become(132)
    yield made
    made.become(132)


@contextlib.contextmanager
def opened(chip: Chip, **options: Any) -> Iterator[Lanes]:
    device = chip.device()
    lanes = open_lanes(device, device.stream("forward"), cores=1, **options)
    try:
        yield lanes
    finally:
        device.close()
        lanes.close()


@pytest.mark.parametrize(("sms", "unit", "minimum"), CHIPS)
def test_any_chip_is_asked_and_not_looked_up(chip: Chip, sms: int, unit: int, minimum: int) -> None:
    """known-faults: S#32933."""
    chip.become(sms, unit, minimum)
    found = probe(chip.driver)
    assert found.obstacle is None
    assert found.sms == sms
    assert found.unit == minimum
    assert found.kind is LaneKind.GREEN
    expected = range(minimum, sms - minimum + 1, unit)
    assert [each.decode for each in found.green] == list(expected)
    assert all(each.prefill + each.decode == sms for each in found.green)


@pytest.mark.parametrize(("sms", "unit", "minimum"), CHIPS)
def test_the_two_lanes_of_a_partition_are_disjoint_and_use_every_sm(
    chip: Chip, sms: int, unit: int, minimum: int
) -> None:
    """known-faults: pytorch 195378."""
    chip.become(sms, unit, minimum)
    with opened(chip) as lanes:
        green = lanes.of_kind(LaneKind.GREEN)
        assert green
        for partition in green:
            pair = lanes.pair(partition)
            prefill, decode = chip.sms_of(pair.prefill), chip.sms_of(pair.decode)
            assert not prefill & decode
            assert prefill | decode == set(range(sms))
            assert (len(prefill), len(decode)) == (partition.prefill, partition.decode)
        handles = [s.handle for pair in lanes.pairs for s in (pair.prefill, pair.decode)]
        # The priority pair shares the plain pair's prefill stream; all others are distinct.
        assert len(set(handles)) == len(handles) - 1


def test_a_count_becomes_what_the_driver_makes_of_it(chip: Chip) -> None:
    """known-faults: cuda-python 2025, 2765: feasible is what a real split gives."""
    with opened(chip, decode_counts=[9, 16, 33]) as lanes:
        assert [each.decode for each in lanes.of_kind(LaneKind.GREEN)] == [16, 40]


@pytest.mark.parametrize("count", [0, -8, 125, 132, 1000])
def test_a_count_that_leaves_a_side_nothing_is_refused(chip: Chip, count: int) -> None:
    found = probe(chip.driver)
    with pytest.raises(ConfigError, match="at least"):
        found.choose([count])


def test_default_splits_of_an_h200(chip: Chip) -> None:
    assert [each.decode for each in probe(chip.driver).choose()] == [16, 24, 32, 48, 64]


def test_the_default_splits_of_a_small_chip_are_those_it_has(chip: Chip) -> None:
    chip.become(16)
    assert probe(chip.driver).choose() == (SmPartition(kind=LaneKind.GREEN, prefill=8, decode=8),)


def test_decode_streams_come_first(chip: Chip) -> None:
    with opened(chip) as lanes:
        for pair in lanes.pairs[1:]:
            assert chip.ask("fakePriority", pair.decode) % 2**32 == HIGH_PRIORITY % 2**32
            assert chip.ask("fakePriority", pair.prefill) == 0


def test_no_context_is_made_current(chip: Chip) -> None:
    chip.driver.context(0)
    with chip.device().current():
        before = ctypes.c_void_p()
        chip.driver.calls["context_get"](ctypes.byref(before))
        with opened(chip):
            after = ctypes.c_void_p()
            chip.driver.calls["context_get"](ctypes.byref(after))
    assert after.value == before.value


def test_lanes_are_given_back_and_not_made_again(chip: Chip) -> None:
    before = chip.ask("fakeGreenContexts")
    seen = []
    for _ in range(3):
        with opened(chip) as lanes:
            seen.append({p.decode.handle for p in lanes.pairs if p.partition.kind.name == "GREEN"})
    assert chip.ask("fakeGreenContexts") - before == 2 * len(seen[0])
    assert seen[0] == seen[1] == seen[2]


def test_lanes_in_use_are_nobody_elses(chip: Chip) -> None:
    with opened(chip) as first, opened(chip) as second:
        ours = {s.handle for p in first.pairs for s in (p.prefill, p.decode)}
        theirs = {s.handle for p in second.pairs for s in (p.prefill, p.decode)}
    assert not ours & theirs


def test_a_lane_that_still_runs_is_not_given_to_the_next(chip: Chip) -> None:
    device = chip.device()
    lanes = open_lanes(device, device.stream("forward"), cores=1, decode_counts=[16])
    stream: Any = lanes.pairs[-1].decode
    chip._library.fakeKernel.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    chip._library.fakeKernel(stream.handle, int(0.3e9))
    lanes.close()
    assert not chip.driver.idle_lanes
    device.close()


async def test_work_on_two_lanes_is_awaited_as_on_any_stream(chip: Chip) -> None:
    with opened(chip) as lanes:
        for pair in lanes.pairs:
            first = pair.prefill.launch(lambda: 3)
            joined = pair.decode.launch(lambda x: x + 4, first)
            assert await joined == 7


# -- what cannot be had ------------------------------------------------------------------------


def test_too_few_sms(chip: Chip) -> None:
    chip.become(14)
    found = probe(chip.driver)
    assert found.green == ()
    assert "14 SMs" in str(found)
    assert "at least 8 need 16" in str(found)
    assert found.kind is LaneKind.PRIORITY


def test_a_mig_instance_says_that_it_is_one(chip: Chip) -> None:
    chip.become(14, name=b"NVIDIA H200 MIG 1g.18gb")
    assert "a MIG instance (NVIDIA H200 MIG 1g.18gb) has 14 SMs" in str(probe(chip.driver))


def test_a_driver_that_refuses(chip: Chip) -> None:
    chip.become(132, refusal=801, name=b"NVIDIA H200 MIG 3g.71gb")
    found = probe(chip.driver)
    assert found.green == ()
    assert "MIG instance" in str(found)
    assert "801" in str(found)


@pytest.mark.parametrize("priorities", [True, False])
def test_an_old_driver_falls_back(chip: Chip, priorities: bool) -> None:
    """known-faults: S#8131, S#8432."""
    chip.become(132, priorities=priorities)
    del chip.driver.calls["green_stream"]
    with opened(chip) as lanes:
        kinds = [pair.partition.kind for pair in lanes.pairs]
    assert kinds == [LaneKind.PLAIN, LaneKind.PRIORITY][: 1 + priorities]
    assert "cuGreenCtxStreamCreate" in lanes.why
    assert ("stream priorities" if priorities else "plain streams") in lanes.why


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """known-faults: S#8131, S#8432: importing and asking work without one."""

    def no_driver(library: str = "") -> Driver:
        raise DeviceError("no CUDA driver here: none")

    monkeypatch.setattr("aengine.device.green.load_driver", no_driver)
    found = probe()
    assert found == Splits(obstacle="no CUDA driver here: none")
    assert str(found).startswith("plain streams (no green contexts: no CUDA driver here")


def test_a_driver_without_the_functions_still_loads(chip: Chip) -> None:
    assert set(driver_module.GREEN) <= driver_module._REPLACEABLE
    assert chip.driver.lacks(driver_module.GREEN) == []
    assert chip.driver.lacks(["green_create"]) == []
    del chip.driver.calls["green_create"]
    assert chip.driver.lacks(driver_module.GREEN) == ["cuGreenCtxCreate"]


def test_a_missing_gpu_is_an_obstacle(chip: Chip) -> None:
    assert "CUDA_ERROR_INVALID_DEVICE" in str(probe(chip.driver, 3))


# -- CPU and fake lanes ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [CpuDevice, FakeDevice])
def test_cores_are_shared_out(make: Callable[[], Any]) -> None:
    device = make()
    lanes = open_lanes(device, device.stream("forward"), cores=8)
    assert [(p.partition.prefill, p.partition.decode) for p in lanes.pairs] == [
        (8, 8),
        (6, 2),
        (4, 4),
    ]
    assert lanes.plain.partition.kind is LaneKind.PLAIN
    device.close()
    lanes.close()


def test_one_core_is_not_shared_out() -> None:
    device = CpuDevice()
    lanes = open_lanes(device, device.stream("forward"), cores=1)
    assert [p.partition.kind for p in lanes.pairs] == [LaneKind.PLAIN]
    device.close()


def test_a_share_of_the_cores_is_at_least_one() -> None:
    device = FakeDevice()
    with pytest.raises(ConfigError, match="at least 1"):
        open_lanes(device, device.stream("forward"), cores=4, decode_counts=[4])


async def test_each_thread_computes_with_its_share() -> None:
    import torch

    device = CpuDevice()
    lanes = open_lanes(device, device.stream("forward"), cores=3, set_threads=use_threads)
    partition = SmPartition(kind=LaneKind.GREEN, prefill=2, decode=1)
    pair = lanes.pair(partition)
    assert await pair.prefill.launch(torch.get_num_threads) == 2
    assert await pair.decode.launch(torch.get_num_threads) == 1
    device.close()
