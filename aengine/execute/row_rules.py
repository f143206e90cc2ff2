"""The rare sampling rules, one row at a time: masks, bias, bad words, min_tokens, processors.

Each function gets one row of logits and changes it in place. Only rows that use such a rule come
here. Logits processors are the user's code: whatever they raise or return ends their row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.execute.sampler_state import Extras, SlotTable
    from aengine.request import LogitsProcessor

_LARGEST = torch.finfo(torch.float32).max


def apply_rules(table: SlotTable, slot: int, position: int, logits_V: torch.Tensor) -> None:
    """Allowed tokens, bad words, min_tokens and bias of the slot that samples at `position`."""
    extras = table.extras[slot]
    if extras.allowed is not None:
        kept = logits_V.index_select(0, extras.allowed)
        logits_V.fill_(-torch.inf).index_copy_(0, extras.allowed, kept)
    if extras.banned is not None:
        logits_V.index_fill_(0, extras.banned, -torch.inf)
    if extras.sequences is not None:
        extras.sequences.ban_(logits_V)
    generated = position - table.prompt_lens[slot]
    if extras.end_tokens is not None and generated < table.min_tokens[slot]:
        logits_V.index_fill_(0, extras.end_tokens, -torch.inf)
    if extras.bias is not None:
        logits_V.index_add_(0, *extras.bias)


def run_processors(table: SlotTable, slot: int, logits_V: torch.Tensor) -> GenerationError | None:
    """Let the slot's processors change the row; the error that ends the row, if there is one."""
    extras = table.extras[slot]
    if extras.error is not None:
        return extras.error
    if not extras.processors:
        return None
    if extras.unread is not None:
        extras.history.append(int(extras.unread))
        extras.unread = None
    # A processor may keep what it is given: it gets a copy, never the batch's own memory.
    result = logits_V.clone()
    for processor in extras.processors:
        try:
            result = _call(processor, extras, result)
        except Exception as cause:
            error = GenerationError(
                f"the logits processor {_name(processor)} failed: {type(cause).__name__}: {cause}",
                request_id=table.request_ids[slot],
            )
            error.__cause__ = cause
            return error
    logits_V.copy_(result.clamp(max=_LARGEST))
    return None


def _call(processor: LogitsProcessor, extras: Extras, logits_V: torch.Tensor) -> torch.Tensor:
    result = processor(tuple(extras.history), logits_V)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"it returned {type(result).__name__}, not a tensor of logits")
    if result.shape != logits_V.shape:
        raise ValueError(
            f"it returned the shape {tuple(result.shape)}, not {tuple(logits_V.shape)}"
        )
    if result.isnan().any():
        raise ValueError("it returned logits that are not numbers (NaN)")
    return result.detach().to(logits_V)


def _name(processor: LogitsProcessor) -> str:
    return getattr(processor, "__qualname__", type(processor).__qualname__)


def remember_forced(table: SlotTable, slot: int, token_ids: Sequence[int]) -> None:
    """Note tokens that the slot was given without a sample."""
    extras = table.extras.get(slot)
    if extras is None:
        return
    if extras.sequences is not None:
        for token in token_ids:
            extras.sequences.push(table.upload(np.array([token], dtype=np.int64)))
    if extras.processors:
        if extras.unread is not None:
            extras.history.append(int(extras.unread))
            extras.unread = None
        extras.history.extend(token_ids)


def remember(table: SlotTable, slot: int, token_1: torch.Tensor) -> None:
    """Note the token that the slot has just been given, without looking at it."""
    extras = table.extras[slot]
    if extras.sequences is not None:
        extras.sequences.push(token_1)
    if extras.processors:
        extras.unread = token_1
