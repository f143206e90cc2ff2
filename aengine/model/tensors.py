"""`WeightTensor` and `WeightSource`: stored weights by their Hugging Face names.

A source hands out bytes as they are stored; nothing is dequantised before a kernel or a model
family asks for it. numpy only: the device room decides where the bytes go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from aengine.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    ByteRows = np.ndarray[Any, np.dtype[np.uint8]]
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]
    IntArray = np.ndarray[Any, np.dtype[np.int64]]

PLAIN_TYPES = ("F32", "F16", "BF16", "F64")
"""Types with one number per element; every other type is stored in blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """One stored tensor.

    `shape` is row-major and the Hugging Face one ([out, in] for a linear layer). `dtype` is the
    type's name in the file ("F32", "BF16", "Q4_1", ...). `row_order` lists the stored rows in the
    order in which they are to be used, where the file keeps another one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: ByteRows
    row_order: IntArray | None = None

    @property
    def raw(self) -> ByteRows:
        """[rows, bytes_per_row] uint8: a view of the file, or a copy if rows had to move."""
        return self.stored if self.row_order is None else self.stored[self.row_order]

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return int(self.stored.nbytes)

    def dequantize(self) -> FloatArray:
        """The values in float32, with `shape`.

        Raises:
            ModelLoadError: nobody knows how to decode this type; the message lists those known.
        """
        raw = np.ascontiguousarray(self.raw)
        if self.dtype == "F32":
            return raw.view(np.float32).reshape(self.shape)
        if self.dtype in ("F16", "F64"):
            wide: type[Any] = np.float16 if self.dtype == "F16" else np.float64
            values: FloatArray = raw.view(wide).astype(np.float32)
            return values.reshape(self.shape)
        if self.dtype == "BF16":
            bits = raw.view(np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        try:
            blocks = dequantize(raw, GGMLQuantizationType[self.dtype])
        except (KeyError, NotImplementedError):
            raise ModelLoadError(
                f"the tensor {self.name!r} has type {self.dtype}, which cannot be decoded; known "
                f"are {', '.join(decodable_types())}"
            ) from None
        return np.ascontiguousarray(blocks, dtype=np.float32).reshape(self.shape)


def decodable_types() -> tuple[str, ...]:
    """Names of the types that `WeightTensor.dequantize` decodes."""
    from gguf.quants import _type_traits  # the package has no public list of what it can decode

    return (*PLAIN_TYPES, *sorted({t.name for t in _type_traits} - set(PLAIN_TYPES)))


class WeightSource(Protocol):
    """A mapping of Hugging Face tensor names to stored tensors."""

    def __getitem__(self, name: str, /) -> WeightTensor:
        """The tensor of that name.

        Raises:
            ModelLoadError: the file has no such tensor.
        """
        ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def __contains__(self, name: object, /) -> bool: ...


class TensorTable:
    """A `WeightSource` over a dict; what the file readers return."""

    def __init__(self, origin: str, tensors: Mapping[str, WeightTensor]) -> None:
        self._origin = origin
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> WeightTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelLoadError(f"{self._origin} has no tensor {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors
