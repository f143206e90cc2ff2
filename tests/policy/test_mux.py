"""Policies on fake devices of many sizes: what they choose is feasible, sensible and quick."""

from __future__ import annotations

import itertools
import logging
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.batch import LaneKind, SmPartition
from aengine.errors import ConfigError
from aengine.policy.mux import (
    ChunkedOnly,
    Exclusive,
    GuardedMux,
    LaneTable,
    LaneTimes,
    MuxLoad,
    MuxPolicy,
    PriorityStreams,
)
from aengine.policy.mux_slo import SloFeedback, _DecodeAlone
from aengine.policy.mux_threshold import Division, Threshold

SMS = (78, 108, 114, 132, 148, 188)
H200 = LaneTable.of_device(132, unit=8, minimum=8)
MANUAL = [[112, 20, 1], [104, 28, 5], [96, 36, 10], [80, 52, 15], [64, 68, 20], [56, 76, 25]]

LANES = st.builds(
    lambda sms, unit, priorities, green: (
        LaneTable.of_device(sms, unit=unit, minimum=unit, priorities=priorities)
        if green
        else LaneTable(plain=SmPartition(kind=LaneKind.PLAIN, prefill=sms, decode=sms))
    ),
    st.sampled_from(SMS),
    st.sampled_from([2, 4, 8, 16]),
    st.booleans(),
    st.booleans(),
)


@st.composite
def loads(draw: st.DrawFn, lanes: LaneTable) -> MuxLoad:
    seconds = st.none() | st.floats(1e-6, 10.0)
    measured = st.builds(
        LaneTimes,
        partition=st.sampled_from(lanes.all),
        decode_rows=st.integers(0, 300),
        decode_seconds=seconds,
        prefill_tokens=st.integers(0, 10_000),
        prefill_seconds=seconds,
    )
    return MuxLoad(
        lanes=lanes,
        decode_rows=draw(st.integers(0, 300)),
        prefill_running=draw(st.integers(0, 10_000)),
        prefill_waiting=draw(st.integers(0, 10_000)),
        oldest_wait=draw(st.floats(0, 100)),
        itl_target=draw(st.none() | st.floats(1e-3, 1.0)),
        measured=tuple(draw(st.lists(measured, max_size=3))),
    )


@given(data=st.data(), lanes=LANES)
@settings(max_examples=150, deadline=None)
def test_every_policy_chooses_what_the_device_has(data: st.DataObject, lanes: LaneTable) -> None:
    policies: list[MuxPolicy] = [
        Exclusive(),
        ChunkedOnly(),
        PriorityStreams(),
        Threshold(),
        SloFeedback(0.02),
    ]
    for _ in range(4):
        load = data.draw(loads(lanes))
        for policy in policies:
            chosen = policy.select(load)
            assert chosen in lanes.all
            if not load.contended:
                assert chosen == lanes.plain


@pytest.mark.parametrize("sms", SMS)
def test_s32933_any_chip_splits_into_disjoint_groups(sms: int) -> None:
    lanes = LaneTable.of_device(sms, unit=8, minimum=8)
    assert lanes.green
    for partition in lanes.green:
        assert partition.prefill + partition.decode == sms
        assert partition.decode % 8 == 0
        assert min(partition.prefill, partition.decode) >= 8


@pytest.mark.parametrize("sms", SMS)
def test_cuda_python_2025_2765_a_count_the_device_cannot_have_becomes_the_next_larger(
    sms: int,
) -> None:
    lanes = LaneTable.of_device(sms, unit=8, minimum=8)
    for wanted in range(1, sms + 20):
        found = lanes.for_decode(wanted)
        assert found in lanes.green
        largest = lanes.green[-1]
        assert found.decode >= wanted or found == largest
        assert found.decode - 8 < wanted or found == lanes.green[0]


@pytest.mark.parametrize("sms", SMS)
@given(rows=st.integers(1, 400), more=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_more_decoding_rows_never_get_fewer_sms(sms: int, rows: int, more: int) -> None:
    lanes = LaneTable.of_device(sms, unit=8, minimum=8)
    policies = [Threshold(), Threshold([Division(prefill=40, decode=24, decode_rows=9)])]
    for policy in policies:
        few = policy.select(MuxLoad(lanes=lanes, decode_rows=rows, prefill_waiting=1))
        many = policy.select(MuxLoad(lanes=lanes, decode_rows=rows + more, prefill_waiting=1))
        assert many.decode >= few.decode


def test_threshold_reads_the_four_yaml_fields() -> None:
    policy = Threshold.from_mapping(
        {
            "sm_group_num": 8,
            "manual_divisions": MANUAL,
            "split_forward_token_budget": 4096,
            "decode_bs_divisor": 36,
        }
    )
    assert policy.split_token_budget == 4096
    chosen = {
        rows: policy.select(MuxLoad(lanes=H200, decode_rows=rows, prefill_waiting=9)).decode
        for rows in (1, 4, 5, 12, 19, 25, 900)
    }
    assert chosen == {1: 24, 4: 24, 5: 32, 12: 40, 19: 56, 25: 80, 900: 80}


def test_threshold_small_batches_and_unsorted_rows() -> None:
    rows = [[64, 68, 10], [112, 16, 5], [96, 32, 7]]
    policy = Threshold.from_mapping({"sm_group_num": 5, "manual_divisions": rows})
    chosen = [
        policy.select(MuxLoad(lanes=H200, decode_rows=n, prefill_waiting=9)).decode
        for n in (3, 5, 8, 12)
    ]
    assert chosen == [16, 16, 32, 72]


def test_threshold_automatic_divisions_favour_prefill_and_reach_the_last_at_the_divisor() -> None:
    policy = Threshold.from_mapping({})
    planned = policy.partitions(H200)
    assert [(each.prefill, each.decode) for each in planned] == [
        (116, 16),
        (108, 24),
        (100, 32),
        (84, 48),
        (76, 56),
        (68, 64),
    ]
    first = policy.select(MuxLoad(lanes=H200, decode_rows=1, prefill_waiting=1))
    last = policy.select(MuxLoad(lanes=H200, decode_rows=36, prefill_waiting=1))
    assert (first, last) == (planned[0], planned[-1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode_bs_divisor": 0}, "decode_bs_divisor=0 must be at least 1"),
        ({"sm_group_num": 2}, "sm_group_num=2 must be at least 3"),
        ({"sm_group_num": "8"}, "must be an integer"),
        ({"split_forward_token_budget": 0}, "must be at least 1"),
        ({"manual_divisions": MANUAL[:2]}, "2 rows need sm_group_num=4"),
        ({"manual_divisions": [[1, 2]], "sm_group_num": 3}, "must be three numbers"),
        ({"manual_divisions": "rows"}, "must be a list"),
        ({"manual_divisions": [[0, 8, 1]], "sm_group_num": 3}, "prefill SMs=0 must be at least 1"),
        ({"manual_divisions": [[8, 8, 1], [16, 8, 1]], "sm_group_num": 4}, "must differ"),
        ({"manual_division": []}, "did you mean 'manual_divisions'"),
        ({"zzz": 1}, "known: sm_group_num"),
    ],
)
def test_threshold_refuses_what_has_no_meaning(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Threshold.from_mapping(fields)


def test_threshold_refuses_more_sms_than_there_are() -> None:
    policy = Threshold.from_mapping({"manual_divisions": MANUAL})
    policy.check(H200)
    with pytest.raises(ConfigError, match="needs at least 132 SMs and the device has 108"):
        policy.check(LaneTable.of_device(108, unit=8, minimum=8))


def test_without_green_contexts_policies_fall_back_to_priorities_then_to_plain() -> None:
    plain = SmPartition(kind=LaneKind.PLAIN, prefill=8, decode=8)
    priority = SmPartition(kind=LaneKind.PRIORITY, prefill=8, decode=8)
    for lanes, wanted in (
        (LaneTable(plain=plain, priority=priority), priority),
        (LaneTable(plain=plain), plain),
    ):
        load = MuxLoad(lanes=lanes, decode_rows=9, prefill_waiting=9)
        for policy in (PriorityStreams(), Threshold(), Threshold.from_mapping({})):
            assert policy.select(load) == wanted


class Device:
    """A device with a latency table: measured steps of one H200, noise-free."""

    DECODE: ClassVar = {16: 4.7, 24: 3.3, 32: 2.6, 48: 2.0, 64: 1.6}
    PREFILL: ClassVar = {16: 1.16, 24: 1.25, 32: 1.32, 48: 1.51, 64: 1.83}

    def __init__(self, priority_decode: float = 3.2) -> None:
        self.priority_decode = priority_decode
        self.context = 0

    def run(self, partition: SmPartition, *, decode: bool, prefill: bool) -> LaneTimes:
        slow, cost = 1.0, 1.0
        if decode and prefill:
            if partition.kind is LaneKind.PLAIN:
                slow, cost = 14.0, 1.04
            elif partition.kind is LaneKind.PRIORITY:
                slow, cost = self.priority_decode, 1.18
            else:
                nearest = min(self.DECODE, key=lambda sms: abs(sms - partition.decode))
                slow, cost = self.DECODE[nearest], self.PREFILL[nearest]
                slow *= nearest / partition.decode
                cost *= (132 - nearest) / partition.prefill
        return LaneTimes(
            partition=partition,
            decode_rows=32,
            decode_context=self.context,
            decode_seconds=(0.00687 + 3e-8 * self.context) * slow if decode else None,
            prefill_tokens=8192,
            prefill_seconds=0.227 * cost if prefill else None,
        )


def serve(policy: SloFeedback, device: Device, steps: int, **load: object) -> list[SmPartition]:
    """The choices of a policy that hears what they led to."""
    measured = [
        device.run(H200.plain, decode=True, prefill=False),
        device.run(H200.plain, decode=False, prefill=True),
    ]
    chosen = []
    for _ in range(steps):
        partition = policy.select(
            MuxLoad(
                lanes=H200,
                decode_rows=32,
                prefill_waiting=8192,
                measured=tuple(measured),
                **load,
            )
        )
        chosen.append(partition)
        measured = [device.run(partition, decode=True, prefill=True)]
    return chosen


@pytest.mark.parametrize("target", [0.012, 0.016, 0.020, 0.030])
def test_slo_feedback_meets_the_target_with_the_least_loss_of_prefill(target: float) -> None:
    device = Device()
    chosen = serve(SloFeedback(target), device, 300)[-1]
    times = {each: device.run(each, decode=True, prefill=True) for each in H200.all}
    assert times[chosen].decode_seconds <= target
    kinder = [
        each
        for each in H200.all
        if times[each].decode_seconds <= 0.8 * target
        and times[each].prefill_seconds < 0.9 * times[chosen].prefill_seconds
    ]
    assert not kinder, "a partition with room to spare costs prefill much less"


def test_slo_feedback_foresees_what_longer_contexts_cost() -> None:
    """Contexts grew while prompts kept coming: no step was alone, and no split was measured."""
    device, policy, target = Device(), SloFeedback(0.025), 0.025
    serve(policy, device, 100)
    for device.context in range(0, 60_000, 3000):
        measured = (device.run(H200.plain, decode=True, prefill=False),)
        policy.select(MuxLoad(lanes=H200, decode_rows=32, measured=measured))
    device.context = 120_000
    load = MuxLoad(lanes=H200, decode_rows=32, decode_context=120_000, prefill_waiting=8192)
    chosen = policy.select(load)
    assert device.run(chosen, decode=True, prefill=True).decode_seconds <= target
    short = policy.select(MuxLoad(lanes=H200, decode_rows=32, prefill_waiting=8192))
    assert short == chosen, "it stays a while where it is safe"


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**6), st.floats(1e-4, 1.0))),
    st.integers(1, 300),
    st.integers(0, 10**7),
)
def test_what_a_step_alone_takes_is_foretold_within_reason(
    steps: list[tuple[int, int, float]], rows: int, context: int
) -> None:
    alone = _DecodeAlone()
    assert alone.predict(rows, context) is None
    for step in steps:
        alone.add(*step)
    if steps:
        predicted = alone.predict(rows, context)
        assert predicted is not None
        longest = max(seconds for _, _, seconds in steps)
        shortest = min(seconds for _, _, seconds in steps)
        least = max(1, min(tokens for _, tokens, _ in steps))
        assert 0.5 * shortest <= predicted * 1.001
        assert predicted <= longest * max(1, context / least) * 1.001


def test_slo_feedback_prefers_priority_streams_where_partitions_lose() -> None:
    assert serve(SloFeedback(0.030), Device(priority_decode=2.0), 200)[-1] == H200.priority
    assert serve(SloFeedback(0.012), Device(priority_decode=3.2), 200)[-1].kind is LaneKind.GREEN


def test_slo_feedback_is_off_when_nothing_is_at_risk() -> None:
    assert serve(SloFeedback(5.0), Device(), 100)[-1] == H200.plain
    policy = SloFeedback(0.012)
    serve(policy, Device(), 50)
    assert policy.select(MuxLoad(lanes=H200, decode_rows=32)) == H200.plain
    assert policy.select(MuxLoad(lanes=H200, prefill_waiting=9)) == H200.plain
    assert SloFeedback().select(MuxLoad(lanes=H200, decode_rows=9, prefill_waiting=9)) == H200.plain


def test_slo_feedback_does_not_flutter() -> None:
    chosen = serve(SloFeedback(0.018), Device(), 400)
    switches = sum(a != b for a, b in itertools.pairwise(chosen))
    assert switches <= 8
    assert len(set(chosen[-100:])) == 1


def test_slo_feedback_takes_the_gentlest_choice_when_the_target_cannot_be_met() -> None:
    device = Device()
    chosen = serve(SloFeedback(0.001), device, 200)[-1]
    steps = [device.run(each, decode=True, prefill=True).decode_seconds for each in H200.all]
    assert device.run(chosen, decode=True, prefill=True).decode_seconds <= 1.1 * min(steps)


def test_slo_feedback_learns_the_table_of_the_device() -> None:
    policy = SloFeedback(0.020)
    chosen = serve(policy, Device(), 200)[-1]
    decode, prefill = policy.latency_table(H200)[chosen]
    truth = Device().run(chosen, decode=True, prefill=True)
    assert decode == pytest.approx(truth.decode_seconds / 0.00687, rel=0.01)
    assert prefill == pytest.approx(truth.prefill_seconds / 0.227, rel=0.01)


@pytest.mark.parametrize(
    "bad", [{"itl": 0.0}, {"itl": float("nan")}, {"margin": 0}, {"patience": 0}]
)
def test_slo_feedback_refuses_absurd_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        SloFeedback(**bad)


def test_chunked_only_refuses_an_absurd_chunk() -> None:
    with pytest.raises(ConfigError, match="chunk=0 must be at least 1"):
        ChunkedOnly(0)


class Broken:
    """A caller's policy that fails in three ways, and then works."""

    def __init__(self) -> None:
        self.calls = 0

    def select(self, load: MuxLoad) -> SmPartition:
        self.calls += 1
        if self.calls == 1:
            raise ZeroDivisionError
        if self.calls == 2:
            return None
        if self.calls == 3:
            return SmPartition(kind=LaneKind.GREEN, prefill=131, decode=1)
        return load.lanes.green[0]


def test_a_broken_policy_falls_back_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = GuardedMux(Broken())
    load = MuxLoad(lanes=H200, decode_rows=9, prefill_waiting=9)
    with caplog.at_level(logging.WARNING, logger="aengine"):
        chosen = [policy.select(load) for _ in range(5)]
    assert chosen == [H200.plain] * 3 + [H200.green[0]] * 2
    assert (policy.faults, policy.switches) == (3, 1)
    assert len(caplog.records) == 1
    assert "Broken" in caplog.text


def test_shipped_policies_are_policies() -> None:
    shipped = (
        Exclusive(),
        ChunkedOnly(),
        PriorityStreams(),
        Threshold(),
        SloFeedback(),
        GuardedMux(Exclusive()),
    )
    assert all(isinstance(policy, MuxPolicy) for policy in shipped)
