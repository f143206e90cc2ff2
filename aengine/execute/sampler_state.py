"""What the sampler remembers of each slot: parameters, seen tokens, and the rare extras.

Parameters exist twice: as numpy arrays that decide on the host which work a step needs, and as
tensors of fixed address that the device reads (the same memory on a CPU). They are written by
`admit`, in stream order before the first forward of the slot's new owner, so no step in flight can
see them change (law 4).
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.errors import GenerationError, InvalidRequestError
from aengine.kernels.sampling import DrawParams, PenaltyParams, counter_uniform, mix64

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from aengine.batch import SlotInit
    from aengine.request import LogitsProcessor, Request, SamplingParams

_INT64 = 2**64
_COLDEST = 1e-30
"""Colder is the same: only equals of the best remain. Much less would be 0 in float32."""


class SamplerFeature(enum.IntFlag):
    """What a slot's sampling needs beyond the argmax of its logits."""

    RANDOM = enum.auto()
    TRUNCATED = enum.auto()
    PENALTIES = enum.auto()
    LOGPROBS = enum.auto()
    EXTRAS = enum.auto()
    """Bias, allowed tokens, bad words, min_tokens, processors: handled row by row."""

    MODIFIES = PENALTIES | EXTRAS
    """The features that change logits before the draw."""


@dataclass(slots=True, kw_only=True, eq=False)
class BadSequences:
    """Bad words of two or more tokens, right-aligned to the longest prefix (L tokens).

    `recent` holds the slot's last L generated tokens and lives on the device, because under
    overlap the host does not know the newest one yet.
    """

    prefix_WL: torch.Tensor
    relevant_WL: torch.Tensor
    last_W: torch.Tensor
    recent_L: torch.Tensor

    def ban_(self, logits_V: torch.Tensor) -> None:
        """Forbid the last token of each word whose other tokens have just been generated."""
        matches_W = ((self.recent_L == self.prefix_WL) | ~self.relevant_WL).all(dim=1)
        logits_V.index_add_(0, self.last_W, torch.where(matches_W, -torch.inf, 0.0))

    def push(self, token_1: torch.Tensor) -> None:
        self.recent_L = torch.cat([self.recent_L[1:], token_1])


@dataclass(slots=True, kw_only=True, eq=False)
class Extras:
    """The per-row features of one slot, as device tensors made once at admission."""

    error: GenerationError | None = None
    allowed: torch.Tensor | None = None
    banned: torch.Tensor | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    end_tokens: torch.Tensor | None = None
    sequences: BadSequences | None = None
    processors: Sequence[LogitsProcessor] = ()
    history: list[int] = field(default_factory=list)
    unread: torch.Tensor | None = None
    """The newest generated token, still on the device, missing from `history`."""


class SlotTable:
    """The sampling state of all slots (1 .. max_num_seqs; 0 is the padding row).

    Args:
        max_num_seqs: number of slots.
        vocab_size: width of the logits.
        device: where the tensors live.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        size = max_num_seqs + 1
        self.vocab_size = vocab_size
        self.device = device
        self.flags = np.zeros(size, dtype=np.int32)
        self.prompt_lens = np.zeros(size, dtype=np.int64)
        self.min_tokens = np.zeros(size, dtype=np.int64)
        self.top_logprobs = np.zeros(size, dtype=np.int64)
        self.extras: dict[int, Extras] = {}
        self.request_ids: dict[int, str] = {}
        self._reals = np.zeros((size, 6), dtype=np.float64)
        self._ints = np.zeros((size, 2), dtype=np.int64)
        self.reals = self.upload(self._reals)
        """[slots, 6] float64: temperature, top_p, min_p, repetition, presence, frequency."""
        self.ints = self.upload(self._ints)
        """[slots, 2] int64: random key, top_k (0: off)."""
        self._seen: torch.Tensor | None = None

    @property
    def seen(self) -> torch.Tensor:
        """[slots, vocabulary] int32 token counts for penalties, made when first needed."""
        if self._seen is None:
            shape = (len(self.flags), self.vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return self._seen

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """The array on the device. Shares memory on a CPU; elsewhere a copy that never waits."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def admit(self, init: SlotInit) -> None:
        """Make `init.slot` the slot of `init.request`."""
        slot, params = init.slot, init.request.params
        self.note(init)
        if self.device.type != "cpu":
            self.reals[slot].copy_(self.upload(self._reals[slot]), non_blocking=True)
            self.ints[slot].copy_(self.upload(self._ints[slot]), non_blocking=True)
        extras = self._extras(init)
        if extras is not None:
            self.extras[slot] = extras
        if params.uses_counts:
            self._recount(slot, init.request.prompt_token_ids, init.output_token_ids)

    def note(self, init: SlotInit) -> None:
        """The host's part of `admit`, which is all that a row without extras and counts needs if
        the device gets the slot's parameters (`host_params`) in another way."""
        slot, request, params = init.slot, init.request, init.request.params
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        self.prompt_lens[slot] = len(request.prompt_token_ids)
        self.min_tokens[slot] = params.min_tokens
        self.top_logprobs[slot] = params.logprobs or 0
        self._reals[slot] = (
            0.0 if _is_greedy(params) else max(params.temperature, _COLDEST),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._ints[slot] = (stream_key(seed, request.index), self._top_k(params))
        self.request_ids[slot] = request.request_id
        self.extras.pop(slot, None)
        self.flags[slot] = self.features_of(request)

    def host_params(
        self, slots: Sequence[int]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Rows of `reals` and `ints` for these slots."""
        index = np.array(slots, dtype=np.int64)
        return self._reals[index], self._ints[index]

    def features_of(self, request: Request) -> SamplerFeature:
        """What a request's sampling needs."""
        params = request.params
        truncated = bool(self._top_k(params)) or params.top_p < 1.0 or params.min_p > 0.0
        flags = SamplerFeature(0)
        if not _is_greedy(params):
            flags |= SamplerFeature.RANDOM
            flags |= SamplerFeature.TRUNCATED if truncated else 0
        flags |= SamplerFeature.PENALTIES if params.uses_counts else 0
        flags |= SamplerFeature.LOGPROBS if params.logprobs is not None else 0
        flags |= SamplerFeature.EXTRAS if _has_extras(request) else 0
        return flags

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if params.top_k < self.vocab_size else 0

    def draw_params(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> DrawParams:
        """Parameters of the random rows at `slots`, which sample the tokens at `positions`."""
        truncated = (self.flags[slots] & SamplerFeature.TRUNCATED) != 0
        top_k = self._ints[slots, 1]
        bounded = bool((top_k[truncated] > 0).all())
        index = self.upload(slots)
        reals, ints = self.reals.index_select(0, index), self.ints.index_select(0, index)
        return DrawParams(
            uniform=self.upload(counter_uniform(self._ints[slots, 0], positions)),
            temperature=reals[:, 0],
            top_p=reals[:, 1],
            min_p=reals[:, 2],
            top_k=ints[:, 1],
            truncated=bool(truncated.any()),
            largest_top_k=int(top_k.max(initial=1)) if bounded else None,
        )

    def penalty_params(self, slots_R: torch.Tensor) -> PenaltyParams:
        """Penalties of the rows at `slots_R`."""
        reals = self.reals.index_select(0, slots_R)
        return PenaltyParams(repetition=reals[:, 3], presence=reals[:, 4], frequency=reals[:, 5])

    def _recount(self, slot: int, prompt: Iterable[int], outputs: Iterable[int]) -> None:
        row = self.seen[slot]
        row.zero_()
        row.index_fill_(0, self._ids(prompt), 1)
        generated = self._ids(outputs)
        row.index_add_(0, generated, torch.full_like(generated, 2, dtype=row.dtype))

    def count_forced(self, slot: int, token_ids: Sequence[int]) -> None:
        """Count tokens that the slot was given without a sample, if it counts."""
        if self.flags[slot] & SamplerFeature.PENALTIES:
            ids = self._ids(token_ids)
            self.seen[slot].index_add_(0, ids, torch.full_like(ids, 2, dtype=self.seen.dtype))

    def _ids(self, tokens: Iterable[int]) -> torch.Tensor:
        ids = np.array([t for t in tokens if t < self.vocab_size], dtype=np.int64)
        return self.upload(ids)

    def _extras(self, init: SlotInit) -> Extras | None:
        request, params = init.request, init.request.params
        if not _has_extras(request):
            return None
        ends, words = _end_tokens(request), request.bad_word_token_ids
        extras = Extras(processors=params.logits_processors, history=list(init.output_token_ids))
        try:
            check_vocabulary(params, self.vocab_size)
        except InvalidRequestError as error:
            extras.error = GenerationError(str(error), request_id=request.request_id)
            return extras
        if params.allowed_token_ids is not None:
            extras.allowed = self._ids(dict.fromkeys(params.allowed_token_ids))
        if params.logit_bias:
            values = np.array(list(params.logit_bias.values()), dtype=np.float32)
            extras.bias = self._ids(params.logit_bias), self.upload(values)
        if params.min_tokens and ends:
            extras.end_tokens = self._ids(sorted(ends))
        single = [word[0] for word in words if len(word) == 1]
        if single:
            extras.banned = self._ids(single)
        longer = [word for word in words if len(word) > 1 and max(word) < self.vocab_size]
        if longer:
            extras.sequences = self._sequences(longer, init.output_token_ids)
        return extras

    def _sequences(self, words: Sequence[Sequence[int]], outputs: Sequence[int]) -> BadSequences:
        length = max(map(len, words)) - 1
        prefix = np.zeros((len(words), length), dtype=np.int64)
        relevant = np.zeros((len(words), length), dtype=bool)
        for i, word in enumerate(words):
            prefix[i, length + 1 - len(word) :] = word[:-1]
            relevant[i, length + 1 - len(word) :] = True
        # No token has the id `vocab_size`: it stands for "nothing generated yet".
        recent = np.full(length, self.vocab_size, dtype=np.int64)
        newest = outputs[-length:]
        recent[length - len(newest) :] = newest
        return BadSequences(
            prefix_WL=self.upload(prefix),
            relevant_WL=self.upload(relevant),
            last_W=self._ids(word[-1] for word in words),
            recent_L=self.upload(recent),
        )


def _is_greedy(params: SamplingParams) -> bool:
    return params.greedy or params.top_k == 1


def _end_tokens(request: Request) -> frozenset[int]:
    ends = frozenset(request.params.stop_token_ids)
    return ends if request.params.ignore_eos else ends | request.end_token_ids


def _has_extras(request: Request) -> bool:
    params = request.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or request.bad_word_token_ids
        or (params.min_tokens and _end_tokens(request))
        or params.logits_processors
    )


def stream_key(seed: int, index: int) -> int:
    """The random key of completion `index` of a request with this seed, as a signed 64-bit int."""
    pair = np.array([seed % _INT64, index], dtype=np.uint64).view(np.int64)
    return int(mix64(mix64(pair[:1]) + pair[1:])[0])


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Check token ids in the parameters against the model, which they cannot know by themselves.

    Raises:
        InvalidRequestError: an id in allowed_token_ids or logit_bias is not in the vocabulary.
    """
    for name in ("allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise InvalidRequestError(
                    f"{name} holds the token id {token}; the vocabulary has {vocab_size} tokens",
                    param=name,
                    value=token,
                )
