"""Steady steps as graphs, host side: which steps, how they are packed, how results are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.batch import ForcedTokens, SlotInit, StepPlan
from aengine.errors import DeviceError, GenerationError
from aengine.execute.decode_graphs import (
    HEADER,
    PADDING_POSITION,
    DecodeGraphs,
    ResultLayout,
    StepShape,
    padded_sizes,
)
from aengine.execute.sampler import Sampler
from aengine.execute.sampler_state import SamplerFeature
from aengine.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY, SLOTS = 50, 20
NONE = SamplerFeature(0)


class FakeStaging:
    """Memory whose "addresses" are keys of a table."""

    def __init__(self, memory: dict[int, np.ndarray[Any, Any]]) -> None:
        self.packed = np.full(SLOTS * (HEADER + 40), -99, dtype=np.int32)
        self.result = np.full(SLOTS * 43, -99, dtype=np.int32)
        self.packed_address, self.result_address = len(memory), len(memory) + 1
        memory[self.packed_address], memory[self.result_address] = self.packed, self.result


@dataclass
class FakeLaunch:
    """Notes what it is given."""

    shape: StepShape
    lane: Lane

    def launch(self, *holds: object, values: Sequence[int]) -> Any:
        packed, result = (self.lane.memory[value] for value in values)
        rows = packed[: self.shape.rows * (HEADER + self.shape.blocks)]
        self.lane.launched.append((self.shape, rows.reshape(self.shape.rows, -1).copy(), result))
        assert holds
        return object()


class Lane:
    """A lane without a device."""

    def __init__(self, max_blocks: int = 8) -> None:
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.launched: list[tuple[StepShape, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.made = 0
        self.sampler = Sampler(max_num_seqs=SLOTS, vocab_size=VOCABULARY, device="cpu")
        self.refuse: set[StepShape] = set()
        self.graphs = DecodeGraphs(
            self.capture,
            self.sampler,
            self.staging,
            in_flight=1,
            max_rows=SLOTS,
            max_blocks=max_blocks,
        )

    def capture(self, shape: StepShape) -> FakeLaunch:
        if shape in self.refuse:
            raise DeviceError("no")
        return FakeLaunch(shape, self)

    def staging(self) -> FakeStaging:
        self.made += 1
        return FakeStaging(self.memory)

    def admit(self, slot: int, **params: Any) -> None:
        request = Request(
            seq_id=slot,
            request_id=f"r{slot}",
            prompt_token_ids=(1, 2),
            params=SamplingParams(**{"temperature": 0.0} | params),
            max_tokens=9,
        )
        self.sampler.admit(SlotInit(slot=slot, request=request))

    def do_chores(self) -> None:
        chore = self.graphs.chore()
        assert chore is not None
        chore()
        assert self.graphs.chore() is None


def plan_of(slots: Sequence[int], **changes: Any) -> StepPlan:
    rows = len(slots)
    fields: dict[str, Any] = {
        "step_id": 7,
        "num_decode": rows,
        "seq_ids": list(slots),
        "slots": np.array(slots, dtype=np.int32),
        "starts": np.arange(rows, dtype=np.int32) + 10,
        "lengths": np.ones(rows, dtype=np.int32),
        "prefill_token_ids": np.zeros(0, dtype=np.int32),
        "block_tables": np.arange(rows * 3, dtype=np.int32).reshape(rows, 3) + 1,
        "num_blocks": np.full(rows, 3, dtype=np.int32),
        "samples": np.ones(rows, dtype=bool),
    }
    return StepPlan(**fields | changes)


def test_a_shape_is_captured_beside_the_steps_and_then_replayed() -> None:
    lane = Lane()
    for slot in (3, 5, 6):
        lane.admit(slot)
    plan = plan_of([3, 5, 6])
    assert lane.graphs.chore() is None
    assert lane.graphs.replay(plan) is None, "not captured yet: this step runs eagerly"
    assert lane.graphs.replay(plan) is None
    lane.do_chores()
    assert lane.graphs.captured == 1
    future = lane.graphs.replay(plan)
    assert future is not None
    (shape, packed, result), *_ = lane.launched
    assert shape == StepShape(4, 8, NONE)
    assert packed[:3, 0].tolist() == [3, 5, 6]
    assert packed[:3, 1].tolist() == [10, 11, 12]
    assert packed[:3, HEADER : HEADER + 3].tolist() == plan.block_tables.tolist()
    assert packed[3, :2].tolist() == [0, PADDING_POSITION]
    result[:4] = [11, -1, 13, 40]
    read = future.handle().to_host()
    assert read.token_ids == [11, 0, 13]
    assert list(read.errors) == [1]
    assert isinstance(read.errors[1], GenerationError)
    assert read.errors[1].request_id == "r5"
    assert (read.step_id, dict(read.logprobs), list(read.unsampled)) == (7, {}, [])


def test_memory_of_a_step_in_flight_is_not_written() -> None:
    lane = Lane()
    lane.admit(1)
    plan = plan_of([1])
    lane.graphs.capture([StepShape(1, 8, NONE)])
    first, second = lane.graphs.replay(plan), lane.graphs.replay(plan)
    assert first is not None
    assert second is not None
    assert lane.launched[0][2] is not lane.launched[1][2]
    lane.launched[0][2][0], lane.launched[1][2][0] = 8, 9
    assert first.handle().to_host().token_ids == [8]
    third = lane.graphs.replay(plan)
    assert third is not None
    assert lane.launched[2][2] is lane.launched[0][2], "the first step's memory is free again"
    assert second.handle().to_host().token_ids == [9]
    assert lane.made == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"num_decode": 1, "prefill_token_ids": np.array([4], dtype=np.int32)},
        {"constrained": (1,)},
        {"forced": (ForcedTokens(slot=2, token_ids=(4,)),)},
        {"samples": np.array([True, False])},
    ],
    ids=["prefill", "grammar", "forced", "unsampled"],
)
def test_other_steps_are_left_to_the_eager_way(changes: dict[str, Any]) -> None:
    lane = Lane()
    lane.admit(1)
    lane.admit(2)
    lane.graphs.capture([StepShape(2, 8, NONE)])
    assert lane.graphs.replay(plan_of([1, 2])) is not None
    assert lane.graphs.replay(plan_of([1, 2], **changes)) is None
    assert lane.graphs.chore() is None, "and no graph is made for them"


@pytest.mark.parametrize(
    ("params", "features", "top"),
    [
        ({}, NONE, 0),
        ({"temperature": 1.0}, SamplerFeature.RANDOM | SamplerFeature.TRUNCATED, 0),
        ({"presence_penalty": 1.0}, SamplerFeature.PENALTIES, 0),
        ({"logprobs": 0}, SamplerFeature.LOGPROBS, 0),
        ({"logprobs": 3}, SamplerFeature.LOGPROBS, 5),
        ({"logprobs": 20}, SamplerFeature.LOGPROBS, 20),
    ],
)
def test_one_row_makes_the_graph_do_what_it_needs(
    params: dict[str, Any], features: SamplerFeature, top: int
) -> None:
    lane = Lane()
    lane.admit(1)
    lane.admit(2, **params)
    assert lane.graphs.replay(plan_of([1, 2])) is None
    lane.do_chores()
    assert lane.graphs.replay(plan_of([1, 2])) is not None
    assert lane.launched[0][0] == StepShape(2, 8, features, top)


def test_rows_with_rules_of_their_own_run_eagerly() -> None:
    lane = Lane()
    lane.admit(1, logit_bias={3: 1.0})
    assert lane.graphs.replay(plan_of([1])) is None
    assert lane.graphs.chore() is None


def test_logprobs_are_read_from_their_places() -> None:
    lane = Lane()
    lane.admit(1)
    lane.admit(2, logprobs=2)
    shape = StepShape(2, 8, SamplerFeature.LOGPROBS, 5)
    lane.graphs.capture([shape])
    future = lane.graphs.replay(plan_of([1, 2]))
    assert future is not None
    words, at = lane.launched[0][2], ResultLayout.of(shape)
    real = words.view(np.float32)
    words[:2] = [30, 31]
    real[at.logprobs : at.ranks] = [-0.5, -1.5]
    words[at.ranks : at.top_ids] = [1, 2]
    words[at.top_ids : at.top_logprobs] = range(10)
    real[at.top_logprobs : at.words] = np.arange(10) / -4
    read = future.handle().to_host()
    assert list(read.logprobs) == [1]
    record = read.logprobs[1]
    assert (record.token_id, record.logprob, record.rank) == (31, -1.5, 2)
    assert record.top == ((5, -1.25), (6, -1.5))


def test_a_shape_that_cannot_be_captured_is_not_tried_again() -> None:
    lane = Lane()
    lane.admit(1)
    lane.refuse.add(StepShape(1, 8, NONE))
    assert lane.graphs.replay(plan_of([1])) is None
    chore = lane.graphs.chore()
    assert chore is not None
    with pytest.raises(DeviceError):
        chore()
    assert lane.graphs.replay(plan_of([1])) is None
    assert lane.graphs.chore() is None


def test_long_contexts_have_graphs_of_their_own() -> None:
    lane = Lane(max_blocks=4000)
    lane.admit(1)
    wide = np.ones((1, 513), dtype=np.int32)
    assert lane.graphs.replay(plan_of([1])) is None
    assert lane.graphs.replay(plan_of([1], block_tables=wide)) is None
    lane.do_chores()
    assert lane.graphs.captured == 2
    assert {shape.blocks for shape in lane.graphs._graphs} == {512, 4000}


@given(most=st.integers(1, 1200), rows=st.integers(1, 1200))
def test_every_row_count_has_a_size_that_wastes_little(most: int, rows: int) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    if rows <= most:
        size = next(size for size in sizes if size >= rows)
        assert size <= max(2 * rows, rows + 8)


def test_the_sampler_knows_the_rows_labels() -> None:
    lane = Lane()
    lane.admit(4, logprobs=1)
    assert lane.sampler.request_ids(np.array([4, 9])) == ["r4", ""]
    assert lane.sampler.wanted_logprobs(np.array([9, 4])) == {1: 1}
    assert isinstance(lane.sampler.future_map, torch.Tensor)
