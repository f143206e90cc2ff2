"""Sampling on the CPU: the functions of `aengine.kernels.sampling` with host decisions.

Here a value costs nothing to look at, so work stops early: numpy's vectorised argmax, partition
and sort are 10 to 25 times faster than torch's on two cores, penalties touch only tokens that were
seen, and truncation looks only at logits above a bound taken from block maxima. Every row is
treated alone. Tensors come in and go out; numpy works on their memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.kernels.sampling import BLOCK

if TYPE_CHECKING:
    import numpy.typing as npt

    from aengine.kernels.sampling import DrawParams, PenaltyParams

    Floats = npt.NDArray[np.float32]

_PEAK_BLOCK = 32
_FIRST_CANDIDATES = 64
_DENSE = 4096


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    """The first most likely token of each row, [S] int64."""
    return torch.from_numpy(logits_SV.numpy().argmax(axis=1))


def peaks(logits_SV: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, [S] float32; not finite where the row cannot be sampled."""
    return logits_SV.amax(dim=-1)


def apply_bitmask_(logits_SV: torch.Tensor, bitmask_CW: torch.Tensor, rows_C: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf in place; see `sampling.apply_bitmask_`."""
    logits = logits_SV.numpy()
    bits_CV = np.unpackbits(
        bitmask_CW.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
    )
    for row, bits_V in zip(rows_C.numpy(), bits_CV, strict=True):
        np.copyto(logits[row], -np.inf, where=bits_V == 0)


def penalise_(
    logits_SV: torch.Tensor,
    rows_R: torch.Tensor,
    slots_R: torch.Tensor,
    seen_NV: torch.Tensor,
    params: PenaltyParams,
) -> None:
    """Apply the penalties in place, touching only tokens seen before; see `sampling.penalise_`."""
    logits, seen = logits_SV.numpy(), seen_NV.numpy()
    repetition = params.repetition.numpy().astype(np.float32)
    presence = params.presence.numpy().astype(np.float32)
    frequency = params.frequency.numpy().astype(np.float32)
    for i, (row, slot) in enumerate(zip(rows_R.numpy(), slots_R.numpy(), strict=True)):
        tokens = np.flatnonzero(seen[slot])
        counts = seen[slot, tokens] >> 1
        values = logits[row, tokens]
        values = np.where(values > 0, values / repetition[i], values * repetition[i])
        values -= counts * frequency[i]
        values -= (counts > 0) * presence[i]
        logits[row, tokens] = values


def count_(seen_NV: torch.Tensor, slots_R: torch.Tensor, token_ids_R: torch.Tensor) -> None:
    """Count one more generated token of each slot, in place (slots are distinct)."""
    seen_NV.numpy()[slots_R.numpy(), token_ids_R.numpy()] += 2


def draw(
    logits_SV: torch.Tensor, rows_R: torch.Tensor, peaks_S: torch.Tensor, params: DrawParams
) -> torch.Tensor:
    """One token for each of the rows `rows_R`; see `sampling.draw` for the rules."""
    logits, peak = logits_SV.numpy(), peaks_S.numpy()
    uniform, temperature = params.uniform.numpy(), params.temperature.numpy()
    top_k, top_p, min_p = params.top_k.numpy(), params.top_p.numpy(), params.min_p.numpy()
    tokens = torch.zeros(len(uniform), dtype=torch.int64)
    out = tokens.numpy()
    for i, row in enumerate(rows_R.numpy()):
        if not math.isfinite(peak[row]):
            continue
        drawn = _Row(logits[row], float(peak[row]), float(temperature[i]))
        bound = drawn.bound(int(top_k[i]), float(top_p[i]), float(min_p[i]))
        out[i] = drawn.token(bound, float(uniform[i]))
    return tokens


class _Row:
    """One row of logits on its way to a token."""

    def __init__(self, logits_V: Floats, peak: float, temperature: float) -> None:
        self.logits_V = logits_V
        self.peak = np.float32(peak)
        self.temperature = np.float32(temperature)

    def weights(self, logits: Floats) -> Floats:
        """Unnormalised probabilities (the most likely token has 1)."""
        scaled = logits - self.peak
        scaled /= self.temperature
        result = torch.from_numpy(scaled)
        return result.exp_().numpy() if scaled.size > _DENSE else np.exp(scaled, out=scaled)

    def bound(self, top_k: int, top_p: float, min_p: float) -> float:
        """The smallest logit that is kept; -inf if all are."""
        bound = -math.inf
        if 0 < top_k < len(self.logits_V):
            bound = float(self.best(top_k)[top_k - 1])
        if top_p < 1.0:
            bound = max(bound, self.nucleus(bound, top_p))
        if min_p > 0.0:
            relative = np.float32(math.log(min_p) * float(self.temperature)) + self.peak
            bound = max(bound, float(relative))
        return bound

    def nucleus(self, bound: float, top_p: float) -> float:
        """The last logit of the smallest set that has `top_p` of the mass above `bound`."""
        kept = self.logits_V if bound == -math.inf else self.logits_V[self.logits_V >= bound]
        wanted = float(self.weights(kept).sum(dtype=np.float64)) * top_p
        candidates = _FIRST_CANDIDATES
        while True:
            best = self.best(candidates)
            mass = self.weights(best).cumsum(dtype=np.float64)
            last = int(np.searchsorted(mass, wanted))
            if last < len(best):
                return float(best[last])
            if len(best) >= len(kept):
                return float(best[-1])
            candidates *= 8

    def best(self, count: int) -> Floats:
        """At least the `count` largest logits (or all there are), largest first.

        The count-th largest block maximum is a lower bound of the count-th largest logit, and few
        logits lie above it.
        """
        logits_V = self.logits_V
        whole = len(logits_V) // _PEAK_BLOCK
        if 2 * count < whole:
            tops = logits_V[: whole * _PEAK_BLOCK].reshape(whole, _PEAK_BLOCK).max(axis=1)
            logits_V = logits_V[logits_V >= np.partition(tops, whole - count)[whole - count]]
        return np.sort(logits_V)[::-1]

    def token(self, bound: float, uniform: float) -> int:
        """The first token whose cumulative probability exceeds `uniform`."""
        if bound == -math.inf:
            return self._dense(uniform)
        tokens = np.flatnonzero(self.logits_V >= bound)
        mass = self.weights(self.logits_V[tokens]).cumsum(dtype=np.float64)
        chosen = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
        return int(tokens[min(chosen, len(tokens) - 1)])

    def _dense(self, uniform: float) -> int:
        weights_V = self.weights(self.logits_V)
        starts = np.arange(0, len(weights_V), BLOCK)
        mass = np.add.reduceat(weights_V, starts, dtype=np.float64).cumsum()
        target = uniform * mass[-1]
        block = min(int(np.searchsorted(mass, target, side="right")), len(mass) - 1)
        before = mass[block - 1] if block else 0.0
        inside = weights_V[starts[block] : starts[block] + BLOCK].cumsum(dtype=np.float64)
        # Rounding may leave a rest beyond the block's own sum: stay on its last token with weight.
        rest = min(target - before, np.nextafter(inside[-1], 0.0))
        return int(starts[block] + np.searchsorted(inside, rest, side="right"))
