"""Inverse frequencies of rotary embeddings, with the scaling variants of published checkpoints.

Variants that change with the length of a sequence (`dynamic`, `longrope`) are fixed for an engine
by the longest sequence that it serves: keys in the cache keep the rotation they were written with,
so frequencies that moved while a sequence grows would make a result depend on how it was chunked
and on its batch neighbours.

Sources: Chen et al., "Extending Context Window via Positional Interpolation", 2023 (linear);
bloc97, "Dynamically Scaled RoPE", 2023 (dynamic); Peng et al., "YaRN", 2023 (yarn); Ding et al.,
"LongRoPE", 2024 (longrope); the Llama 3.1 release (llama3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aengine.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, eq=False)
class RopeFrequencies:
    """`inv_freq`: [rotary_dim/2] float32, radians a position; `scale`: factor of cos and sin."""

    inv_freq: torch.Tensor
    scale: float = 1.0


def rope_frequencies(
    theta: float,
    rotary_dim: int,
    scaling: Mapping[str, Any] | None,
    *,
    max_position_embeddings: int,
    max_model_len: int,
) -> RopeFrequencies:
    """The frequencies for one rotary embedding.

    Args:
        theta: base of the geometric series.
        rotary_dim: dimensions of a head that turn.
        scaling: Hugging Face's mapping (`rope_type`, `factor`, ...), or None. The type "factors"
            (from GGUF) has one divisor per frequency under `factors`.
        max_position_embeddings: of the model.
        max_model_len: longest sequence the engine serves.

    Raises:
        ModelLoadError: the type is unknown, or a value it needs is missing or impossible.
    """
    plain = _series(theta, rotary_dim)
    if scaling is None:
        return RopeFrequencies(plain.float())
    values = _Values(scaling, max_position_embeddings)
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return RopeFrequencies(plain.float())
    if kind == "linear":
        return RopeFrequencies((plain / values.number("factor")).float())
    if kind == "factors":
        return RopeFrequencies((plain / values.list("factors", rotary_dim // 2)).float())
    if kind == "dynamic":
        return _dynamic(theta, rotary_dim, values, max_model_len)
    if kind == "llama3":
        return _llama3(plain, values)
    if kind == "yarn":
        return _yarn(theta, rotary_dim, plain, values)
    if kind == "longrope":
        return _longrope(plain, values, max_model_len)
    raise ModelLoadError(
        f"the model has rope_type={kind!r}: default, linear, dynamic, llama3, yarn and longrope "
        "are supported"
    )


class _Values:
    """The scaling's mapping, read with checks."""

    def __init__(self, scaling: Mapping[str, Any], max_position_embeddings: int) -> None:
        self._scaling = scaling
        self.max_positions = max_position_embeddings

    def number(self, name: str, default: float | None = None) -> float:
        value = self._scaling.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            kind = self._scaling.get("rope_type")
            raise ModelLoadError(
                f"the model's rope scaling ({kind}) has {name}={value!r}: "
                "a positive number is needed"
            )
        return float(value)

    def optional(self, name: str) -> float | None:
        return None if self._scaling.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._scaling.get(name, default))

    def list(self, name: str, length: int) -> torch.Tensor:
        value = self._scaling.get(name)
        try:
            numbers = torch.tensor(list(value or ()), dtype=torch.float64)
        except (TypeError, ValueError):
            numbers = torch.empty(0)
        if numbers.shape != (length,) or not bool((numbers > 0).all()):
            raise ModelLoadError(
                f"the model's rope scaling has an unusable {name}: "
                f"{length} positive numbers are needed"
            )
        return numbers

    @property
    def original(self) -> float:
        return self.number("original_max_position_embeddings", self.max_positions)

    @property
    def stretch(self) -> float:
        """`factor`, or the ratio of the two maximum lengths where it is left out."""
        return self.number("factor", self.max_positions / self.original)


def _series(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return theta**-exponents


def _dynamic(theta: float, rotary_dim: int, values: _Values, max_model_len: int) -> RopeFrequencies:
    factor = values.number("factor")
    longest = max(max_model_len, values.max_positions)
    grown = factor * longest / values.max_positions - (factor - 1)
    base = theta * grown ** (rotary_dim / (rotary_dim - 2))
    return RopeFrequencies(_series(base, rotary_dim).float())


def _llama3(plain: torch.Tensor, values: _Values) -> RopeFrequencies:
    factor, original = values.number("factor"), values.original
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if not high > low:
        raise ModelLoadError(
            f"the model's rope scaling (llama3) has low_freq_factor={low} and "
            f"high_freq_factor={high}: the second must be larger"
        )
    turns = original * plain / (2 * math.pi)  # of each pair, over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return RopeFrequencies((kept * plain + (1 - kept) * plain / factor).float())


def _yarn(theta: float, rotary_dim: int, plain: torch.Tensor, values: _Values) -> RopeFrequencies:
    factor, original = values.stretch, values.original

    def pair_with(turns: float) -> float:
        """The (fractional) pair that turns so often over the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with(values.number("beta_fast", 32.0))
    last = pair_with(values.number("beta_slow", 1.0))
    if values.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 1e-3
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64)
    interpolated = ((pairs - first) / width).clamp(0, 1)
    inv_freq = interpolated * plain / factor + (1 - interpolated) * plain
    scale = values.optional("attention_factor")
    if scale is None:
        one, all_dims = values.optional("mscale"), values.optional("mscale_all_dim")
        if one is not None and all_dims is not None:
            scale = _yarn_scale(factor, one) / _yarn_scale(factor, all_dims)
        else:
            scale = _yarn_scale(factor, 1.0)
    return RopeFrequencies(inv_freq.float(), scale)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(plain: torch.Tensor, values: _Values, max_model_len: int) -> RopeFrequencies:
    original = values.original
    name = "long_factor" if max_model_len > original else "short_factor"
    inv_freq = (plain / values.list(name, plain.shape[0])).float()
    scale = values.optional("attention_factor")
    if scale is None:
        factor = values.stretch
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeFrequencies(inv_freq, scale)
