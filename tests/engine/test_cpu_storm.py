"""The storm on the CPU model: whatever the weather, a finished request says what it says alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from aengine.engine import loading
from aengine.kernels import native
from aengine.model.files import LoadedFiles, open_model
from aengine.model.tensors import TensorTable
from tests.engine.storm import Place, Storm

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.batch import SmPartition
    from aengine.policy.mux import MuxLoad

LAYERS = 2


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> LoadedFiles:
    """The real file's first layers, its vocabulary and its tokenizer."""
    whole = open_model(smollm2_gguf)
    assert whole.weights is not None
    kept = {
        name: whole.weights[name]
        for name in whole.weights
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    config = replace(whole.config, num_layers=LAYERS)
    return replace(whole, config=config, weights=TensorTable("the cut file", kept))


@pytest.fixture(params=["int8", "float32"])
def place(
    request: pytest.FixtureRequest, files: LoadedFiles, monkeypatch: pytest.MonkeyPatch
) -> Place:
    """The kernels' mode; engines opened meanwhile get the cut file."""
    if not native.available():
        pytest.skip("the CPU kernels are not built")
    monkeypatch.setattr(loading, "_open", lambda config, on_progress: files)
    return Place(
        model="cut",
        device="cpu",
        dtype=str(request.param),
        tokens=range(1000, 40_000),
        bytes_per_token=LAYERS * 2 * 3 * 64 * (2 if request.param == "int8" else 4),
    )


def test_storm_on_the_cpu_model(place: Place) -> None:
    storm = Storm(place, 3)

    async def several() -> None:
        await storm.run(18)
        await storm.run(18, tight=True)

    asyncio.run(several())
    assert storm.preemptions, "these storms put no pressure on memory"
    assert storm.compared > 15
    assert storm.cut_short
    assert storm.cached


def test_storm_with_blocks_swapped_to_the_host(place: Place) -> None:
    storm = Storm(place, 5)

    async def several() -> None:
        await storm.run(12, swap=True)
        for _ in range(2):
            await storm.run(12, tight=True, swap=True)

    asyncio.run(several())
    assert storm.swapped, "nothing was swapped"
    assert storm.compared > 15


class Dice:
    """A policy that takes any partition, by a throw of the dice."""

    def __init__(self) -> None:
        self._rng = random.Random(4)
        self.thrown = 0

    def select(self, load: MuxLoad) -> SmPartition:
        self.thrown += 1
        return self._rng.choice(load.lanes.all)


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_storm_with_prefill_and_decode_side_by_side(place: Place, swap: bool) -> None:
    policy = Dice()
    storm = Storm(replace(place, options={"mux": [policy]}), 7)

    async def several() -> None:
        for tight in (False, True, True):
            await storm.run(12, tight=tight, swap=swap)

    asyncio.run(several())
    assert policy.thrown > 100
    assert storm.preemptions
    assert storm.compared > 15
    assert storm.cached
    assert bool(storm.swapped) is swap


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_storm_on_the_cpu_model_for_minutes(place: Place) -> None:
    until = time.monotonic() + 150

    async def many() -> None:
        for seed in itertools.count(1000):
            storm = Storm(place, seed)
            try:
                await storm.run(40, swap=seed % 2 == 0)
            except BaseException:
                print(f"seed {seed}")  # noqa: T201
                raise
            if time.monotonic() > until:
                break

    asyncio.run(many())
