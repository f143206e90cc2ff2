"""What changes logits before the draw, on the GPU: bitmask, penalties, counts; and row maxima.

Twin: `kernels.sampling`. A vocabulary is cut into chunks, so that a single row fills part of the
device too; rows never meet, and a row's numbers are the same alone and in any batch.

Shape legend as in the twin; J chunks of a row.
"""

# Kernels are untyped by nature: their arguments are pointers when compiled, tensors when called.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from aengine.kernels.sampling import PenaltyParams

CHUNK = 4096
"""Tokens that one program looks at."""


class Peaks(NamedTuple):
    """The largest logit of each row and the first token that has it."""

    values_S: torch.Tensor
    token_ids_S: torch.Tensor


@triton.jit
def _chunk_peak_kernel(
    logits_ptr,
    peak_ptr,
    token_ptr,
    row_stride,
    chunks,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    logits = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    # A row with NaN cannot be sampled: its peak must not be finite.
    logits = tl.where(logits == logits, logits, float("inf"))
    peak = tl.max(logits, axis=0)
    first = tl.min(tl.where((logits == peak) & inside, token, VOCABULARY), axis=0)
    tl.store(peak_ptr + row * chunks + chunk, peak)
    tl.store(token_ptr + row * chunks + chunk, first)


@triton.jit
def _row_peak_kernel(
    chunk_peak_ptr, chunk_token_ptr, peak_ptr, token_ptr, chunks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < chunks
    here = row * chunks + chunk
    peaks = tl.load(chunk_peak_ptr + here, mask=inside, other=float("-inf"))
    tokens = tl.load(chunk_token_ptr + here, mask=inside, other=2147483647)
    peak = tl.max(peaks, axis=0)
    first = tl.min(tl.where((peaks == peak) & inside, tokens, 2147483647), axis=0)
    tl.store(peak_ptr + row, peak)
    tl.store(token_ptr + row, first.to(tl.int64))


@triton.jit
def _bitmask_kernel(
    logits_ptr,
    mask_ptr,
    rows_ptr,
    row_stride,
    mask_stride,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    words = tl.load(mask_ptr + index * mask_stride + token // 32, mask=inside, other=0)
    forbidden = ((words >> (token % 32)) & 1) == 0
    nothing = tl.full([CHUNK], float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + token, nothing, mask=inside & forbidden)


@triton.jit
def _penalise_kernel(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    seen_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    row_stride,
    parameter_stride,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    slot = tl.load(slots_ptr + index).to(tl.int64)
    repetition = tl.load(repetition_ptr + index * parameter_stride).to(tl.float32)
    presence = tl.load(presence_ptr + index * parameter_stride).to(tl.float32)
    frequency = tl.load(frequency_ptr + index * parameter_stride).to(tl.float32)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = token < VOCABULARY
    seen = tl.load(seen_ptr + slot * VOCABULARY + token, mask=inside, other=0)
    touched = inside & (seen != 0)
    here = logits_ptr + row * row_stride + token
    logits = tl.load(here, mask=touched, other=0.0).to(tl.float32)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    count = (seen >> 1).to(tl.float32)
    logits = logits - count * frequency - tl.where(count > 0, presence, 0.0)
    tl.store(here, logits.to(logits_ptr.dtype.element_ty), mask=touched)


@triton.jit(do_not_specialize=["rows"])
def _count_kernel(
    seen_ptr, slots_ptr, token_ptr, rows, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0).to(tl.int64)
    token = tl.load(token_ptr + row, mask=inside, other=0).to(tl.int64)
    tl.atomic_add(seen_ptr + slot * VOCABULARY + token, 2, mask=inside)


def row_peaks(logits_SV: torch.Tensor) -> Peaks:
    """Values and first tokens of the row maxima, in one reading of the logits.

    Args:
        logits_SV: [S, V] of any float dtype, rows contiguous.

    Returns:
        [S] float32, not finite where the row cannot be sampled, and [S] int64.
    """
    rows, vocabulary = logits_SV.shape
    device = logits_SV.device
    values = torch.empty(rows, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return Peaks(values, tokens)
    chunks = triton.cdiv(vocabulary, CHUNK)
    chunk_values = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    chunk_tokens = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    _chunk_peak_kernel[(chunks, rows)](
        logits_SV,
        chunk_values,
        chunk_tokens,
        logits_SV.stride(0),
        chunks,
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        num_warps=8,
    )
    block = triton.next_power_of_2(chunks)
    _row_peak_kernel[(rows,)](
        chunk_values, chunk_tokens, values, tokens, chunks, BLOCK=block, num_warps=1
    )
    return Peaks(values, tokens)


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    """The first most likely token of each row, [S] int64."""
    return row_peaks(logits_SV).token_ids_S


def peaks(logits_SV: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, [S] float32; not finite where the row cannot be sampled."""
    return row_peaks(logits_SV).values_S


def apply_bitmask_(logits_SV: torch.Tensor, bitmask_CW: torch.Tensor, rows_C: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place, in rows `rows_C` (int64).

    Bit t % 32 of word t // 32 (int32, little end first) says whether token t is allowed.
    """
    if rows_C.shape[0] == 0:
        return
    vocabulary = logits_SV.shape[1]
    _bitmask_kernel[(triton.cdiv(vocabulary, CHUNK), rows_C.shape[0])](
        logits_SV,
        bitmask_CW,
        rows_C,
        logits_SV.stride(0),
        bitmask_CW.stride(0),
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        num_warps=8,
    )


def penalise_(
    logits_SV: torch.Tensor,
    rows_R: torch.Tensor,
    slots_R: torch.Tensor,
    seen_NV: torch.Tensor,
    params: PenaltyParams,
) -> None:
    """Apply repetition, presence and frequency penalties in place; see `sampling.penalise_`.

    The three tensors of `params` share one stride.
    """
    if rows_R.shape[0] == 0:
        return
    vocabulary = logits_SV.shape[1]
    _penalise_kernel[(triton.cdiv(vocabulary, CHUNK), rows_R.shape[0])](
        logits_SV,
        rows_R,
        slots_R,
        seen_NV,
        params.repetition,
        params.presence,
        params.frequency,
        logits_SV.stride(0),
        params.repetition.stride(0),
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        num_warps=8,
    )


def count_(seen_NV: torch.Tensor, slots_R: torch.Tensor, token_ids_R: torch.Tensor) -> None:
    """Count one more generated token of each slot, in place; see `sampling.penalise_`."""
    rows = slots_R.shape[0]
    if rows == 0:
        return
    _count_kernel[(triton.cdiv(rows, 128),)](
        seen_NV, slots_R, token_ids_R, rows, VOCABULARY=seen_NV.shape[1], BLOCK=128, num_warps=1
    )
