"""The FutureMap's debug mode: a token that is read twice, or was never sampled, is noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from aengine.batch import SlotInit, StepPlan
from aengine.execute.inputs import POISON, InputBuilder
from aengine.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")


def plan(decode: Sequence[int], begins: Sequence[int] = ()) -> StepPlan:
    """One decode token in each of these slots, and two prompt tokens in each that begins."""
    slots = np.array([*decode, *begins], dtype=np.int32)
    lengths = np.array([1] * len(decode) + [2] * len(begins), dtype=np.int32)
    request = Request(
        seq_id=1, request_id="r", prompt_token_ids=(4, 5), params=SamplingParams(), max_tokens=9
    )
    return StepPlan(
        step_id=3,
        num_decode=len(decode),
        seq_ids=[10 * slot for slot in slots.tolist()],
        slots=slots,
        starts=np.array([7] * len(decode) + [0] * len(begins), dtype=np.int32),
        lengths=lengths,
        prefill_token_ids=np.array([4, 5] * len(begins), dtype=np.int32),
        block_tables=np.ones((len(slots), 1), dtype=np.int32),
        num_blocks=np.ones(len(slots), dtype=np.int32),
        samples=np.ones(len(slots), dtype=np.bool_),
        slot_inits=[SlotInit(slot=slot, request=request) for slot in begins],
    )


def test_each_token_is_read_once() -> None:
    builder = InputBuilder(block_size=16, device=CPU, poison=True)
    newest = torch.tensor([0, 11, 12, 13])
    assert builder.build(plan([3, 1]), newest).token_ids.tolist() == [13, 11]
    assert newest.tolist() == [0, POISON, 12, POISON]
    newest[1] = 14  # its next sample
    assert builder.build(plan([1, 2], [3]), newest).token_ids.tolist() == [14, 12, 4, 5]
    newest[2] = 15
    with pytest.raises(RuntimeError, match=r"step 3 .*\[\(30, 3\), \(10, 1\)\]"):
        builder.build(plan([3, 2, 1]), newest)


def test_what_the_last_owner_of_a_slot_left_is_never_read() -> None:
    builder = InputBuilder(block_size=16, device=CPU, poison=True)
    newest = torch.tensor([0, 11, 12])
    builder.build(plan([], [2]), newest)
    with pytest.raises(RuntimeError, match="never sampled"):
        builder.build(plan([2]), newest)


def test_without_it_nothing_is_written() -> None:
    newest = torch.tensor([0, 11, 12])
    builder = InputBuilder(block_size=16, device=CPU)
    for _ in range(2):
        assert builder.build(plan([1, 2]), newest).token_ids.tolist() == [11, 12]
    assert newest.tolist() == [0, 11, 12]
