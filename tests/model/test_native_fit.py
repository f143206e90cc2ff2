"""Only plain networks go to the CPU kernels; for each other one the reason is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from aengine.model.config import ModelConfig
from aengine.model.native_fit import native_obstacle
from aengine.model.registry import decoder_spec

if TYPE_CHECKING:
    from aengine.model.decoder import DecoderSpec

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def spec(name: str, options: dict[str, Any], length: int = 128) -> DecoderSpec:
    raw = {**BASE, "architectures": [f"{name}ForCausalLM"], **options}
    return decoder_spec(ModelConfig.from_hf(raw), length)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "rope_theta": 5e5}),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("Mistral", {"sliding_window": 128}),
        ("Qwen2", {}),
    ],
)
def test_plain_networks_fit(name: str, options: dict[str, Any]) -> None:
    made = spec(name, options)
    assert native_obstacle(made, 128) is None
    inv_freq = made.ropes["global"].inv_freq
    assert inv_freq.dtype == torch.float32
    assert inv_freq.shape == (8,)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Mistral", {"sliding_window": 127}, "windows"),
        ("Llama", {"hidden_act": "gelu"}, "gelu"),
        ("Llama", {"mlp_bias": True}, "biases"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "scaled"),
        ("Llama", {"partial_rotary_factor": 0.5}, "part of each head"),
        ("Qwen3", {}, "normalises"),
        ("Olmo2", {}, "normalises"),
        ("Gemma2", {"hidden_activation": "silu"}, "norms"),
        ("Granite", {"attention_multiplier": 0.1}, "scores"),
        ("Granite", {"attention_multiplier": 0.25, "logits_scaling": 8}, "multipliers"),
        ("Phi3", {}, "merged"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "position embeddings"),
        (
            "Qwen3Moe",
            {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
            "experts",
        ),
    ],
)
def test_others_are_told_why(name: str, options: dict[str, Any], said: str) -> None:
    obstacle = native_obstacle(spec(name, options), 128)
    assert obstacle is not None
    assert said in obstacle
