"""Sampling over logits on the GPU: the functions of `kernels.sampling`, without a sort.

Truncation needs one number a row: the smallest logit that is kept. A program finds it by search:
each pass over the row sums weights (or counts) above eight thresholds at once and keeps the
interval that holds the answer, until one value of logits is left in it. The draw inverts the
cumulative distribution in two levels, chunks first, so that it reads one chunk only.

Rows never meet and every sum has a fixed order: a row's token is the same alone and in any batch.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aengine.kernels.triton_logits import (
    CHUNK,
    apply_bitmask_,
    argmax,
    count_,
    peaks,
    penalise_,
    row_peaks,
)

if TYPE_CHECKING:
    from aengine.kernels.sampling import DrawParams

__all__ = ["apply_bitmask_", "argmax", "count_", "draw", "peaks", "penalise_", "row_peaks"]

_PASS_BLOCK = 2048
_TINY = 2.0**-52


@triton.jit
def _search(
    logits_ptr,
    low,
    high,
    wanted,
    peak,
    temperature,
    floor,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
):
    """The largest logit b whose set {logit >= b} counts (weighs, if MASS) at least `wanted`.

    `low` is known to do, `high` not to. Only logits of at least `floor` have weight.
    """
    nth = tl.arange(0, 8)
    running = low < high
    while running:
        thresholds = low + (high - low) * ((nth + 1).to(tl.float32) / 9.0)
        sums = tl.zeros([8, BLOCK], tl.float32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=float("-inf"))
            logits = logits.to(tl.float32)
            if MASS:
                value = tl.exp((logits - peak) / temperature)
                value = tl.where(logits >= floor, value, 0.0)
            else:
                value = tl.full([BLOCK], 1.0, tl.float32)
            sums += tl.where(logits[None, :] >= thresholds[:, None], value[None, :], 0.0)
            between = (logits >= low) & (logits < high)
            least = tl.minimum(least, tl.where(between, logits, float("inf")))
            most = tl.maximum(most, tl.where(between, logits, float("-inf")))
        enough = tl.sum(sums, axis=1) >= wanted
        smallest = tl.min(least, axis=0)
        largest = tl.max(most, axis=0)
        new_low = tl.max(tl.where(enough, thresholds, low), axis=0)
        new_high = tl.min(tl.where(enough, high, thresholds), axis=0)
        # Done with one value between the ends, or when no float lies between them.
        running = (smallest < largest) & ((new_low > low) | (new_high < high))
        if (smallest >= largest) & (smallest < high):
            new_low = smallest
        low = new_low
        high = new_high
    return low


@triton.jit
def _bound_kernel(
    logits_ptr,
    rows_ptr,
    peak_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bound_ptr,
    row_stride,
    real_stride,
    int_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    peak = tl.load(peak_ptr + row)
    wide = tl.load(temperature_ptr + index * real_stride)
    temperature = wide.to(tl.float32)
    top_k = tl.load(top_k_ptr + index * int_stride)
    top_p = tl.load(top_p_ptr + index * real_stride).to(tl.float32)
    min_p = tl.load(min_p_ptr + index * real_stride)
    logits_ptr += row * row_stride
    # The tiny number stands for zero: what it cuts off has no weight in float32.
    bound = (tl.log(tl.maximum(min_p, 1e-300)) * wide).to(tl.float32) + peak
    sampled = (peak > float("-inf")) & (peak < float("inf"))
    counted = sampled & (top_k > 0) & (top_k < VOCABULARY)
    weighed = sampled & (top_p < 1.0)
    if counted | weighed:
        least = tl.full([BLOCK], float("inf"), tl.float32)
        finite = tl.zeros([BLOCK], tl.float32)
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + token, mask=token < VOCABULARY, other=float("-inf"))
            logits = logits.to(tl.float32)
            possible = logits > float("-inf")
            least = tl.minimum(least, tl.where(possible, logits, float("inf")))
            finite += tl.where(possible, 1.0, 0.0)
            mass += tl.exp((logits - peak) / temperature)
        low = tl.min(least, axis=0)
        above = peak + tl.maximum(tl.abs(peak) * 1e-6, 1e-30)
        floor = low
        total = tl.sum(mass, axis=0)
        # With fewer possible tokens than top_k all are kept.
        if counted & (tl.sum(finite, axis=0) > top_k.to(tl.float32)):
            floor = _search(
                logits_ptr, low, above, top_k.to(tl.float32), peak, temperature, low,
                VOCABULARY, BLOCK, False,
            )  # fmt: skip
            bound = tl.maximum(bound, floor)
            if weighed:
                mass = tl.zeros([BLOCK], tl.float32)
                for start in range(0, VOCABULARY, BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    logits = tl.load(
                        logits_ptr + token, mask=token < VOCABULARY, other=float("-inf")
                    )
                    logits = logits.to(tl.float32)
                    weight = tl.exp((logits - peak) / temperature)
                    mass += tl.where(logits >= floor, weight, 0.0)
                total = tl.sum(mass, axis=0)
        if weighed:
            nucleus = _search(
                logits_ptr, floor, above, total * top_p, peak, temperature, floor,
                VOCABULARY, BLOCK, True,
            )  # fmt: skip
            bound = tl.maximum(bound, nucleus)
    tl.store(bound_ptr + index, bound)


@triton.jit
def _weights(logits_ptr, token, inside, peak, temperature, bound):
    logits = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    weights = tl.exp((logits - peak) / temperature)
    # What NaN weighs is nothing: such a row means nothing, but its token must be one.
    return tl.where(inside & (logits >= bound) & (weights > 0.0), weights, 0.0)


@triton.jit
def _chunk_mass_kernel(
    logits_ptr,
    rows_ptr,
    peak_ptr,
    temperature_ptr,
    bound_ptr,
    mass_ptr,
    row_stride,
    real_stride,
    chunks,
    TRUNCATED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    peak = tl.load(peak_ptr + row)
    temperature = tl.load(temperature_ptr + index * real_stride).to(tl.float32)
    bound = float("-inf")
    if TRUNCATED:
        bound = tl.load(bound_ptr + index)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    weights = _weights(logits_ptr + row * row_stride, token, inside, peak, temperature, bound)
    tl.store(mass_ptr + index * chunks + chunk, tl.sum(weights.to(tl.float64), axis=0))


@triton.jit
def _pick_kernel(
    logits_ptr,
    rows_ptr,
    peak_ptr,
    temperature_ptr,
    bound_ptr,
    mass_ptr,
    uniform_ptr,
    token_ptr,
    row_stride,
    real_stride,
    uniform_stride,
    chunks,
    TINY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    peak = tl.load(peak_ptr + row)
    temperature = tl.load(temperature_ptr + index * real_stride).to(tl.float32)
    uniform = tl.load(uniform_ptr + index * uniform_stride)
    bound = float("-inf")
    if TRUNCATED:
        bound = tl.load(bound_ptr + index)
    nth = tl.arange(0, CHUNKS)
    masses = tl.load(mass_ptr + index * chunks + nth, mask=nth < chunks, other=0.0)
    upto = tl.cumsum(masses, axis=0)
    target = uniform * tl.max(upto, axis=0)
    chunk = tl.sum(((upto <= target) & (nth < chunks)).to(tl.int32), axis=0)
    chunk = tl.minimum(chunk, chunks - 1)
    before = tl.sum(tl.where(nth == chunk - 1, upto, 0.0), axis=0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    weights = _weights(logits_ptr + row * row_stride, token, inside, peak, temperature, bound)
    mass = tl.cumsum(weights.to(tl.float64), axis=0)
    # Rounding may leave a rest beyond the chunk's own sum: stay on its last token with weight.
    rest = tl.minimum(target - before, tl.max(mass, axis=0) * (1.0 - TINY))
    passed = tl.sum((mass <= rest).to(tl.int32), axis=0)
    chosen = tl.minimum(chunk * CHUNK + passed, VOCABULARY - 1)
    tl.store(token_ptr + index, chosen.to(tl.int64))


def draw(
    logits_SV: torch.Tensor, rows_R: torch.Tensor, peaks_S: torch.Tensor, params: DrawParams
) -> torch.Tensor:
    """One token for each of the rows `rows_R`; see `kernels.sampling.draw` for the rules.

    Args:
        logits_SV: [S, V] of any float dtype, rows contiguous.
        rows_R: [R] int64, the rows to draw for.
        peaks_S: [S] float32 of `peaks`.
        params: of these rows; `temperature`, `top_p` and `min_p` share one stride.

    Returns:
        [R] int64, always valid token ids, meaningless where the peak is not finite.
    """
    rows, vocabulary = rows_R.shape[0], logits_SV.shape[1]
    device = logits_SV.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return tokens
    chunks = triton.cdiv(vocabulary, CHUNK)
    bounds = peaks_S
    if params.truncated:
        bounds = torch.empty(rows, dtype=torch.float32, device=device)
        _bound_kernel[(rows,)](
            logits_SV,
            rows_R,
            peaks_S,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            bounds,
            logits_SV.stride(0),
            params.temperature.stride(0),
            params.top_k.stride(0),
            VOCABULARY=vocabulary,
            BLOCK=min(_PASS_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=16,
        )
    masses = torch.empty((rows, chunks), dtype=torch.float64, device=device)
    _chunk_mass_kernel[(chunks, rows)](
        logits_SV,
        rows_R,
        peaks_S,
        params.temperature,
        bounds,
        masses,
        logits_SV.stride(0),
        params.temperature.stride(0),
        chunks,
        TRUNCATED=params.truncated,
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        num_warps=8,
    )
    _pick_kernel[(rows,)](
        logits_SV,
        rows_R,
        peaks_S,
        params.temperature,
        bounds,
        masses,
        params.uniform,
        tokens,
        logits_SV.stride(0),
        params.temperature.stride(0),
        params.uniform.stride(0),
        chunks,
        TINY=_TINY,
        TRUNCATED=params.truncated,
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return tokens
