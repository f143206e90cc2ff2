"""From named checkpoint tensors to a model's own: sharded, converted, and strictly accounted for.

A `WeightReader` is asked for every tensor that a family wants. It never loads partially in silence:
`finish()` raises one error that lists what was missing, misshapen or left over.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

import torch

from aengine.errors import ModelLoadError
from aengine.model.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aengine.model.parallel import ParallelConfig, Shard
    from aengine.model.tensors import WeightTensor

_LISTED = 12
"""Names that an error lists of each kind before it only counts."""

_DUMMY_STD = 0.02


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Stored types that torch has too: their bytes need no decoding."""


class Weights(Protocol):
    """Tensors by their Hugging Face names: a dict of tensors, or a checkpoint's `WeightSource`."""

    def __getitem__(self, name: str, /) -> WeightTensor | torch.Tensor: ...

    def __contains__(self, name: object, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...


class WeightReader:
    """Hands out tensors by their Hugging Face names.

    Args:
        weights: name -> tensor; None makes random ones (`load_format="dummy"`): reproducible for a
            seed, whatever the order of reading and the shard.
        dtype, device: of the tensors handed out.
        seed: of the random weights.
    """

    def __init__(
        self,
        weights: Weights | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._weights = weights
        self._seed = seed
        self.bytes_handed_out = 0
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def matrix(
        self, name: str, shape: tuple[int, ...], *, dim: int = 0, shard: Shard | None = None
    ) -> torch.Tensor:
        """The tensor `name` of the full `shape`, or its `shard` along `dim`."""
        full = self._full(name, shape)
        if shard is not None:
            full = full.narrow(dim, shard.start, shard.size)
        # A clone, where nothing was converted: the model must not alias the caller's tensors.
        return self._counted(full.to(self.device, self.dtype, copy=True).contiguous())

    def merged(
        self, parts: Sequence[tuple[str, tuple[int, ...], Shard | None]], *, dim: int = 0
    ) -> torch.Tensor:
        """Several tensors, each sharded along `dim`, stacked along it."""
        return torch.cat([self.matrix(n, s, dim=dim, shard=h) for n, s, h in parts], dim)

    def vector(self, name: str, size: int, *, shard: Shard | None = None) -> torch.Tensor:
        """A bias."""
        return self.matrix(name, (size,), shard=shard)

    def norm(
        self, name: str, size: int, *, offset: float = 0.0, shard: Shard | None = None
    ) -> torch.Tensor:
        """A norm's weight plus `offset`, in float32 whatever the model's dtype."""
        if self._weights is None:
            full = torch.ones(size)
        else:
            full = self._full(name, (size,)).float() + offset
        if shard is not None:
            full = full[shard.start : shard.stop]
        return self._counted(full.to(self.device, torch.float32, copy=True))

    def merged_linear(
        self,
        prefix: str,
        rows: Mapping[str, tuple[int, Shard]],
        inputs: int,
        bias: bool,
        merged: str | None = None,
    ) -> Linear:
        """Projections of one input as one matrix, each sharded by its outputs.

        Args:
            prefix: of the names.
            rows: name -> (outputs of all ranks, this rank's).
            inputs: width of the input.
            bias: whether the projections have one.
            merged: the name, where the checkpoint stores them as one matrix already.
        """
        if merged is None:
            parts = [(f"{prefix}.{n}.weight", (size, inputs), s) for n, (size, s) in rows.items()]
            weight = self.merged(parts)
            biases = [(f"{prefix}.{n}.bias", (size,), s) for n, (size, s) in rows.items()]
            return Linear(weight, self.merged(biases) if bias else None)
        total = sum(size for size, _ in rows.values())
        weight = self._pick(self.matrix(f"{prefix}.{merged}.weight", (total, inputs)), rows)
        if not bias:
            return Linear(weight)
        return Linear(weight, self._pick(self.vector(f"{prefix}.{merged}.bias", total), rows))

    def _pick(self, full: torch.Tensor, rows: Mapping[str, tuple[int, Shard]]) -> torch.Tensor:
        """This rank's rows of a matrix that holds several projections."""
        parts = torch.split(full, [size for size, _ in rows.values()])
        picked = [
            part.narrow(0, shard.start, shard.size)
            for part, (_, shard) in zip(parts, rows.values(), strict=True)
        ]
        return torch.cat(picked)

    def row_parallel(
        self,
        name: str,
        shape: tuple[int, int],
        shard: Shard,
        bias: bool,
        parallel: ParallelConfig,
    ) -> Linear:
        """A projection sharded by its inputs; the ranks' outputs are to be summed.

        Every rank reads the bias and only the first adds it, so the sum has it once.
        """
        weight = self.matrix(f"{name}.weight", shape, dim=1, shard=shard)
        added = self.vector(f"{name}.bias", shape[0]) if bias else None
        return Linear(weight, added if parallel.rank == 0 else None)

    def ignore(self, *names: str) -> None:
        """These may be in the checkpoint and are not needed."""
        self._used.update(names)

    def finish(self) -> None:
        """Check that everything was there and everything was used.

        Raises:
            ModelLoadError: lists the missing, misshapen and unexpected tensors.
        """
        left = [] if self._weights is None else [n for n in self._weights if n not in self._used]
        unexpected = [name for name in left if not name.endswith(".rotary_emb.inv_freq")]
        kinds = {
            "missing": self._missing,
            "misshapen": self._misshapen,
            "unexpected": unexpected,
        }
        problems = [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise ModelLoadError("the weights do not fit the model; " + "; ".join(problems))

    def _full(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._weights is None:
            return self._random(name, shape)
        self._used.add(name)
        if name not in self._weights:
            self._missing.append(name)
            return self._placeholder(shape)
        weight = self._weights[name]
        if tuple(weight.shape) != shape:
            self._misshapen.append(f"{name} is {list(weight.shape)} instead of {list(shape)}")
            return self._placeholder(shape)
        if isinstance(weight, torch.Tensor):
            return weight
        return decoded(weight)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes_handed_out += tensor.nbytes
        return tensor

    def _placeholder(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Stands for a tensor that `finish` will complain about; takes no memory."""
        return torch.zeros(1).expand(shape)

    def _random(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self.device)
        # 32 bits: the CPU's generator looks at no more.
        generator.manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        full = torch.empty(shape, dtype=self.dtype, device=self.device)
        return full.normal_(std=_DUMMY_STD, generator=generator)


def decoded(weight: WeightTensor) -> torch.Tensor:
    """A stored tensor's values, in its own type where torch has that and else in float32.

    A view of the file's pages where nothing had to be decoded, so that a shard reads only its own.
    """
    dtype = _PLAIN.get(weight.dtype)
    if dtype is None:
        return torch.from_numpy(weight.dequantize())
    raw = weight.raw
    if not raw.flags.c_contiguous or raw.ctypes.data % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(weight.shape)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
