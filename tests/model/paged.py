"""Runs a `CausalLM` on sequences through the paged cache, the way an engine's steps would."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.batch import StepPlan
from aengine.execute.inputs import InputBuilder
from aengine.execute.kv_cache import KVCacheSpec
from aengine.model.attention import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.model.causal_lm import CausalLM

BLOCK = 4


def run(
    model: CausalLM,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[int],
    kv_dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Logits [length, V] of every position of every sequence.

    Args:
        model: on the CPU, float32.
        sequences: token ids.
        chunks: how many tokens each step computes of each sequence, repeated at its end.
        kv_dtype: of keys and values.
    """
    whole = KVCacheSpec.of(model.config, block_size=BLOCK, dtype=kv_dtype)
    cache = replace(whole, num_kv_heads=model.num_kv_heads)
    per_sequence = -(-max(map(len, sequences)) // BLOCK)
    layers = cache.allocate(per_sequence * len(sequences), torch.device("cpu"))
    # Blocks interleave, so that a row that reads another's block is seen.
    blocks = 1 + np.arange(per_sequence * len(sequences)).reshape(per_sequence, -1).T
    done = [0] * len(sequences)
    out: list[list[torch.Tensor]] = [[] for _ in sequences]
    step = 0
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        size = chunks[min(step, len(chunks) - 1)]
        step += 1
        rows = [i for i, s in enumerate(sequences) if done[i] < len(s)]
        spans = [(done[i], min(size, len(sequences[i]) - done[i])) for i in rows]
        tokens = [t for i, (a, n) in zip(rows, spans, strict=True) for t in sequences[i][a : a + n]]
        plan = StepPlan(
            step_id=step,
            num_decode=0,
            seq_ids=rows,
            slots=np.array(rows, dtype=np.int32) + 1,
            starts=np.array([a for a, _ in spans], dtype=np.int32),
            lengths=np.array([n for _, n in spans], dtype=np.int32),
            prefill_token_ids=np.array(tokens, dtype=np.int32),
            block_tables=blocks[rows].astype(np.int32),
            num_blocks=np.full(len(rows), per_sequence, dtype=np.int32),
            samples=np.zeros(len(rows), dtype=np.bool_),
            prompt_logprob_rows=range(len(rows)),
        )
        builder = InputBuilder(block_size=BLOCK, device=torch.device("cpu"))
        batch = builder.build(plan, torch.zeros(9, dtype=torch.int64))
        with torch.inference_mode():
            logits = model.forward(batch, layers, TorchBackend())
        for i, (_, n) in zip(rows, spans, strict=True):
            out[i].append(logits[:n])
            logits = logits[n:]
            done[i] += n
    return [torch.cat(parts) for parts in out]
