"""Weights of a folder in Hugging Face layout: `model.safetensors`, or shards with their index.

The safetensors library judges whether a file is sound; the byte ranges then come from the header
(8 bytes of length, JSON, data), so that a tensor is a view of the mapped file in any dtype, which
the library's numpy side does not offer for bfloat16.
"""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from aengine.errors import ModelLoadError
from aengine.model.tensors import TensorTable, WeightTensor

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.model.tensors import WeightSource

_DTYPES = ("F32", "F16", "BF16", "F64")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file whose top is an object.

    Raises:
        ModelLoadError: the file cannot be read or is not such JSON.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds {type(content).__name__}: a JSON object is needed")
    return content


def safetensors_weights(folder: Path) -> WeightSource:
    """All tensors of the folder.

    Raises:
        ModelLoadError: no weights, a shard that is missing, truncated or damaged, a tensor in two
            shards or in none, or a dtype other than F32, F16, BF16, F64.
    """
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelLoadError(f"{folder} has neither {_SINGLE} nor {_INDEX}: no weights to load")
        return TensorTable(str(folder), _read_file(folder / _SINGLE))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise ModelLoadError(f"{index} has no weight_map of tensor names to file names")
    tensors: dict[str, WeightTensor] = {}
    for shard in sorted(set(places.values())):
        if "/" in shard or "\\" in shard or shard in ("", ".", ".."):
            raise ModelLoadError(f"{index} names the file {shard!r}, which is not in the folder")
        for name, tensor in _read_file(folder / shard).items():
            if places.get(name) != shard:
                raise ModelLoadError(
                    f"{folder / shard} has the tensor {name!r}, which {_INDEX} places in "
                    f"{places.get(name)!r}"
                )
            tensors[name] = tensor
    absent = [name for name in places if name not in tensors]
    if absent:
        raise ModelLoadError(f"{folder / places[absent[0]]} lacks the tensor {absent[0]!r}")
    return TensorTable(str(folder), tensors)


def _read_file(path: Path) -> dict[str, WeightTensor]:
    try:
        with safe_open(str(path), framework="numpy"):
            pass  # opening checks the header, the shapes and that the data covers the file exactly
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is truncated or damaged: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    content = np.frombuffer(mapped, dtype=np.uint8)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, content, start) for name, entry in header.items()}


def _tensor(
    path: Path,
    name: str,
    entry: dict[str, Any],
    content: np.ndarray[Any, np.dtype[np.uint8]],
    start: int,
) -> WeightTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if dtype not in _DTYPES:
        raise ModelLoadError(
            f"{path}: the tensor {name!r} has dtype {dtype}; supported are {', '.join(_DTYPES)}"
        )
    if not shape or 0 in shape:
        raise ModelLoadError(f"{path}: the tensor {name!r} has the empty shape {list(shape)}")
    begin, end = entry["data_offsets"]
    rows = int(np.prod(shape[:-1]))
    return WeightTensor(name, shape, dtype, content[start + begin : start + end].reshape(rows, -1))
