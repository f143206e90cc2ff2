"""Predictions: from device time only, never late by their own doing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aengine.device.pace import ANCHOR_LIFE_NS, MAX_KEYS, DeviceClock, Pace, WaitPolicy

DURATIONS = st.lists(st.integers(0, 10**9), min_size=1, max_size=20)


@given(DURATIONS)
def test_the_shortest_of_the_last_four_is_expected(durations: list[int]) -> None:
    pace = Pace()
    assert pace.expect("decode") is None
    for duration in durations:
        pace.learn("decode", duration)
    assert pace.expect("decode") == min(durations[-4:])
    assert pace.expect("prefill") is None


def test_the_number_of_kinds_is_bounded() -> None:
    pace = Pace()
    for key in range(10 * MAX_KEYS):
        pace.learn(key, key)
    assert len(pace._seen) <= MAX_KEYS
    assert pace.expect(10 * MAX_KEYS - 1) == 10 * MAX_KEYS - 1


@given(st.integers(0, 10**12), st.integers(-(10**9), 10**9), st.integers(0, 10**10))
def test_host_times_come_from_a_recent_anchor(host: int, apart: int, later: int) -> None:
    clock = DeviceClock[int](lambda a, b: b - a)
    assert clock.host_time(5, host) is None
    clock.anchor(1000, host)
    now = host + later
    expected = host + apart if later <= ANCHOR_LIFE_NS else None
    assert clock.host_time(1000 + apart, now) == expected


def test_an_open_event_has_no_host_time() -> None:
    clock = DeviceClock[int](lambda a, b: None)
    clock.anchor(0, 0)
    assert clock.host_time(1, 1) is None


@given(st.lists(st.integers(0, 10_000_000), max_size=50))
def test_contention_is_remembered_for_a_while_and_forgotten(delays: list[int]) -> None:
    clock = DeviceClock[int](lambda a, b: b - a)
    for delay in delays:
        clock.regained(delay)
        assert clock.contention_ns >= delay
    for _ in range(200):
        clock.regained(0)
    assert clock.contention_ns == 0


@given(st.integers(0, 10**9))
def test_a_wait_is_polite_in_a_loop_that_is_not_the_devices_own(expected: int) -> None:
    policy = WaitPolicy()
    blocked = policy.margin(expected, own=False) + policy.overtime(expected, own=False)
    assert blocked <= policy.polite_spin
    assert policy.margin(expected, own=True) >= policy.margin_least
    assert policy.overtime(expected, own=True) >= policy.overtime_least
