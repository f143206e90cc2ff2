"""The FutureMap's debug mode: a token that is read twice, or was never sampled, is noticed."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.batch import SlotInit, StepPlan
from aengine.execute.inputs import POISON, InputBuilder
from aengine.request import Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


@given(st.data())
def test_few_decode_rows_are_built_like_any_others(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 20))
    slots = data.draw(st.permutations(range(1, 40)))[:rows]
    width = data.draw(st.integers(1, 9))
    starts = data.draw(st.lists(st.integers(0, 4 * width - 1), min_size=rows, max_size=rows))
    step = replace(
        plan(slots),
        starts=np.array(starts, dtype=np.int32),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width) * 3 + 1,
        num_blocks=np.array([at // 4 + 1 for at in starts], dtype=np.int32),
    )
    newest = torch.arange(40) + 1000
    builder = InputBuilder(block_size=4, device=CPU)
    few, usual = builder.few(step, newest.numpy()), builder.build(step, newest)
    assert few is not None
    for name, mine in few._asdict().items():
        theirs = getattr(usual, name).numpy()
        assert mine.dtype == theirs.dtype, name
        assert mine.tolist() == theirs.tolist(), name


def test_other_steps_are_not_taken_for_few_decode_rows() -> None:
    newest = torch.arange(200).numpy()
    builder = InputBuilder(block_size=16, device=CPU)
    assert builder.few(plan([1, 2]), newest) is not None
    assert builder.few(plan([1], [2]), newest) is None
    assert builder.few(plan(range(1, 66)), newest) is None
    late = replace(plan([1, 2]), samples=np.array([True, False]))
    assert builder.few(late, newest) is None
    poison = InputBuilder(block_size=16, device=CPU, poison=True)
    assert poison.few(plan([1, 2]), newest) is None


def lets_go_of_the_gil(work: Callable[[], object]) -> bool:
    """Whether a thread that wants the GIL gets it while `work` runs in this one."""
    interval, took, door = sys.getswitchinterval(), [], threading.Lock()

    def want() -> None:
        with door:
            took.append(True)

    door.acquire()
    thread = threading.Thread(target=want)
    thread.start()
    time.sleep(0.02)  # it stands at the door
    sys.setswitchinterval(100.0)  # from now on the GIL goes over only where it is let go
    try:
        door.release()
        until = time.perf_counter() + 0.05
        while time.perf_counter() < until:
            pass  # it wakes, and wants the GIL
        assert not took
        work()
        return bool(took)
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_few_decode_rows_are_built_without_letting_go_of_the_gil() -> None:
    """Measured: a millisecond a token, which is what another thread does meanwhile."""
    tensor, step = torch.arange(40), plan(range(1, 9))
    newest, builder = tensor.numpy(), InputBuilder(block_size=16, device=CPU)
    builder.few(step, newest)
    # A thread that wants it does not get it each time that it is let go for a moment.
    assert any(lets_go_of_the_gil(lambda: builder.build(step, tensor)) for _ in range(20))
    assert not any(lets_go_of_the_gil(lambda: builder.few(step, newest)) for _ in range(10))
