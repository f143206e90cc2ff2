"""`Runs`: slots as runs of neighbours, whose numbers are read and written as slices.

numpy lets go of the GIL at every access by an index array, however short. Beside a busy thread such
a release costs up to a switch interval (measured: 10 ms a step for a dozen of them); slices of this
size and arithmetic on them keep the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    T = TypeVar("T", bound=np.generic)


QUIET = 500
"""Elements up to which numpy keeps the GIL in a plain copy or in arithmetic."""


def copy_rows(target: npt.NDArray[T], source: npt.NDArray[T]) -> None:
    """`target[:] = source` for tables [rows, width], in pieces that keep the GIL."""
    step = max(1, QUIET // max(1, source.shape[1]))
    for first in range(0, len(source), step):
        target[first : first + step] = source[first : first + step]


class Runs:
    """Access to the rows `slots` of arrays, in that order.

    Args:
        slots: distinct indices; the more neighbours follow each other, the fewer slices it takes.
    """

    __slots__ = ("_count", "_runs")

    def __init__(self, slots: Sequence[int]) -> None:
        self._count = len(slots)
        self._runs: list[tuple[int, int, int]] = []
        begin, at = 0, 0
        for at in range(1, self._count + 1):
            if at == self._count or slots[at] != slots[at - 1] + 1:
                self._runs.append((begin, at, slots[begin]))
                begin = at

    def take(self, array: npt.NDArray[T], width: int | None = None) -> npt.NDArray[T]:
        """A copy of the rows; of tables the first `width` columns."""
        if array.ndim > 1:
            array = array[:, :width]
        taken = np.empty((self._count, *array.shape[1:]), dtype=array.dtype)
        for begin, end, slot in self._runs:
            if array.ndim > 1:
                copy_rows(taken[begin:end], array[slot : slot + end - begin])
            else:
                taken[begin:end] = array[slot : slot + end - begin]
        return taken

    def put(self, array: npt.NDArray[Any], values: npt.NDArray[Any] | int) -> None:
        """Write one value for each row, or the same for all."""
        for begin, end, slot in self._runs:
            part = values if isinstance(values, int) else values[begin:end]
            array[slot : slot + end - begin] = part

    def add(self, array: npt.NDArray[Any], values: npt.NDArray[Any] | int) -> None:
        """Add one value to each row, or the same to all."""
        for begin, end, slot in self._runs:
            part = values if isinstance(values, int) else values[begin:end]
            array[slot : slot + end - begin] += part
