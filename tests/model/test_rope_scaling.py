"""Inverse frequencies equal transformers' for every scaling variant, and bad ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aengine.errors import ModelLoadError
from aengine.model.rope_scaling import rope_frequencies

DIM = 32
MAX = 4096
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + 0.5 * i for i in range(DIM // 2)],
}

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 0.8,
        "original_max_position_embeddings": 2048,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        **FACTORS,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "factor": 3.0,
        "attention_factor": 1.4,
        "original_max_position_embeddings": 1024,
        **FACTORS,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def ours(scaling: dict[str, Any], length: int = MAX) -> Any:
    return rope_frequencies(
        500_000.0, DIM, scaling, max_position_embeddings=MAX, max_model_len=length
    )


@pytest.mark.parametrize("length", [512, MAX, 3 * MAX])
@pytest.mark.parametrize("name", VARIANTS)
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    """For an engine that serves `length`: what transformers uses for a prompt of that length."""
    scaling = VARIANTS[name]
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX,
        rope_parameters={"rope_theta": 500_000.0, **scaling},
    )
    kind = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    inv_freq, scale = kind(config, torch.device("cpu"), seq_len=length)
    got = ours(scaling, length)
    assert got.inv_freq.dtype == torch.float32
    torch.testing.assert_close(got.inv_freq, inv_freq, rtol=2e-6, atol=0)
    assert got.scale == pytest.approx(scale)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {}])
def test_plain_is_a_geometric_series(scaling: dict[str, Any] | None) -> None:
    got = rope_frequencies(1e4, 8, scaling, max_position_embeddings=64, max_model_len=64)
    torch.testing.assert_close(got.inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert got.scale == 1.0


def test_factors_of_a_gguf_file_divide() -> None:
    got = rope_frequencies(
        1e4,
        8,
        {"rope_type": "factors", "factors": (1.0, 2.0, 4.0, 8.0)},
        max_position_embeddings=64,
        max_model_len=64,
    )
    torch.testing.assert_close(got.inv_freq, torch.tensor([1.0, 0.05, 0.0025, 0.000125]))


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "spiral"}, "'spiral'"),
        ({"rope_type": "linear"}, "factor=None"),
        ({"rope_type": "linear", "factor": -2.0}, "factor=-2.0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor=None"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "16 positive numbers"),
        ({"rope_type": "longrope", "short_factor": "none"}, "16 positive numbers"),
        ({"rope_type": "factors", "factors": [0.0] * 16}, "16 positive numbers"),
    ],
)
def test_unusable_values_are_named(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        ours(scaling)
    assert said in str(caught.value)
