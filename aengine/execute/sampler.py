"""From logits to tokens, exact under overlap: everything a sample needs is on the device already.

What a step costs is decided on the host, from the slots' feature flags: a greedy batch is one
argmax, and each further feature works on its own rows only. The order follows vLLM: raw
log-probabilities; grammar mask, allowed tokens, bad words, min_tokens, bias; penalties; logits
processors; temperature; top-k, top-p, min-p; the draw. Token counts are updated right after the
draw, on the same stream, so the next sample sees them whether or not the host knows the token.

`sample()` never asks the device for a value, with one exception that its user asked for: a row
with logits processors, which are host code and need the generated tokens.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.errors import GenerationError
from aengine.execute.logprobs import start_host_copy, token_logprobs
from aengine.execute.row_rules import apply_rules, remember, remember_forced, run_processors
from aengine.execute.sampler_state import SamplerFeature, SlotTable
from aengine.kernels import sampling, sampling_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from aengine.batch import ForcedTokens, SlotInit, TokenLogprobs
    from aengine.execute.logprobs import LogprobTensors
    from aengine.kernels.sampling import SamplingKernels
    from aengine.request import Request

    Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]

__all__ = ["Sampled", "SampledCopy", "SampledRows", "Sampler", "SamplerFeature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """A sample on the host. Rows count within the `sample()` call; rows in `errors` failed alone.

    A failed row has a token id too (the next forward may read it), and it means nothing.
    """

    token_ids: Sequence[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, GenerationError]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledCopy:
    """A sample on its way to the host: `read()` it once the stream has passed the copy."""

    token_ids: torch.Tensor
    failed: torch.Tensor | None
    logprob_rows: Sequence[int]
    num_top: Sequence[int]
    logprobs: LogprobTensors | None
    errors: dict[int, GenerationError]
    request_ids: Sequence[str]

    def read(self) -> SampledRows:
        """The host's view. Only valid after the Completion of the stream that copied."""
        errors = dict(self.errors)
        if self.failed is not None:
            for row in self.failed.nonzero().flatten().tolist():
                errors.setdefault(row, no_token(self.request_ids[row]))
        logprobs = {}
        if self.logprobs is not None:
            records = self.logprobs.read(self.num_top)
            pairs = zip(self.logprob_rows, records, strict=True)
            logprobs = {row: record for row, record in pairs if row not in errors}
        return SampledRows(token_ids=self.token_ids.tolist(), logprobs=logprobs, errors=errors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """A sample on the device.

    `token_ids` is [S] int64. `failed` is [S] bool or None: rows whose logits left nothing to choose
    (contradictory masks, or logits that are not numbers). `errors` are what the host knows now.
    """

    token_ids: torch.Tensor
    failed: torch.Tensor | None = None
    logprob_rows: Sequence[int] = ()
    num_top: Sequence[int] = ()
    logprobs: LogprobTensors | None = None
    errors: dict[int, GenerationError] = field(default_factory=dict)
    request_ids: Sequence[str] = ()

    def start_copy(self) -> SampledCopy:
        """Start the copy to the host (pinned memory, no wait; on a CPU nothing is copied)."""
        return SampledCopy(
            token_ids=start_host_copy(self.token_ids),
            failed=None if self.failed is None else start_host_copy(self.failed),
            logprob_rows=self.logprob_rows,
            num_top=self.num_top,
            logprobs=None if self.logprobs is None else self.logprobs.start_copy(),
            errors=self.errors,
            request_ids=self.request_ids,
        )


def no_token(request_id: str) -> GenerationError:
    """The error of a row whose logits left nothing to choose."""
    return GenerationError(
        "no token can be sampled: the constraints of this request together forbid every token, "
        "or the model's logits are not finite",
        request_id=request_id,
    )


class Sampler:
    """Samples the next tokens of the slots. One engine's, used by one stream's worker at a time.

    Args:
        max_num_seqs: number of slots; they are numbered from 1, slot 0 is padding.
        vocab_size: width of the logits.
        device: where logits live.
        kernels: the functions to compute with; by default those made for the device.
    """

    future_map: torch.Tensor
    """[max_num_seqs + 1] int64: the newest token of each slot, gathered by the next forward."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        kernels: SamplingKernels | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.future_map = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self.newest = self.future_map.numpy() if self.device.type == "cpu" else None
        """The same memory as an array, on a CPU."""
        self.table = SlotTable(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=self.device)
        on_cpu = self.device.type == "cpu"
        self._kernels: SamplingKernels = kernels or (sampling_cpu if on_cpu else sampling)

    def admit(self, init: SlotInit) -> None:
        """Give a slot to a sequence: on the sampling stream, before the step that carries it.

        Never raises for bad token ids in the request: its first sample reports the error.
        """
        self.table.admit(init)

    def admit_packed(
        self, inits: Sequence[SlotInit]
    ) -> tuple[list[int], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Give slots away without touching the device.

        For requests without extras and penalties; the caller sees to it that the device's tables
        get what this returns: slots, and their rows of `table.reals` and `table.ints`.
        """
        for init in inits:
            self.table.note(init)
        slots = [init.slot for init in inits]
        return slots, *self.table.host_params(slots)

    def features_of(self, request: Request) -> SamplerFeature:
        """What sampling for a request needs."""
        return self.table.features_of(request)

    def features(self, slots: Ints) -> SamplerFeature:
        """What the rows at these slots use together; 0 means greedy and nothing else."""
        # Lists: an index array would let go of the GIL (see `policy.runs`).
        flags = self.table.flags.tolist()
        return SamplerFeature(functools.reduce(operator.or_, [flags[s] for s in slots.tolist()], 0))

    def force(self, forced: ForcedTokens) -> None:
        """Take note of tokens that a slot was given without a sample: before its next one."""
        self.table.count_forced(forced.slot, forced.token_ids)
        remember_forced(self.table, forced.slot, forced.token_ids)

    def request_ids(self, slots: Ints) -> list[str]:
        """The labels of the requests that have these slots now."""
        labels = self.table.request_ids
        return [labels.get(slot, "") for slot in slots.tolist()]

    def top_logprobs(self, slots: Ints) -> npt.NDArray[np.int64]:
        """[S] how many most likely tokens each slot wants log-probabilities of."""
        return self.table.top_logprobs[slots]

    def wanted_logprobs(self, slots: Ints) -> dict[int, int]:
        """Rows that want log-probabilities, and of how many most likely tokens besides."""
        wanting = np.flatnonzero(self.table.flags[slots] & SamplerFeature.LOGPROBS)
        return dict(zip(wanting.tolist(), self.top_logprobs(slots)[wanting].tolist(), strict=True))

    def sample(
        self,
        logits_SV: torch.Tensor,
        slots: Ints,
        positions: npt.NDArray[np.int64],
        *,
        bitmask: torch.Tensor | None = None,
        bitmask_rows: Ints | None = None,
    ) -> Sampled:
        """Choose one token a row, write it to `future_map` and count it.

        Args:
            logits_SV: [S, vocabulary] float32, contiguous; may be overwritten.
            slots: [S] the rows' slots, distinct.
            positions: [S] index in its sequence of each token to be sampled.
            bitmask: [C, ceil(vocabulary / 32)] int32 on the device: allowed tokens of C rows.
            bitmask_rows: [C] the rows (within S) that `bitmask` is for.
        """
        features = int(np.bitwise_or.reduce(self.table.flags[slots], initial=0))
        if not features and bitmask is None:
            token_ids = self._kernels.argmax(logits_SV)
            self._publish(slots, token_ids)
            return Sampled(token_ids=token_ids)
        masks = None
        if bitmask is not None and bitmask_rows is not None:
            masks = bitmask, bitmask_rows.astype(np.int64)
        return self._sample(logits_SV, slots.astype(np.int64), positions, masks)

    def _sample(
        self,
        logits_SV: torch.Tensor,
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        masks: tuple[torch.Tensor, npt.NDArray[np.int64]] | None,
    ) -> Sampled:
        table, kernels, flags = self.table, self._kernels, self.table.flags[slots]
        penalised = np.flatnonzero(flags & SamplerFeature.PENALTIES)
        special = np.flatnonzero(flags & SamplerFeature.EXTRAS)
        wanting = np.flatnonzero(flags & SamplerFeature.LOGPROBS)
        modified = bool(len(penalised) or len(special) or masks is not None)
        raw_LV = self._select(logits_SV, wanting, copy=modified) if len(wanting) else None

        if masks is not None:
            kernels.apply_bitmask_(logits_SV, masks[0], table.upload(masks[1]))
        for row in special:
            apply_rules(table, int(slots[row]), int(positions[row]), logits_SV[row])
        if len(penalised):
            rows_R, slots_R = table.upload(penalised), table.upload(slots[penalised])
            kernels.penalise_(logits_SV, rows_R, slots_R, table.seen, table.penalty_params(slots_R))
        errors = {}
        for row in special:
            error = run_processors(table, int(slots[row]), logits_SV[row])
            if error is not None:
                errors[int(row)] = error

        token_ids, failed = self._choose(logits_SV, flags, slots, positions, modified)
        self._publish(slots, token_ids)
        if len(penalised):
            kernels.count_(table.seen, slots_R, token_ids.index_select(0, rows_R))
        for row in special:
            remember(table, int(slots[row]), token_ids[row : row + 1])

        num_top = table.top_logprobs[slots[wanting]].tolist()
        logprobs = None
        if raw_LV is not None:
            chosen_L = self._select(token_ids, wanting, copy=False)
            logprobs = token_logprobs(raw_LV, chosen_L, max(num_top))
        return Sampled(
            token_ids=token_ids,
            failed=failed,
            logprob_rows=wanting.tolist(),
            num_top=num_top,
            logprobs=logprobs,
            errors=errors,
            request_ids=self.request_ids(slots),
        )

    def _choose(
        self,
        logits_SV: torch.Tensor,
        flags: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        modified: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids [S], and which rows had nothing to choose from (None: no row can have)."""
        kernels, table = self._kernels, self.table
        random = np.flatnonzero(flags & SamplerFeature.RANDOM)
        failed = peaks_S = None
        if modified or len(random):
            peaks_S = kernels.peaks(logits_SV)
            failed = ~peaks_S.isfinite()
        if peaks_S is None or not len(random):
            return kernels.argmax(logits_SV), failed
        params = table.draw_params(slots[random], positions[random])
        drawn_R = kernels.draw(logits_SV, table.upload(random), peaks_S, params)
        if len(random) == len(slots):
            return drawn_R, failed
        token_ids = kernels.argmax(logits_SV)
        return token_ids.index_copy_(0, table.upload(random), drawn_R), failed

    def _select(
        self, tensor_S: torch.Tensor, rows: npt.NDArray[np.int64], *, copy: bool
    ) -> torch.Tensor:
        """The given rows of a tensor, in memory of their own if `copy`."""
        if len(rows) < tensor_S.shape[0]:
            return tensor_S.index_select(0, self.table.upload(rows))
        return tensor_S.clone() if copy else tensor_S

    def _publish(self, slots: Ints, token_ids: torch.Tensor) -> None:
        if self.newest is not None:
            self.newest[slots] = token_ids.numpy()
        else:
            index = self.table.upload(slots.astype(np.int64))
            self.future_map.index_copy_(0, index, token_ids)
