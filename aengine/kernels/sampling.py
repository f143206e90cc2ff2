"""Sampling over logits in plain torch: the twin that every faster kernel is tested against.

Nothing here asks the device for a value, so all of it can be captured in a CUDA graph. Rows do not
see each other: sums run over fixed blocks of one row, so a row's token is the same alone and in
any batch. On the CPU `aengine.kernels.sampling_cpu` does the same with host decisions.

Shape legend: S sampling rows, R rows of one group, C rows with a bitmask, V vocabulary, W words of
32 tokens, N slots of the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int64 = TypeVar("Int64", npt.NDArray[np.int64], torch.Tensor)

BLOCK = 128
"""Tokens in a block of the two-level prefix sum that `draw` walks."""

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX_B = 0x94D049BB133111EB - 2**64
_UNIFORM_BITS = 52


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawParams:
    """What `draw` needs to know of R rows; tensors of shape [R].

    `uniform` in [0, 1) float64 decides the draw; `temperature` (> 0), `top_p` and `min_p` are
    float64, `top_k` is int64 (0: off). `truncated` says that some row uses one of the last three;
    `largest_top_k` is the host's bound on `top_k`, None if some truncated row has no `top_k`.
    """

    uniform: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    truncated: bool
    largest_top_k: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PenaltyParams:
    """Penalties of R rows; float64 tensors of shape [R]."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


class SamplingKernels(Protocol):
    """The functions that this module and `sampling_cpu` both offer."""

    def argmax(self, logits_SV: torch.Tensor) -> torch.Tensor: ...
    def peaks(self, logits_SV: torch.Tensor) -> torch.Tensor: ...
    def apply_bitmask_(
        self, logits_SV: torch.Tensor, bitmask_CW: torch.Tensor, rows_C: torch.Tensor
    ) -> None: ...
    def penalise_(
        self,
        logits_SV: torch.Tensor,
        rows_R: torch.Tensor,
        slots_R: torch.Tensor,
        seen_NV: torch.Tensor,
        params: PenaltyParams,
    ) -> None: ...
    def count_(
        self, seen_NV: torch.Tensor, slots_R: torch.Tensor, token_ids_R: torch.Tensor
    ) -> None: ...
    def draw(
        self,
        logits_SV: torch.Tensor,
        rows_R: torch.Tensor,
        peaks_S: torch.Tensor,
        params: DrawParams,
    ) -> torch.Tensor: ...


def mix64(x: Int64) -> Int64:
    """SplitMix64's finaliser on int64 arrays or tensors (numpy or torch); wraps around.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_B
    return x ^ ((x >> 31) & (2**33 - 1))


@overload
def counter_uniform(
    key: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]: ...
@overload
def counter_uniform(key: torch.Tensor, position: torch.Tensor) -> torch.Tensor: ...
def counter_uniform(key: Any, position: Any) -> Any:
    """A uniform float64 in [0, 1) for each (key, position): no state, hence the same in any batch.

    Integers and one exact scaling only, so numpy, torch on a CPU and torch on CUDA agree bit for
    bit. Args are int64 of equal shape; the result has that shape.
    """
    bits = mix64(key ^ mix64(position * _GOLDEN + _GOLDEN))
    top = (bits >> (64 - _UNIFORM_BITS)) & (2**_UNIFORM_BITS - 1)
    # An integer tensor times a Python float would be float32, and could round up to 1.
    return (top.double() if isinstance(top, torch.Tensor) else top) * 2.0**-_UNIFORM_BITS


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    """The first most likely token of each row, [S] int64."""
    return logits_SV.argmax(dim=-1)


def peaks(logits_SV: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, [S] float32; not finite where the row cannot be sampled."""
    return logits_SV.amax(dim=-1)


def apply_bitmask_(logits_SV: torch.Tensor, bitmask_CW: torch.Tensor, rows_C: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place, in rows `rows_C` (int64).

    Bit t % 32 of word t // 32 (int32, little end first) says whether token t is allowed.
    """
    vocabulary = logits_SV.shape[1]
    bit = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
    allowed_CV = ((bitmask_CW.unsqueeze(-1) >> bit) & 1).flatten(1)[:, :vocabulary].bool()
    masked_CV = logits_SV.index_select(0, rows_C).masked_fill_(~allowed_CV, -math.inf)
    logits_SV.index_copy_(0, rows_C, masked_CV)


def penalise_(
    logits_SV: torch.Tensor,
    rows_R: torch.Tensor,
    slots_R: torch.Tensor,
    seen_NV: torch.Tensor,
    params: PenaltyParams,
) -> None:
    """Apply repetition, presence and frequency penalties in place.

    `seen_NV` is int32: bit 0 says that the token is in the prompt, the bits above count how often
    it was generated. Repetition looks at both, presence and frequency at generated tokens only.
    """
    logits_RV = logits_SV.index_select(0, rows_R)
    seen_RV = seen_NV.index_select(0, slots_R)
    count_RV = seen_RV >> 1
    repetition_R1 = params.repetition.float().unsqueeze(1)
    scaled_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = torch.where(seen_RV != 0, scaled_RV, logits_RV)
    logits_RV -= count_RV * params.frequency.float().unsqueeze(1)
    logits_RV -= (count_RV > 0) * params.presence.float().unsqueeze(1)
    logits_SV.index_copy_(0, rows_R, logits_RV)


def count_(seen_NV: torch.Tensor, slots_R: torch.Tensor, token_ids_R: torch.Tensor) -> None:
    """Count one more generated token of each slot, in place; see `penalise_` for the encoding."""
    flat = slots_R * seen_NV.shape[1] + token_ids_R
    two = torch.full_like(flat, 2, dtype=seen_NV.dtype)
    seen_NV.view(-1).index_add_(0, flat, two)


def draw(
    logits_SV: torch.Tensor, rows_R: torch.Tensor, peaks_S: torch.Tensor, params: DrawParams
) -> torch.Tensor:
    """One token for each of the rows `rows_R`: temperature, top-k, top-p, min-p, then the draw.

    The kept set is `{t : logit_t >= bound}`, so that equal logits share their fate and no sorting
    order matters: the k-th largest logit for top-k, the last logit of the smallest set of at least
    `top_p` of top-k's mass for top-p, `min_p` times the largest probability for min-p. The token
    is the first, in vocabulary order, whose cumulative probability exceeds `uniform`.

    Returns [R] int64, always valid token ids, meaningless where the peak is not finite.
    """
    whole = rows_R.shape[0] == logits_SV.shape[0]
    logits_RV = logits_SV if whole else logits_SV.index_select(0, rows_R)
    peak_R1 = (peaks_S if whole else peaks_S.index_select(0, rows_R)).unsqueeze(1)
    weights_RV = _weights(logits_RV, peak_R1, params.temperature)
    if params.truncated:
        weights_RV *= logits_RV >= _bound(logits_RV, peak_R1, params)
    return _invert(weights_RV, params.uniform.unsqueeze(1))


def log_normaliser(logits_LV: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of each row, [L] float64, the same whatever the other rows are."""
    peak_L1 = logits_LV.amax(dim=-1, keepdim=True)
    mass_LB = _blocks((logits_LV - peak_L1).exp_()).sum(dim=-1, dtype=torch.float64)
    # cumsum goes along one row in order; sum may split a lone row over threads.
    return mass_LB.cumsum(dim=-1)[:, -1].log() + peak_L1.squeeze(1)


def _blocks(weights_RV: torch.Tensor) -> torch.Tensor:
    """[R, B, BLOCK], zero-padded."""
    rows, vocabulary = weights_RV.shape
    return F.pad(weights_RV, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)


def _weights(
    logits_RV: torch.Tensor, peak_R1: torch.Tensor, temperature_R: torch.Tensor
) -> torch.Tensor:
    return ((logits_RV - peak_R1) / temperature_R.float().unsqueeze(1)).exp_()


def _bound(logits_RV: torch.Tensor, peak_R1: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """The smallest logit that each row keeps, [R, 1]."""
    vocabulary = logits_RV.shape[1]
    if params.largest_top_k is None:
        best_RK = logits_RV.sort(dim=-1, descending=True).values
    else:
        best_RK = logits_RV.topk(min(params.largest_top_k, vocabulary), dim=-1).values
    width = best_RK.shape[1]
    top_k_R1 = params.top_k.unsqueeze(1)
    kth_R1 = best_RK.gather(1, (top_k_R1 - 1).clamp(0, width - 1))
    kth_R1 = torch.where(top_k_R1 > 0, kth_R1, -math.inf)

    all_RV = _weights(logits_RV, peak_R1, params.temperature)
    all_RV *= logits_RV >= kth_R1
    wanted_R1 = all_RV.sum(dim=-1, keepdim=True, dtype=torch.float64) * params.top_p.unsqueeze(1)
    mass_RK = _weights(best_RK, peak_R1, params.temperature).double().cumsum(dim=-1)
    last_R1 = (mass_RK < wanted_R1).sum(dim=-1, keepdim=True).clamp_max(width - 1)
    nucleus_R1 = best_RK.gather(1, last_R1)
    nucleus_R1 = torch.where(params.top_p.unsqueeze(1) < 1.0, nucleus_R1, -math.inf)

    relative_R1 = (params.min_p.log() * params.temperature).float().unsqueeze(1) + peak_R1
    return torch.maximum(torch.maximum(kth_R1, nucleus_R1), relative_R1)


def _invert(weights_RV: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution in two levels; float64 where sums get long."""
    vocabulary = weights_RV.shape[1]
    weights_RBT = _blocks(weights_RV)
    mass_RB = weights_RBT.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_R1 = uniform_R1 * mass_RB[:, -1:]
    blocks = mass_RB.shape[1]
    block_R1 = (mass_RB <= target_R1).sum(dim=-1, keepdim=True).clamp_max(blocks - 1)
    before_R1 = F.pad(mass_RB, (1, 0)).gather(1, block_R1)
    inside_R1T = weights_RBT.gather(1, block_R1.unsqueeze(-1).expand(-1, 1, BLOCK))
    inside_RT = inside_R1T.squeeze(1).double().cumsum(dim=-1)
    # Rounding may leave a rest beyond the block's own sum: stay on its last token with weight.
    rest_R1 = torch.minimum(target_R1 - before_R1, inside_RT[:, -1:] * (1 - 2.0**-_UNIFORM_BITS))
    offset_R1 = (inside_RT <= rest_R1).sum(dim=-1, keepdim=True)
    return (block_R1 * BLOCK + offset_R1).clamp_max(vocabulary - 1).squeeze(1)
