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
from aengine.execute.graph_shapes import (
    DRAWS,
    GraphSizes,
    LaneWork,
    MixedLayout,
    ResultLayout,
    SampleLayout,
    SampleShape,
    StepShape,
    chunk_sizes,
    coarse_chunk_sizes,
    decode_sizes,
    largest_shape,
    riding_sizes,
)
from aengine.execute.inputs import InputBuilder
from aengine.execute.packing import HEADER, PADDING_POSITION, MixedPacker, places_of
from aengine.execute.sampler import Sampler
from aengine.execute.sampler_state import SamplerFeature
from aengine.execute.step_graphs import StepGraphs
from aengine.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.model.batch import ForwardBatch

VOCABULARY, SLOTS, TOKENS, PAGE = 50, 20, 64, 4
NONE = SamplerFeature(0)
EVERYTHING = LaneWork()


class FakeStaging:
    """Memory whose "addresses" are keys of a table."""

    def __init__(self, memory: dict[int, np.ndarray[Any, Any]]) -> None:
        most = largest_shape(max_rows=SLOTS, max_tokens=TOKENS, max_blocks=40)
        self.packed = np.full(MixedLayout.of(most).words, -99, dtype=np.int32)
        self.result = np.full(ResultLayout.of(most).words, -99, dtype=np.int32)
        self.packed_address, self.result_address = len(memory), len(memory) + 1
        memory[self.packed_address], memory[self.result_address] = self.packed, self.result


@dataclass
class FakeLaunch:
    """Notes what it is given."""

    shape: StepShape | SampleShape
    lane: Lane

    def launch(self, *holds: object, values: Sequence[int]) -> Any:
        packed, result = (self.lane.memory[value] for value in values)
        if isinstance(self.shape, SampleShape):
            packed = packed[: SampleLayout.of(self.shape, VOCABULARY).words]
        elif not self.shape.tokens:
            packed = packed[: self.shape.rows * (HEADER + self.shape.blocks)]
            packed = packed.reshape(self.shape.rows, -1)
        self.lane.launched.append((self.shape, packed.copy(), result))
        assert holds
        return object()


class Lane:
    """A lane without a device."""

    def __init__(self, max_blocks: int = 8, work: LaneWork = EVERYTHING) -> None:
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.launched: list[tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.made = 0
        self.sampler = Sampler(max_num_seqs=SLOTS, vocab_size=VOCABULARY, device="cpu")
        self.refuse: set[StepShape] = set()
        self.graphs = StepGraphs(
            self.capture,
            self.sampler,
            self.staging,
            GraphSizes.of(work, max_rows=SLOTS, max_tokens=TOKENS, max_blocks=max_blocks),
            in_flight=1,
            block_size=PAGE,
        )

    def capture(self, shape: StepShape | SampleShape) -> FakeLaunch:
        if shape in self.refuse:
            raise DeviceError("no")
        return FakeLaunch(shape, self)

    def staging(self) -> FakeStaging:
        self.made += 1
        return FakeStaging(self.memory)

    def admit(self, slot: int, **params: Any) -> None:
        self.sampler.admit(init_of(slot, **params))

    def do_chores(self) -> None:
        assert self.graphs.chore() is not None
        while (chore := self.graphs.chore()) is not None:
            chore()


def init_of(slot: int, **params: Any) -> SlotInit:
    request = Request(
        seq_id=slot,
        request_id=f"r{slot}",
        prompt_token_ids=(1, 2),
        params=SamplingParams(**{"temperature": 0.0} | params),
        max_tokens=9,
    )
    return SlotInit(slot=slot, request=request)


def steady(rows: int, features: SamplerFeature = NONE, top: int = 0, blocks: int = 8) -> StepShape:
    return StepShape(rows, 0, 0, blocks, features, top)


def logits_of(batch: ForwardBatch) -> list[int]:
    assert batch.logit_index is not None
    return batch.logit_index.tolist()


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
    assert shape == steady(4)
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
    lane.graphs.capture([steady(1)])
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
        {"constrained": (1,), "prompt_logprob_rows": (1,)},
        {"forced": (ForcedTokens(slot=2, token_ids=(4,)),)},
        {"prompt_logprob_rows": (1,)},
        {"slot_inits": (init_of(2, presence_penalty=1.0),)},
        {"slot_inits": (init_of(2, logit_bias={1: 1.0}),)},
    ],
    ids=["grammar", "forced", "prompt log-probabilities", "new penalties", "new rules"],
)
def test_other_steps_are_left_to_the_eager_way(changes: dict[str, Any]) -> None:
    lane = Lane()
    lane.admit(1)
    lane.admit(2)
    lane.graphs.capture([steady(2)])
    assert lane.graphs.replay(plan_of([1, 2])) is not None
    assert lane.graphs.replay(plan_of([1, 2], **changes)) is None
    assert lane.graphs.chore() is None, "and no graph is made for them"


@pytest.mark.parametrize(
    ("params", "features", "top"),
    [
        ({}, NONE, 0),
        ({"temperature": 1.0}, DRAWS, 0),
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
    assert lane.launched[0][0] == steady(2, features, top)


def test_rows_with_rules_of_their_own_run_eagerly() -> None:
    lane = Lane()
    lane.admit(1, logit_bias={3: 1.0})
    assert lane.graphs.replay(plan_of([1])) is None
    assert lane.graphs.chore() is None


def test_logprobs_are_read_from_their_places() -> None:
    lane = Lane()
    lane.admit(1)
    lane.admit(2, logprobs=2)
    shape = steady(2, SamplerFeature.LOGPROBS, 5)
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
    lane.refuse.add(steady(1))
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


@given(most=st.integers(1, 9000), size=st.integers(1, 9000))
def test_every_count_has_a_size_that_wastes_little(most: int, size: int) -> None:
    for sizes, waste in (
        (decode_sizes(most), 8),
        (riding_sizes(most), most),
        (chunk_sizes(most), 128),
    ):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        if size <= most:
            fitting = next(each for each in sizes if each >= size)
            assert fitting <= max(2 * size, size + waste)


@given(most=st.integers(1, 20_000), size=st.integers(1, 20_000))
def test_the_sizes_from_the_start_cover_all_at_twice_the_work(most: int, size: int) -> None:
    coarse = coarse_chunk_sizes(most)
    assert set(coarse) <= set(chunk_sizes(most))
    if 64 <= size <= most:
        assert next(each for each in coarse if each >= size) <= 2 * size + 512


@given(rows=st.integers(1, 600), tokens=st.integers(1, 9000), blocks=st.integers(1, 900))
def test_the_common_shapes_of_a_lane_are_of_its_work(rows: int, tokens: int, blocks: int) -> None:
    def common(*work: bool) -> list[StepShape]:
        sizes = GraphSizes.of(LaneWork(*work), max_rows=rows, max_tokens=tokens, max_blocks=blocks)
        return sizes.common

    everything = common()
    prefill, decode = common(True, False, True), common(False, True, True)
    assert prefill
    assert all(shape.tokens and not shape.decode for shape in prefill)
    assert decode
    assert all(shape.decode and not shape.tokens for shape in decode)
    assert set(decode) <= set(everything), "what ran on one lane is set up for the others"
    assert max(shape.decode for shape in decode) == rows
    assert max(shape.tokens for shape in prefill) == tokens
    assert max(shape.tokens for shape in everything) == tokens or tokens < 16


def test_a_lane_for_prefill_alone_takes_steps_without_decode_rows() -> None:
    lane = Lane(work=LaneWork(decode=False, few=True))
    chunks: dict[str, Any] = {
        "num_decode": 0,
        "starts": np.array([0, 4], dtype=np.int32),
        "lengths": np.array([5, 3], dtype=np.int32),
        "prefill_token_ids": np.arange(30, 38, dtype=np.int32),
        "slot_inits": (init_of(9), init_of(5)),
    }
    plan = plan_of([9, 5], **chunks)
    assert lane.graphs.replay(plan) is None
    lane.do_chores()
    future = lane.graphs.replay(plan)
    assert future is not None
    shape, packed, result = lane.launched[0]
    assert (shape.decode, shape.tokens, shape.rows) == (0, 32, 20)
    at = MixedLayout.of(shape)
    assert packed[at.query_start : at.query_start + 4].tolist() == [0, 5, 8, 8]
    assert packed[at.slots : at.slots + 3].tolist() == [9, 5, 0]
    assert packed[at.token_ids : at.token_ids + 9].tolist() == [*range(30, 38), 0]
    result[:20] = np.arange(20) + 60
    assert future.handle().to_host().token_ids == [60, 61]
    assert lane.graphs.replay(plan_of([9, 5])) is None, "decode is another lane's work"
    assert lane.graphs.chore() is None


def test_a_larger_graph_does_until_the_tight_one_is_there() -> None:
    lane = Lane()
    lane.admit(1)
    lane.graphs.capture([steady(16, DRAWS), steady(20)])
    assert lane.graphs.replay(plan_of([1])) is not None
    lane.do_chores()
    assert lane.graphs.replay(plan_of([1])) is not None
    assert [shape for shape, *_ in lane.launched] == [steady(16, DRAWS), steady(1)]


def test_a_graph_that_nearly_fits_is_good_enough() -> None:
    """A capture beside running steps costs them more than a little padding."""
    lane = Lane()
    slots = list(range(1, 17))
    for slot in slots:
        lane.admit(slot)
    lane.graphs.capture([steady(20, DRAWS)])
    assert lane.graphs.replay(plan_of(slots)) is not None
    assert lane.graphs.chore() is None
    assert lane.graphs.replay(plan_of(slots[:8])) is not None
    assert lane.graphs.chore() is not None, "12 rows of padding are too much"


def test_a_lane_of_few_shapes_wants_none_without_draws() -> None:
    lane = Lane(work=LaneWork(prefill=False, few=True))
    lane.admit(1)
    assert lane.graphs.replay(plan_of([1])) is None
    lane.do_chores()
    assert [shape.features for shape in lane.graphs._graphs] == [DRAWS]


def test_chunks_ride_with_decode_rows() -> None:
    lane = Lane()
    lane.admit(3)
    lane.admit(9, logit_bias={1: 1.0})  # the slot's last owner
    shape = StepShape(16, 32, 20, 8, DRAWS)
    lane.graphs.capture([shape])
    plan = plan_of(
        [3, 9, 5],
        num_decode=1,
        starts=np.array([6, 0, 4], dtype=np.int32),
        lengths=np.array([1, 5, 3], dtype=np.int32),
        prefill_token_ids=np.arange(30, 38, dtype=np.int32),
        samples=np.array([True, False, True]),
        slot_inits=(init_of(9, temperature=0.5, seed=4, top_k=7), init_of(5)),
    )
    future = lane.graphs.replay(plan)
    assert future is not None
    got, packed, result = lane.launched[0]
    assert got == shape
    at, room = MixedLayout.of(shape), 16
    assert packed[at.init_slots : at.init_slots + 3].tolist() == [9, 5, 0]
    assert packed[: at.ints].view(np.float64)[:2].tolist() == [0.5, 1.0]
    assert packed[at.ints : at.init_slots].view(np.int64)[1] == 7
    slots, sampled = packed[at.slots : at.query_start].reshape(2, -1)
    assert slots[[0, 1, room, room + 1, room + 2]].tolist() == [3, 0, 9, 5, 0]
    assert sampled[[0, 1, room, room + 1, room + 2]].tolist() == [3, 0, 0, 5, 0]
    first = packed[at.query_start : at.context_lens]
    assert first.tolist() == [0, *[1] * 16, 6, *[9] * 19]
    contexts = packed[at.context_lens : at.logit_index]
    assert contexts[[0, 1, room, room + 1, room + 2]].tolist() == [7, 0, 5, 7, 0]
    assert packed[at.logit_index :][[0, 1, room, room + 1]].tolist() == [0, 0, 5, 8]
    ids, positions, places = packed[at.token_ids : at.tables].reshape(3, -1)
    assert ids[1:9].tolist() == list(range(30, 38))
    assert positions[:9].tolist() == [6, 0, 1, 2, 3, 4, 4, 5, 6]
    table = plan.block_tables
    assert places[0] == table[0, 1] * PAGE + 2
    assert places[6:9].tolist() == [table[2, 1] * PAGE + i for i in (0, 1, 2)]
    for padded in (ids, positions, places):
        assert not padded[9:].any(), "padding is written to the padding block"
    tables = packed[at.tables : at.words].reshape(36, 8)
    assert tables[[0, room, room + 1], :3].tolist() == table.tolist()
    result[:36] = np.arange(36)
    assert future.handle().to_host().token_ids == [0, room + 1]


MASKS = np.arange(4, dtype=np.int32).reshape(2, 2) + 70


def test_rows_with_masks_are_sampled_after_the_forward() -> None:
    lane = Lane()
    for slot in (3, 5, 6):
        lane.admit(slot)
    plan = plan_of([3, 5, 6], constrained=(0, 2))
    assert lane.graphs.replay(plan) is None
    assert lane.graphs.begin(plan) is None, "nothing is captured yet"
    lane.do_chores()
    begun = lane.graphs.begin(plan)
    assert begun is not None
    output = lane.graphs.finish(begun.handle(), [0, 2], MASKS)
    (forward, packed, _), (sample, words, result) = lane.launched
    assert forward == steady(4)._replace(samples=False)
    assert packed[:3, 0].tolist() == [3, 5, 6]
    assert sample == SampleShape(8, 8, NONE)
    at = SampleLayout.of(sample, VOCABULARY)
    slots, positions = words[: at.mask_rows].reshape(2, -1)
    assert slots.tolist() == [3, 5, 6, 0, 0, 0, 0, 0]
    assert positions[:3].tolist() == [10, 11, 12]
    assert words[at.mask_rows : at.masks].tolist() == [0, 2, *[8] * 6], "8 is the spare row"
    assert words[at.masks : at.words].reshape(8, 2)[:2].tolist() == MASKS.tolist()
    result[:8] = np.arange(8) + 20
    read = output.handle().to_host()
    assert (read.token_ids, set(read.unsampled)) == ([20, 21, 22], set())
    assert lane.made == 2, "one for the forward, one for the sample"


def test_a_late_mask_leaves_its_row_unsampled() -> None:
    lane = Lane()
    for slot in (3, 5, 6):
        lane.admit(slot)
    plan = plan_of([3, 5, 6], constrained=(0, 2))
    assert lane.graphs.begin(plan) is None
    lane.do_chores()
    begun = lane.graphs.begin(plan)
    assert begun is not None
    output = lane.graphs.finish(begun.handle(), [2], MASKS[:1])
    _, words, result = lane.launched[1]
    assert words[:3].tolist() == [0, 5, 6]
    result[:8] = np.arange(8) + 20
    read = output.handle().to_host()
    assert (read.token_ids, set(read.unsampled)) == ([0, 21, 22], {0})


def test_masks_of_a_step_with_chunks_find_their_rows() -> None:
    lane = Lane()
    lane.admit(3)
    plan = plan_of(
        [3, 9],
        num_decode=1,
        starts=np.array([6, 0], dtype=np.int32),
        lengths=np.array([1, 5], dtype=np.int32),
        prefill_token_ids=np.arange(5, dtype=np.int32),
        slot_inits=(init_of(9, temperature=0.7, seed=1),),
        constrained=(1,),
    )
    assert lane.graphs.begin(plan) is None
    lane.do_chores()
    begun = lane.graphs.begin(plan)
    assert begun is not None
    lane.graphs.finish(begun.handle(), [1], MASKS[:1])
    forward, (sample, words, _) = lane.launched[0][0], lane.launched[1]
    assert sample.rows >= forward.rows
    assert sample.features == DRAWS
    at = SampleLayout.of(sample, VOCABULARY)
    assert words[[0, forward.decode]].tolist() == [3, 9]
    assert words[at.positions + forward.decode] == 4
    assert words[at.mask_rows] == forward.decode


@given(st.data())
def test_a_packed_step_says_what_the_eager_inputs_say(data: st.DataObject) -> None:
    num_decode = data.draw(st.integers(0, 8))
    chunks = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    lengths = np.array([1] * num_decode + chunks, dtype=np.int32)
    starts = np.array([data.draw(st.integers(0, 15)) for _ in lengths], dtype=np.int32)
    rows = len(lengths)
    slots = data.draw(st.permutations(range(1, SLOTS)))[:rows]
    plan = plan_of(
        slots,
        num_decode=num_decode,
        starts=starts,
        lengths=lengths,
        prefill_token_ids=np.arange(sum(chunks), dtype=np.int32) + 100,
        block_tables=np.arange(rows * 6, dtype=np.int32).reshape(rows, 6) + 1,
        samples=np.array([True] * num_decode + [data.draw(st.booleans()) for _ in chunks]),
    )
    future_map = torch.arange(SLOTS + 1) + 1000
    eager = InputBuilder(block_size=PAGE, device=torch.device("cpu")).build(plan, future_map)
    shape = StepShape(8, 64, 20, 8, DRAWS)
    packed = np.full(MixedLayout.of(shape).words, -99, dtype=np.int32)
    MixedPacker(block_size=PAGE, max_model_len=24).pack(
        plan,
        shape,
        packed,
        init_slots=[],
        reals=np.zeros((0, 6)),
        ints=np.zeros((0, 2), dtype=np.int64),
    )
    at = MixedLayout.of(shape)
    token = [*range(num_decode + sum(chunks))]
    row = [*range(num_decode), *range(8, 8 + len(chunks))]
    ids, positions, places = packed[at.token_ids : at.tables].reshape(3, -1)
    ids[:num_decode] = future_map[plan.slots[:num_decode]]
    assert ids[token].tolist() == eager.token_ids.tolist()
    assert positions[token].tolist() == eager.positions.tolist()
    assert places[token].tolist() == eager.slot_mapping.tolist()
    assert packed[at.context_lens : at.logit_index][row].tolist() == eager.context_lens.tolist()
    first = packed[at.query_start : at.context_lens]
    assert (first[1:] - first[:-1])[row[num_decode:]].tolist() == chunks
    assert first[row].tolist() == (np.cumsum(lengths) - lengths).tolist()
    sampling = [r for r, samples in zip(row, plan.samples, strict=True) if samples]
    last = packed[at.logit_index : at.token_ids][sampling].tolist()
    assert [token.index(t) for t in last] == logits_of(eager)
    assert places_of(plan, shape, np.flatnonzero(plan.samples).tolist()) == sampling
    sampled = packed[at.sampled : at.query_start]
    assert sampled[sampled > 0].tolist() == [plan.slots[i] for i in np.flatnonzero(plan.samples)]


def test_the_sampler_knows_the_rows_labels() -> None:
    lane = Lane()
    lane.admit(4, logprobs=1)
    assert lane.sampler.request_ids(np.array([4, 9])) == ["r4", ""]
    assert lane.sampler.wanted_logprobs(np.array([9, 4])) == {1: 1}
    assert isinstance(lane.sampler.future_map, torch.Tensor)
