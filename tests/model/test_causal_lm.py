"""Parts of a forward: layer ranges, dtypes, padding rows, and batches that mix kinds of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aengine.kernels.attention import KVLayer
from aengine.model.attention import TorchBackend
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.registry import decoder_spec
from tests.model.checkpoints import random_checkpoint
from tests.model.steps import make_batch, make_cache

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
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


def cache() -> list[KVLayer]:
    return make_cache(3, 2, 8)


TABLES = [[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [[1], [2], [1, 2], [0, 3]])
def test_ranges_of_layers_equal_the_whole(family: str, cuts: list[int]) -> None:
    model, whole, split = make(family), cache(), cache()
    step = make_batch([(0, 5), (0, 13)], 0, TABLES[:2])
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
    model.forward(make_batch([(0, 12), (0, 6)], 0, TABLES[:2]), layers, backend)
    tables = [[1, 2, 3, 12], [4, 5, 6, 7], [8, 9, 10, 11]]
    logits = model.forward(make_batch([(12, 1), (6, 7), (0, 13)], 1, tables), layers, backend)
    assert (logits - logits[:1]).abs().max() < 1e-4
    assert logits.std() > 0.1  # not trivially equal


def test_padding_rows_leave_real_rows_alone() -> None:
    model, layers = make("Llama"), cache()
    model.forward(make_batch([(0, 9)], 0, TABLES[:1]), layers, TorchBackend())
    padded = [KVLayer(*(tensor.clone() for tensor in layer)) for layer in layers]
    wanted = model.forward(make_batch([(9, 1)], 1, TABLES[:1]), layers, TorchBackend())
    step = make_batch([(9, 1), (0, 1), (0, 1)], 3, [TABLES[0], [0] * 4, [0] * 4])
    step.context_lens[1:] = 0
    found = model.forward(step, padded, TorchBackend())
    assert (found[:1] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    step = make_batch([(0, 9)], 0, TABLES[:1])
    wanted = make("Llama").forward(step, cache(), TorchBackend())
    found = make("Llama", dtype).forward(step, cache(), TorchBackend())
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
