"""A parser of GGUF headers: metadata and the table of tensors, checked against the file.

The `gguf` package names the tensor types, knows their block sizes and dequantises them; its reader
builds one array per string and takes seconds for a vocabulary (measured: 3.3 s, this parser 0.1 s),
and it trusts the sizes that the header claims. Here nothing is read or allocated before the bytes
that it needs are known to be in the file.

Source: the GGUF specification of the ggml project (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aengine.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = MappingProxyType(dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)))
"""Value type number -> struct code."""
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as the header describes it.

    `shape` is row-major (the last dimension is contiguous): the header's own order, reversed.
    `data` is uint8 [rows, bytes_per_row], a view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened GGUF file: `metadata` key-value pairs and `tensors` by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and parse its header.

    The tensors' bytes are not read here; pages come in when they are used.

    Raises:
        ModelLoadError: not a GGUF file, an unsupported version, a truncated or damaged header,
            or tensor data that lies outside the file or has an unknown type.
    """
    try:
        if path.stat().st_size < len(_MAGIC) + 20:
            raise ModelLoadError(
                f"{path} has {path.stat().st_size} bytes: too short to be a GGUF file"
            )
        with path.open("rb") as file:
            # Copy on write: the pages stay the file's own, and torch takes them without a warning.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    return _Parser(path, mapped).parse()


class _Parser:
    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._array = np.frombuffer(mapped, dtype=np.uint8)
        self._view = memoryview(mapped)
        self._size = len(mapped)
        self._at = 0

    def parse(self) -> GGUFFile:
        magic = bytes(self._view[:4])
        if magic != _MAGIC:
            raise ModelLoadError(
                f"{self._path} is not a GGUF file: it begins with {magic!r}, not with {_MAGIC!r}"
            )
        self._at = 4
        version = self._number("I", "version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "big-endian is not supported" if swapped in _VERSIONS else "2 or 3 is needed"
            raise ModelLoadError(f"{self._path} has GGUF version {version}: {why}")
        tensors = self._count("the tensor count", 24)
        pairs = self._count("the metadata count", 13)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._damaged(f"the metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("I", key), key, 0)
        return GGUFFile(self._path, metadata, self._tensors(tensors, metadata))

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
        headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._string("a tensor name")
            if name in headers:
                raise self._damaged(f"the tensor {name!r} appears twice")
            dims = self._number("I", name)
            if not 1 <= dims <= _MAX_DIMS:
                raise self._damaged(f"the tensor {name!r} has {dims} dimensions (1 to {_MAX_DIMS})")
            shape = tuple(self._number("Q", name) for _ in range(dims))
            headers[name] = (shape[::-1], self._number("I", name), self._number("Q", name))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r} (a power of two is needed)")
        start = -(-self._at // alignment) * alignment
        return {
            name: self._tensor(name, shape, kind, start + offset)
            for name, (shape, kind, offset) in headers.items()
        }

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GGUFTensor:
        try:
            tensor_type = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError):
            raise ModelLoadError(
                f"{self._path}: the tensor {name!r} has the unknown type number {kind}; known are "
                f"{', '.join(t.name for t in GGML_QUANT_SIZES)}"
            ) from None
        if not math.prod(shape) or shape[-1] % block:
            raise self._damaged(
                f"the tensor {name!r} has shape {shape} of {tensor_type.name}, which is stored in "
                f"blocks of {block}"
            )
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        end = begin + rows * row_bytes
        if end > self._size:
            raise ModelLoadError(
                f"{self._path} is truncated: the tensor {name!r} ends at byte {end}, "
                f"the file has {self._size}"
            )
        data = self._array[begin:end].reshape(rows, row_bytes)
        return GGUFTensor(name, shape, tensor_type.name, data)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self._damaged(f"the metadata key {key!r} has the unknown value type {kind}")
        kind = self._number("I", key)
        if kind == _STRING:
            return self._strings(self._count(key, 8), key)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            count = self._count(key, struct.calcsize(f"<{code}"))
            return list(struct.unpack(f"<{count}{code}", self._bytes(count * _width(code), key)))
        return [self._value(kind, key, depth + 1) for _ in range(self._count(key, 12))]

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop: a vocabulary and its merges are a few hundred thousand strings."""
        unpack, view, size, at = struct.Struct("<Q").unpack_from, self._view, self._size, self._at
        result: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(view, at)
                begin, at = at + 8, at + 8 + length
                if at > size:
                    raise self._truncated(key, at)
                result.append(str(view[begin:at], "utf-8"))
        except struct.error:
            raise self._truncated(key, at + 8) from None
        except UnicodeDecodeError as error:
            raise self._damaged(
                f"entry {len(result)} of {key!r} is not valid UTF-8 ({error.reason})"
            ) from None
        self._at = at
        return result

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        try:
            return str(self._bytes(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not valid UTF-8 ({error.reason})") from None

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(_width(code), what))[0]

    def _count(self, what: str, smallest: int) -> int:
        """A count of things that take at least `smallest` bytes each, believed only if they fit."""
        count = int(self._number("Q", what))
        if count * smallest > self._size - self._at:
            raise self._truncated(f"{what} ({count} entries)", self._at + count * smallest)
        return count

    def _bytes(self, length: int, what: str) -> memoryview:
        end = self._at + length
        if end > self._size:
            raise self._truncated(what, end)
        begin, self._at = self._at, end
        return self._view[begin:end]

    def _truncated(self, what: str, end: int) -> ModelLoadError:
        return ModelLoadError(
            f"{self._path} is truncated or damaged: {what} ends at byte {end}, "
            f"the file has {self._size}"
        )

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is damaged: {what}")


def _width(code: str) -> int:
    return struct.calcsize(f"<{code}")
