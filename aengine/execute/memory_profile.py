"""What a model takes besides its KV cache: weights, the largest step, captured graphs.

On a GPU the largest step is run once, on padding, and torch's allocator says what it took; on a CPU
nobody counts, and the size is computed from the network's shape.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aengine.batch import SlotInit
from aengine.errors import OutOfMemoryError
from aengine.execute.graph_shapes import coarse_chunk_sizes, decode_sizes, riding_sizes
from aengine.model.batch import ForwardBatch
from aengine.policy.planning import MOST_LOGPROB_POSITIONS
from aengine.request import MAX_LOGPROBS, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.config import SchedulerConfig
    from aengine.execute.memory import MemorySource
    from aengine.execute.runner import Forward
    from aengine.execute.sampler import Sampler
    from aengine.model.config import ModelConfig

GRAPH_BYTES = 2 << 20
"""Estimate of what the driver keeps of one captured graph; what capturing took is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes. `free` is what can be taken with the weights loaded and nothing else there."""

    weights: int
    activations: int
    """Of the largest step, sampling included."""
    graphs: int
    """Reserved for captured graphs."""
    free: int
    default_fraction: float = 0.25
    """Share of `left` that KV blocks take by default."""

    @property
    def left(self) -> int:
        """What can be given to KV blocks."""
        return max(0, self.free - self.activations - self.graphs)


def measure(
    config: SchedulerConfig,
    shape: ModelConfig,
    weight_bytes: int,
    memory: MemorySource,
    make: Callable[[], tuple[Forward, Sampler]],
    *,
    graphs: int,
    longest: int,
    itemsize: int,
    device: torch.device,
) -> MemoryProfile:
    """Find out what there is and what the largest step takes.

    Args:
        config: bounds of a step.
        shape: the network's.
        weight_bytes: of the loaded weights.
        memory: where they are.
        make: the model with a cache of the padding block only, and a sampler, to be thrown away.
        graphs: pairs of lanes whose steps will be captured.
        longest: longest context, tokens.
        itemsize: bytes of an activation.
        device: the model's.

    Raises:
        OutOfMemoryError: the largest step does not fit; the hint is a `max_num_batched_tokens`
            with which it does.
    """
    tokens = config.max_num_batched_tokens
    bounds = {
        "rows": config.max_num_seqs,
        "longest": longest,
        "block_size": config.tokens_per_block,
    }
    work = partial(_build_and_run, make, **bounds, device=device)
    activations = None
    try:
        activations = memory.peak_of(partial(work, tokens=tokens))
        fits = True
    except torch.OutOfMemoryError:
        fits = False  # what the error holds on to is given back before anything else is tried
    if not fits:
        raise _too_large(config, weight_bytes, memory, work)
    if activations is None:
        activations = computed_activations(config, shape, itemsize=itemsize)
    return MemoryProfile(
        weights=weight_bytes,
        activations=activations,
        graphs=graphs * graph_reserve(config, activations),
        free=memory.free(),
        default_fraction=memory.default_fraction,
    )


def _too_large(
    config: SchedulerConfig,
    weight_bytes: int,
    memory: MemorySource,
    work: Callable[..., None],
) -> OutOfMemoryError:
    """The error of a step that does not fit, with the largest half, quarter, ... that does."""
    free, tokens = memory.free(), config.max_num_batched_tokens
    hint = ""
    while not hint and (tokens := tokens // 2) >= config.max_num_seqs:
        try:
            memory.peak_of(partial(work, tokens=tokens))
            hint = f"max_num_batched_tokens={tokens}"
        except torch.OutOfMemoryError:
            continue
    advice = hint or "a smaller max_num_seqs, or a smaller model"
    return OutOfMemoryError(
        f"a step of max_num_batched_tokens={config.max_num_batched_tokens} does not fit: "
        f"{free / 2**20:.0f} MiB are free beside the weights ({weight_bytes / 2**20:.0f} MiB); "
        f"use {advice}",
        breakdown={"weights": weight_bytes, "activations": free, "free": free},
        hint=hint,
    )


def graph_reserve(config: SchedulerConfig, activations: int) -> int:
    """What the captured graphs of a pair of lanes are expected to take.

    The graphs of a lane run one after the other and share a pool, which holds the largest step
    once, beside the memory of the steps that are launched without a graph. The driver keeps some
    more for each.
    """
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    mixed = len(coarse_chunk_sizes(tokens)) * len(riding_sizes(rows))
    return activations + GRAPH_BYTES * (mixed + 2 * len(decode_sizes(rows)))


def computed_activations(config: SchedulerConfig, shape: ModelConfig, *, itemsize: int) -> int:
    """The largest step's tensors, from the network's shape.

    A layer's widest moment is its stream (what comes in, what is added, both normalised), the heads
    and the MLP's two inner vectors and their product, or the logits (those of prompt positions too)
    with two copies for sampling.
    """
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = tokens * (4 * shape.hidden_size + heads + 3 * shape.intermediate_size) * itemsize
    logits = (3 * rows + min(tokens, MOST_LOGPROB_POSITIONS)) * shape.vocab_size * 4
    return max(layer, tokens * shape.hidden_size * itemsize + logits)


def _build_and_run(make: Callable[[], tuple[Forward, Sampler]], **step: Any) -> None:
    run_largest_step(*make(), **step)


@torch.inference_mode()
def run_largest_step(
    forward: Forward,
    sampler: Sampler,
    *,
    tokens: int,
    rows: int,
    longest: int,
    block_size: int,
    device: torch.device,
) -> None:
    """Run the step that takes most: all rows sample, with everything that samples can want, and
    the rest of its tokens are prompt, of which as many as can be want log-probabilities.

    Everything is padding: it reads and writes block 0.

    Args:
        forward: the model with a KV cache.
        sampler: with as many slots as `rows`; its slots are written to.
        tokens: of the step, at least `rows`.
        rows: that sample.
        longest: longest context, tokens.
        block_size: tokens per block.
        device: the model's.
    """
    for slot in range(1, rows + 1):
        sampler.admit(SlotInit(slot=slot, request=_demanding(slot)))
    batch = padding_batch(
        tokens=tokens, rows=rows, longest=longest, block_size=block_size, device=device
    )
    logits = forward(batch)[:rows]
    slots = np.arange(1, rows + 1, dtype=np.int32)
    sampler.sample(logits, slots, np.ones(rows, dtype=np.int64))


def padding_batch(
    *, tokens: int, rows: int, longest: int, block_size: int, device: torch.device
) -> ForwardBatch:
    """`rows - 1` decode rows, and prompts of at most `longest` tokens for the rest of the step."""
    lengths = [1] * (rows - 1)
    left = tokens - len(lengths)
    while left > 0:
        lengths.append(min(left, longest))
        left -= lengths[-1]
    widest = lengths[-1] if len(lengths) == rows else longest
    starts = [0, *itertools.accumulate(lengths)]
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    wanted = rows + min(tokens - rows, MOST_LOGPROB_POSITIONS)
    return ForwardBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.zeros(
            len(lengths), -(-widest // block_size), dtype=torch.int32, device=device
        ),
        logit_index=torch.arange(wanted, device=device),
        num_decode=rows - 1,
        max_query_len=widest,
        max_context_len=widest,
    )


def _demanding(seq_id: int) -> Request:
    """A request that samples with all that costs memory."""
    params = SamplingParams(
        temperature=1.0, top_p=0.9, presence_penalty=0.5, seed=seq_id, logprobs=MAX_LOGPROBS
    )
    return Request(
        seq_id=seq_id, request_id="profile", prompt_token_ids=(0,), params=params, max_tokens=1
    )
