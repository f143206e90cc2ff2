"""Unpacking a decode step on the device, and publishing its tokens."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.sampling import counter_uniform
from aengine.kernels.triton_inputs import (
    DecodeInputs,
    publish,
    slot_draws,
    unpack_decode,
)
from aengine.kernels.triton_logits import Peaks

from .triton_device import DEVICE, needs_device

pytestmark = [
    *needs_device,
    # Under the interpreter numpy warns of the overflow that the hash is made of.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("blocks", [1, 7, 1500])
def test_unpack_decode(blocks):
    rows, page = 5, 16
    packed = torch.zeros(rows, 2 + blocks, dtype=torch.int32)
    packed[:, 2:] = torch.randint(1, 1000, (rows, blocks))
    packed[:, 0] = torch.tensor([3, 9, 1, 0, 0])
    last = blocks * page - 1
    packed[:, 1] = torch.tensor([0, last, last // 2, -1, -1])
    future = torch.randint(0, 50_000, (10,))
    inputs = DecodeInputs.allocate(rows=rows, blocks=blocks, device=DEVICE)
    for tensor in (inputs.slots, inputs.positions, inputs.slot_mapping, inputs.block_tables):
        tensor.fill_(-5)
    unpack_decode(packed.to(DEVICE), future.to(DEVICE), inputs, block_size=page)
    positions = packed[:, 1].clamp_min(0).long()
    assert inputs.slots.tolist() == packed[:, 0].tolist()
    assert inputs.token_ids.tolist() == future[packed[:, 0].long()].tolist()
    assert inputs.positions.tolist() == positions.tolist()
    assert inputs.context_lens.tolist() == (packed[:, 1] + 1).tolist()
    assert torch.equal(inputs.block_tables.cpu(), packed[:, 2:])
    for row in range(3):
        position = int(positions[row])
        block = int(packed[row, 2 + position // page])
        assert inputs.slot_mapping[row] == block * page + position % page
    assert inputs.slot_mapping[3:].tolist() == [0, 0], "padding writes to the padding block"


def test_slot_draws_are_those_of_the_host():
    reals = torch.rand(200, 6, dtype=torch.float64) + 0.01
    ints = torch.randint(-(2**62), 2**62, (200, 2))
    slots, positions = torch.randperm(200)[:150], torch.randint(0, 100_000, (150,))
    reals[slots[::3], 0] = 0.0  # greedy
    got = slot_draws(*(tensor.to(DEVICE) for tensor in (slots, positions, reals, ints)))
    want = counter_uniform(ints[slots, 0].numpy(), (positions + 1).numpy())
    assert torch.equal(got.uniform.cpu(), torch.from_numpy(want))
    random = reals[slots, 0] > 0
    for mine, theirs, neutral in (
        (got.temperature, reals[slots, 0], 1),
        (got.top_p, reals[slots, 1], 1),
        (got.min_p, reals[slots, 2], 0),
        (got.top_k, ints[slots, 1], 0),
    ):
        assert torch.equal(mine.cpu(), torch.where(random, theirs, neutral))


@pytest.mark.parametrize("random", [False, True])
def test_publish(random):
    future = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    slots = torch.randperm(299)[:200] + 1
    best, drawn = torch.randint(1, 9999, (2, 200))
    values = torch.randn(200)
    values[5], values[6], values[7] = float("inf"), float("-inf"), float("nan")
    reals = torch.rand(300, 6, dtype=torch.float64) + 0.1
    reals[slots[:90], 0] = 0.0
    tokens = torch.full((200,), -7, device=DEVICE)
    result = torch.full((200,), -7, dtype=torch.int32, device=DEVICE)
    publish(
        future,
        slots.to(DEVICE),
        Peaks(values.to(DEVICE), best.to(DEVICE)),
        drawn.to(DEVICE) if random else None,
        reals.to(DEVICE),
        tokens,
        result,
    )
    want = torch.where(reals[slots, 0] > 0, drawn, best) if random else best
    assert torch.equal(future.cpu()[slots], want)
    assert torch.equal(tokens.cpu(), want)
    want[5:8] = -1
    assert torch.equal(result.cpu().long(), want)
    assert int((future != 0).sum()) == 200
