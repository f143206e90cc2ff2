"""The networks that configs as they are published describe: keys that are left out included.

Keys and values are modelled on the config.json files of the models that the tests are named after;
what matters most is which keys those files leave out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aengine.errors import ModelLoadError
from aengine.model.config import ModelConfig
from aengine.model.registry import decoder_spec

if TYPE_CHECKING:
    from aengine.model.decoder import DecoderSpec


def spec(
    architecture: str, sizes: tuple[int, ...], *, length: int = 4096, **keys: Any
) -> DecoderSpec:
    """`sizes`: vocabulary, hidden, intermediate, layers, heads, key heads, positions."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    raw = {"architectures": [architecture], **dict(zip(names, sizes, strict=True)), **keys}
    return decoder_spec(ModelConfig.from_hf(raw), length)


def windows(made: DecoderSpec) -> list[int | None]:
    return [layer.sliding_window for layer in made.layers]


def test_gemma_2_2b() -> None:
    made = spec(
        "Gemma2ForCausalLM",
        (256_000, 2304, 9216, 26, 8, 4, 8192),
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
    )
    assert windows(made) == [4096, None] * 13
    assert made.config.tie_word_embeddings
    assert made.activation == "gelu_tanh"
    assert made.scale == 1 / 16
    assert (made.attention_soft_cap, made.logit_soft_cap) == (50.0, 30.0)
    assert made.embedding_multiplier == math.sqrt(2304)


def test_gemma_3_1b() -> None:
    made = spec(
        "Gemma3ForCausalLM",
        (262_144, 1152, 6912, 26, 4, 1, 32_768),
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1_000_000,
        rope_local_base_freq=10_000,
        rope_scaling=None,
        rms_norm_eps=1e-6,
    )
    assert windows(made) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert [layer.rope for layer in made.layers] == (["local"] * 5 + ["global"]) * 4 + ["local"] * 2
    assert made.ropes["global"].inv_freq[1] == pytest.approx(1e6 ** (-2 / 256))
    assert made.ropes["local"].inv_freq[1] == pytest.approx(1e4 ** (-2 / 256))
    assert made.attention_soft_cap is None
    assert made.qk_norm == "head"


def test_gemma_3_27b_stretches_only_the_global_embedding() -> None:
    made = spec(
        "Gemma3ForCausalLM",
        (262_208, 5376, 21_504, 6, 32, 16, 131_072),
        head_dim=128,
        query_pre_attn_scalar=168,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=1024,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=1_000_000.0,
    )
    assert made.ropes["global"].inv_freq[0] == 1 / 8
    assert made.ropes["local"].inv_freq[0] == 1
    assert made.scale == pytest.approx(168**-0.5)


@pytest.mark.parametrize("name", ["su", "longrope"])
def test_phi_3_mini_128k(name: str) -> None:
    factors = {"short_factor": [1.05] * 48, "long_factor": [2.0] * 48}

    def made(length: int) -> DecoderSpec:
        return spec(
            "Phi3ForCausalLM",
            (32_064, 3072, 8192, 32, 32, 32, 131_072),
            length=length,
            original_max_position_embeddings=4096,
            rope_scaling={"type": name, **factors},
            rope_theta=10_000.0,
            sliding_window=262_144,
            attention_bias=False,
        )

    short, long = made(4096).ropes["global"], made(131_072).ropes["global"]
    assert short.inv_freq[0] == pytest.approx(1 / 1.05)
    assert long.inv_freq[0] == 0.5
    assert short.scale == long.scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert made(4096).merged


def test_qwen_2_5_7b_ignores_a_window_that_is_off() -> None:
    made = spec(
        "Qwen2ForCausalLM",
        (152_064, 3584, 18_944, 28, 28, 4, 32_768),
        sliding_window=131_072,
        max_window_layers=28,
        use_sliding_window=False,
        rope_theta=1_000_000.0,
    )
    assert windows(made) == [None] * 28
    assert made.qkv_bias
    assert not made.o_bias


def test_qwen_3_30b_a3b() -> None:
    made = spec(
        "Qwen3MoeForCausalLM",
        (151_936, 2048, 6144, 48, 32, 4, 40_960),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        sliding_window=None,
        max_window_layers=48,
    )
    moe = made.layers[47].moe
    assert moe is not None
    assert (moe.experts, moe.active, moe.width, moe.normalise) == (128, 8, 768, True)


def test_smollm_3_leaves_out_what_is_its_default() -> None:
    made = spec("SmolLM3ForCausalLM", (128_256, 2048, 11_008, 36, 16, 4, 65_536))
    assert [layer.rope for layer in made.layers] == (["global"] * 3 + [None]) * 9
    assert made.ropes["global"].inv_freq[1] == pytest.approx(2e6 ** (-2 / 128))
    assert made.config.tie_word_embeddings


def test_granite_3_1_8b() -> None:
    made = spec(
        "GraniteForCausalLM",
        (49_155, 4096, 12_800, 40, 32, 8, 131_072),
        attention_multiplier=0.0078125,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=16.0,
        rope_theta=10_000_000.0,
        tie_word_embeddings=True,
    )
    assert (made.scale, made.logits_divisor) == (0.0078125, 16.0)
    assert (made.embedding_multiplier, made.residual_multiplier) == (12.0, 0.22)


def test_llama_3_1_8b() -> None:
    made = spec(
        "LlamaForCausalLM",
        (128_256, 4096, 14_336, 32, 32, 8, 131_072),
        rope_theta=500_000.0,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    )
    inv_freq = made.ropes["global"].inv_freq
    plain = 500_000.0 ** (-torch.arange(64) / 64)
    torch.testing.assert_close(inv_freq[:20], plain[:20])  # short waves stay
    torch.testing.assert_close(inv_freq[-20:], plain[-20:] / 8)  # long ones are stretched


@pytest.mark.parametrize(
    ("architecture", "keys", "said"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "2 names are needed"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention", "spiral"]}, "spiral"),
        ("GraniteForCausalLM", {"logits_scaling": "much"}, "logits_scaling='much'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers=[1]"),
        ("Qwen3MoeForCausalLM", {}, "num_experts=None"),
        ("LlamaForCausalLM", {"hidden_act": "relu2"}, "relu2"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    architecture: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec(architecture, (64, 64, 64, 2, 4, 2, 128), **keys)
    assert said in str(caught.value)
