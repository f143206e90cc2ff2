"""Packed token masks: int32 [rows, ceil(V/32)], one bit a token, and a ring of buffers for them.

A buffer is filled by worker threads, copied to the device, and may only be filled again when that
copy is over. So a buffer is leased, and the ring never hands it out again before its release.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from aengine.grammar.vocabulary import mask_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

Allocate = Callable[[int, int], "NDArray[np.int32]"]
"""(rows, words) -> int32 array; on a GPU the engine passes one that pins the memory."""


def plain_rows(rows: int, words: int) -> NDArray[np.int32]:
    """Ordinary host memory, every token allowed."""
    return np.full((rows, words), -1, dtype=np.int32)


class BitmaskRing:
    """A fixed number of mask buffers, leased in turn. Thread-safe.

    Args:
        buffers: how many; one for each step in flight and one to fill is enough.
        rows: rows of each buffer.
        vocab_size: width of the logits.
        allocate: makes a buffer's memory.

    Raises:
        ValueError: a size is below 1, or `allocate` returns something of another shape or type.
    """

    def __init__(
        self, buffers: int, rows: int, vocab_size: int, allocate: Allocate = plain_rows
    ) -> None:
        if min(buffers, rows, vocab_size) < 1:
            raise ValueError("a ring of masks needs buffers, rows and a vocabulary")
        shape = (rows, mask_words(vocab_size))
        self._lock = threading.Lock()
        # Oldest release first, so that a buffer rests as long as possible.
        self._free: list[NDArray[np.int32]] = []
        for _ in range(buffers):
            buffer = allocate(*shape)
            if buffer.shape != shape or buffer.dtype != np.int32 or not buffer.flags.c_contiguous:
                raise ValueError(f"a mask buffer is contiguous int32 {list(shape)}")
            self._free.append(buffer)
        self.rows = rows

    def lease_nowait(self) -> BitmaskLease | None:
        """A buffer, or None when all are leased. Its rows hold whatever was there before."""
        with self._lock:
            if not self._free:
                return None
            return BitmaskLease(self, self._free.pop(0))

    @property
    def free(self) -> int:
        """Buffers that are not leased."""
        with self._lock:
            return len(self._free)

    def _take_back(self, buffer: NDArray[np.int32]) -> None:
        with self._lock:
            self._free.append(buffer)


class BitmaskLease:
    """One buffer, for one step. Release it when the copy that reads it is over."""

    def __init__(self, ring: BitmaskRing, buffer: NDArray[np.int32]) -> None:
        self._ring = ring
        self._buffer: NDArray[np.int32] | None = buffer

    @property
    def array(self) -> NDArray[np.int32]:
        """The buffer, int32 [rows, ceil(V/32)].

        Raises:
            RuntimeError: the lease was released.
        """
        if self._buffer is None:
            raise RuntimeError("this mask buffer was released")
        return self._buffer

    def release(self) -> None:
        """Give the buffer back. A second release does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._ring._take_back(buffer)
