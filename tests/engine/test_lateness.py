"""Deciding late: never later than launching in time allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.engine.lateness import LEAST_LEAD, REMEMBERED, SHORTEST_WAIT, UNKNOWN, Lateness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(lateness: Lateness, clock: Clock, length: float, needed: float) -> float:
    """One step of `length` during which the next takes `needed` to launch; how early it was."""
    wait = lateness.wait(length)
    clock.now += wait + needed
    lateness.launched()
    return length - wait - needed


@given(st.lists(st.floats(0.0, 0.004), min_size=1, max_size=60), st.floats(0.008, 0.05))
def test_a_host_as_slow_as_it_was_is_in_time(needed: list[float], length: float) -> None:
    clock = Clock()
    lateness = Lateness(clock)
    slowest: list[float] = []
    for each in needed:
        known = max(slowest[-REMEMBERED:], default=UNKNOWN)
        early = step(lateness, clock, length, each)
        if each <= known:
            assert early >= LEAST_LEAD / 2
        slowest.append(each)


def test_a_quick_host_decides_late() -> None:
    clock = Clock()
    lateness = Lateness(clock)
    for _ in range(REMEMBERED):
        step(lateness, clock, 0.005, 0.0005)
    assert lateness.wait(0.005) == pytest.approx(0.005 - LEAST_LEAD - 0.00075)


def test_a_slow_host_decides_at_once() -> None:
    clock = Clock()
    lateness = Lateness(clock)
    step(lateness, clock, 0.020, 0.012)
    assert lateness.wait(0.015) == 0.0


@pytest.mark.parametrize("left", [0.0, LEAST_LEAD, LEAST_LEAD + 1.5 * UNKNOWN + SHORTEST_WAIT])
def test_nothing_to_wait_for(left: float) -> None:
    assert Lateness(Clock()).wait(left) == 0.0


def test_who_is_woken_before_its_time_learns_nothing() -> None:
    clock = Clock()
    lateness = Lateness(clock)
    before = lateness.lead
    assert lateness.wait(0.020) > 0
    clock.now += 0.001
    lateness.launched()
    lateness.launched()
    assert lateness.lead == before
