"""Parts of a forward: layer ranges, dtypes, padding rows, and batches that mix kinds of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aengine.kernels.attention import KVLayer
from aengine.model.attention import TorchBackend
from aengine.model.batch import ForwardBatch
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.registry import decoder_spec
from tests.model.checkpoints import random_checkpoint

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BLOCK = 4
FAMILIES = ["Llama", "Gemma2", "Olmo2", "SmolLM3"]


def make(family: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    raw: dict[str, Any] = {**SIZES, "architectures": [f"{family}ForCausalLM"], "sliding_window": 8}
    spec = decoder_spec(ModelConfig.from_hf(raw), 64)
    return CausalLM(
        spec,
        random_checkpoint(spec, std=0.2),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=64,
    )


def cache(blocks: int = 13) -> list[KVLayer]:
    shape = (blocks, BLOCK, 2, 8)
    return [KVLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(3)]


def batch(rows: list[tuple[int, int]], num_decode: int, tables: list[list[int]]) -> ForwardBatch:
    """Rows of (start, length); token ids follow from row and position."""
    table = torch.tensor(tables, dtype=torch.int32)
    positions = [start + i for start, length in rows for i in range(length)]
    owners = [row for row, (_, length) in enumerate(rows) for _ in range(length)]
    pairs = list(zip(owners, positions, strict=True))
    slots = [int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in pairs]
    lengths = torch.tensor([0, *(length for _, length in rows)])
    context = [start + length for start, length in rows]
    return ForwardBatch(
        token_ids=torch.tensor([(17 * p + 5) % 50 for p in positions]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=lengths.cumsum(0).int(),
        context_lens=torch.tensor(context, dtype=torch.int32),
        block_tables=table,
        logit_index=lengths.cumsum(0)[1:] - 1,
        num_decode=num_decode,
        max_query_len=max(length for _, length in rows),
        max_context_len=max(context),
    )


TABLES = [[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [[1], [2], [1, 2], [0, 3]])
def test_ranges_of_layers_equal_the_whole(family: str, cuts: list[int]) -> None:
    model, whole, split = make(family), cache(), cache()
    step = batch([(0, 5), (0, 13)], 0, TABLES[:2])
    wanted = model.forward(step, whole, TorchBackend())
    hidden, backend = model.embed(step), TorchBackend()
    for start, stop in zip([0, *cuts], [*cuts, model.num_layers], strict=True):
        hidden = model.run_layers(hidden, start, stop, step, split, backend)
    assert torch.equal(model.logits(hidden, step.logit_index), wanted)
    assert all(
        torch.equal(a.k, b.k) and torch.equal(a.v, b.v) for a, b in zip(whole, split, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_rows_beside_prefill_rows(family: str) -> None:
    """Every row of the last position 12: one decodes, one ends a chunked prompt, one comes whole.
    They hold the same tokens, so their logits are the same."""
    model, layers, backend = make(family), cache(), TorchBackend()
    model.forward(batch([(0, 12), (0, 6)], 0, TABLES[:2]), layers, backend)
    tables = [[1, 2, 3, 12], [4, 5, 6, 7], [8, 9, 10, 11]]
    logits = model.forward(batch([(12, 1), (6, 7), (0, 13)], 1, tables), layers, backend)
    assert (logits - logits[:1]).abs().max() < 1e-4
    assert logits.std() > 0.1  # not trivially equal


def test_padding_rows_leave_real_rows_alone() -> None:
    model, layers = make("Llama"), cache()
    model.forward(batch([(0, 9)], 0, TABLES[:1]), layers, TorchBackend())
    padded = [KVLayer(*(tensor.clone() for tensor in layer)) for layer in layers]
    wanted = model.forward(batch([(9, 1)], 1, TABLES[:1]), layers, TorchBackend())
    step = batch([(9, 1), (0, 1), (0, 1)], 3, [TABLES[0], [0] * 4, [0] * 4])
    step.context_lens[1:] = 0
    found = model.forward(step, padded, TorchBackend())
    assert (found[:1] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    step = batch([(0, 9)], 0, TABLES[:1])
    wanted = make("Llama").forward(step, cache(), TorchBackend())
    found = make("Llama", dtype).forward(step, cache(), TorchBackend())
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
