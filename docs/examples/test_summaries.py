"""Tests of an application that uses an engine: no model, no waiting, every failure on demand."""

import pytest
from summaries import summarize, summarize_all

from aengine.testing import Faults

TEXT = "Rain fell all day. The river rose."


@pytest.mark.asyncio
async def test_it_asks_for_each_text(aengine_fake):
    replies = {"river": "A flood. ", "sun": "A drought."}
    async with aengine_fake(replies) as engine:
        found = await summarize_all(engine, [TEXT, "The sun burned."])
    assert found == ["A flood.", "A drought."]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "faults",
    [
        Faults(raise_at={3: RuntimeError("one step fails")}),
        Faults(lose_at=3),  # the device is gone, and the engine with it
        Faults(drop_at=3),  # nothing is heard of the device any more
        Faults(delay=0.05),  # seconds a step: too slow for this patience
    ],
    ids=["step", "device", "silence", "slow"],
)
async def test_it_falls_back_to_the_first_sentence(aengine_fake, faults):
    async with aengine_fake("A long summary of it all.", faults=faults) as engine:
        assert await summarize(engine, TEXT, patience=0.2) == "Rain fell all day."
