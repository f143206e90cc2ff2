"""Rows by slices are the rows that an index array gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aengine.policy.runs import Runs

SLOTS = st.lists(st.integers(0, 40), unique=True) | st.integers(0, 40).map(lambda n: [*range(n)])


@given(SLOTS)
def test_runs_are_index_arrays(slots: list[int]) -> None:
    index, runs = np.array(slots, dtype=np.int64), Runs(slots)
    flat, table = np.arange(41), np.arange(41 * 5).reshape(41, 5)
    assert runs.take(flat).tolist() == flat[index].tolist()
    assert runs.take(table, 3).tolist() == table[index, :3].tolist()
    values = np.arange(len(slots)) * 7
    for write in (7, values):
        want, got = flat.copy(), flat.copy()
        want[index] = write
        runs.put(got, write)
        assert got.tolist() == want.tolist()
        want[index] += write
        runs.add(got, write)
        assert got.tolist() == want.tolist()


def test_what_is_taken_is_a_copy() -> None:
    array = np.arange(9)
    Runs([2, 3]).take(array)[:] = 0
    assert array.tolist() == list(range(9))
