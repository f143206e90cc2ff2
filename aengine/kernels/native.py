"""A plain decoder's whole step in one C call: the CPU path of quantised models.

Weights stay as the file stores them (4 or 8 bits), repacked for the kernels and never widened. In
mode "float32" they are unpacked in registers and multiplied with float32 activations; in mode
"int8" activations are quantised in blocks of 32 to one 8-bit term, or two where outliers are. A
row's result does not depend on the batch that it is in. See `docs/design/cpu-kernels.md`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from aengine.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    import numpy.typing as npt

GGML_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
"""Names of stored types that the kernels take, and their numbers in the GGUF specification."""

_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LISTED = 12
"""Names that an error lists before it only counts."""


class StoredTensor(Protocol):
    """A checkpoint's tensor, as `aengine.model.tensors.WeightTensor`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def raw(self) -> npt.NDArray[np.uint8]: ...

    def dequantize(self) -> npt.NDArray[np.float32]: ...


class StoredTensors(Protocol):
    """Tensors by their Hugging Face names."""

    def __getitem__(self, name: str, /) -> StoredTensor: ...

    def __contains__(self, name: object, /) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSpec:
    """A plain decoder: Llama, Qwen2. `inv_freq` is [head_dim / 2] float32, radians a position."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    inv_freq: Sequence[float]
    tied: bool
    qkv_bias: bool
    mode: Literal["float32", "int8"]
    threads: int


def available() -> bool:
    """Whether the kernels are built."""
    return _module() is not None


def describe() -> str:
    """The instruction set that is used, or why there is none."""
    module = _module()
    if module is None:
        return "not built: torch computes instead"
    sets = module.isas()
    return f"{sets[0]} (of {', '.join(sets)})"


def _module() -> ModuleType | None:
    try:
        from aengine_ext import _cpu
    except ImportError:
        return None
    return _cpu


def obstacle(spec: NativeSpec) -> str | None:
    """Why the kernels cannot compute a network of these sizes; None: they can."""
    if not available():
        return "the CPU kernels are not built"
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(spec, name) % 32:
            return f"{name}={getattr(spec, name)} is no multiple of 32"
    if spec.num_heads % spec.num_kv_heads or spec.num_heads // spec.num_kv_heads > 48:
        return f"{spec.num_heads} heads do not share {spec.num_kv_heads} key/value heads"
    return None


class NativeModel:
    """A model packed for the kernels.

    Args:
        spec: sizes and mode.
        weights: stored tensors by Hugging Face name, q and k rows in rotate-half order.

    Raises:
        ConfigError: the kernels are not built, or `AENGINE_CPU_ISA` names an instruction set that
            this processor lacks.
        ModelLoadError: a tensor is missing, unexpected, or of another shape than the sizes say.
    """

    def __init__(self, spec: NativeSpec, weights: StoredTensors) -> None:
        module = _module()
        if module is None:
            raise ConfigError("the CPU kernels are not built here")
        reason = obstacle(spec)
        if reason is not None:
            raise ConfigError(f"the CPU kernels cannot compute this network: {reason}")
        self.spec = spec
        self.nbytes = 0
        self._used: set[str] = set()
        self.busy = threading.Lock()
        """Held while a step is computed: the model has room for one at a time."""
        self._module: Any = module
        isa = os.environ.get("AENGINE_CPU_ISA", "")
        if isa and isa not in module.isas():
            raise ConfigError(f"AENGINE_CPU_ISA={isa!r}: here are {', '.join(module.isas())}")
        self._model = module.new_model(
            spec.num_layers,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.vocab_size,
            spec.rms_eps,
            spec.threads,
            np.asarray(spec.inv_freq, dtype=np.float32),
            isa,
        )
        self._fill(weights)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._module.isa_of(self._model))

    def _fill(self, weights: StoredTensors) -> None:
        spec = self.spec
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        shapes = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}"
            for kind, name in enumerate(_MATRICES):
                part = "self_attn" if kind < 4 else "mlp"
                full = f"{prefix}.{part}.{name}.weight"
                self._matrix(weights, layer * 7 + kind, full, shapes[name])
            self._vector(weights, layer * 5, f"{prefix}.input_layernorm.weight", hidden)
            self._vector(
                weights, layer * 5 + 1, f"{prefix}.post_attention_layernorm.weight", hidden
            )
            if spec.qkv_bias:
                for at, (name, size) in enumerate((("q", q), ("k", kv), ("v", kv)), start=2):
                    bias = f"{prefix}.self_attn.{name}_proj.bias"
                    self._vector(weights, layer * 5 + at, bias, size)
        vocabulary = (spec.vocab_size, hidden)
        first = spec.num_layers * 7
        self._matrix(weights, first, "model.embed_tokens.weight", vocabulary)
        if not spec.tied:
            self._matrix(weights, first + 1, "lm_head.weight", vocabulary)
        self._vector(weights, spec.num_layers * 5, "model.norm.weight", hidden)
        if spec.tied:
            self._used.add("lm_head.weight")
        left = [name for name in weights if name not in self._used]
        if left:
            more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
            raise ModelLoadError(
                f"the weights do not fit the model; unexpected: {', '.join(left[:_LISTED])}{more}"
            )

    def _find(self, weights: StoredTensors, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in weights:
            raise ModelLoadError(f"the weights do not fit the model; missing: {name}")
        self._used.add(name)
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"the weights do not fit the model; misshapen: {name} is {list(tensor.shape)} "
                f"instead of {list(shape)}"
            )
        return tensor

    def _matrix(
        self, weights: StoredTensors, index: int, name: str, shape: tuple[int, int]
    ) -> None:
        tensor = self._find(weights, name, shape)
        rows, cols = shape
        kind = GGML_TYPES.get(tensor.dtype)
        raw: npt.NDArray[Any]
        if kind is not None and self._module.row_bytes(kind, cols):
            raw = np.ascontiguousarray(tensor.raw)
        else:
            kind, raw = GGML_TYPES["F32"], np.ascontiguousarray(tensor.dequantize())
        int8 = self.spec.mode == "int8"
        self.nbytes += self._module.set_matrix(
            self._model, index, kind, rows, cols, int8, raw.reshape(-1).view(np.uint8)
        )

    def _vector(self, weights: StoredTensors, index: int, name: str, size: int) -> None:
        values = np.ascontiguousarray(self._find(weights, name, (size,)).dequantize())
        self._module.set_vector(self._model, index, values)

    def forward(
        self,
        *,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slot_mapping: npt.NDArray[np.int64],
        query_start: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        logit_index: npt.NDArray[np.int64],
        keys: Sequence[int],
        values: Sequence[int],
        kv_itemsize: int,
        num_blocks: int,
        block_size: int,
        out: npt.NDArray[np.float32],
    ) -> None:
        """One step: writes its keys and values, and the logits of the chosen tokens to `out`.

        Args:
            token_ids, positions, slot_mapping: [T] int64.
            query_start: [R+1], context_lens: [R], block_tables: [R, B], int32.
            logit_index: [S] int64, tokens whose logits are wanted.
            keys, values: address of each layer's
                [num_blocks, block_size, num_kv_heads, head_dim].
            kv_itemsize: bytes of one of their numbers; 2: float16, 4: float32.
            out: [S, vocab_size] float32, contiguous.

        Raises:
            ValueError: an index or a size is out of range; nothing was computed.
            RuntimeError: another thread is computing a step of this model.
        """
        arrays = [
            _indices("token_ids", token_ids, np.int64),
            _indices("positions", positions, np.int64),
            _indices("slot_mapping", slot_mapping, np.int64),
            _indices("logit_index", logit_index, np.int64),
            _indices("query_start", query_start, np.int32),
            _indices("block_tables", block_tables, np.int32, ndim=2),
        ]
        lengths = _indices("context_lens", context_lens, np.int32)
        self._check(arrays, lengths, num_blocks, block_size, out)
        tokens, rows = len(arrays[0]), len(arrays[4]) - 1
        addresses = [array.ctypes.data for array in arrays]
        self._module.forward(
            self._model,
            tokens,
            rows,
            len(arrays[3]),
            arrays[5].shape[1],
            block_size,
            *addresses,
            out.ctypes.data,
            keys,
            values,
            kv_itemsize,
        )

    def _check(
        self,
        arrays: Sequence[npt.NDArray[Any]],
        context_lens: npt.NDArray[Any],
        num_blocks: int,
        block_size: int,
        out: npt.NDArray[np.float32],
    ) -> None:
        """Everything that the C loop follows without looking."""
        ids, positions, slots, index, starts, tables = arrays
        tokens, rows = len(ids), len(starts) - 1
        ok = (
            num_blocks > 0
            and block_size > 0
            and tokens > 0
            and len(positions) == len(slots) == tokens
            and rows > 0
            and starts[0] == 0
            and starts[-1] == tokens
            and bool((starts[1:] > starts[:-1]).all())  # a difference could wrap around
            and len(tables) == rows == len(context_lens)
            and _within(ids, self.spec.vocab_size)
            and _within(slots, num_blocks * block_size)
            and _within(index, tokens)
            and _within(tables, num_blocks)
            and _within(positions, tables.shape[1] * block_size)
            and bool((_last(positions, starts) + 1 == context_lens).all())
        )
        if not ok:
            raise ValueError("the step's sizes or indices are out of range")
        if (
            out.shape != (len(index), self.spec.vocab_size)
            or out.dtype != np.float32
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise ValueError(
                f"out is {list(out.shape)} {out.dtype}; it must be "
                f"[{len(index)}, {self.spec.vocab_size}] float32, contiguous and writeable"
            )


def _indices(
    name: str, values: npt.NDArray[Any], dtype: type[np.signedinteger[Any]], *, ndim: int = 1
) -> npt.NDArray[Any]:
    """`values` as contiguous integers of the width that the C loop reads; none of them wrapped."""
    if values.ndim != ndim or values.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is {list(values.shape)} {values.dtype}; it must be integers of {ndim} "
            f"dimension{'s' if ndim > 1 else ''}"
        )
    narrow = np.ascontiguousarray(values, dtype=dtype)
    if narrow.dtype != values.dtype and not np.array_equal(narrow, values):
        raise ValueError(f"{name} is out of range for {np.dtype(dtype)}: {int(values.max())}")
    return narrow


def _last(values: npt.NDArray[Any], starts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Each row's last; if it can be, without an index array, which lets go of the GIL."""
    return values if len(values) == len(starts) - 1 else values[starts[1:] - 1]


def _within(values: npt.NDArray[Any], stop: int) -> bool:
    return not len(values) or bool(values.min() >= 0 and values.max() < stop)
