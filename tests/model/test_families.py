"""Each family's logits equal transformers' on tiny random models, chunked and unchunked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aengine.errors import ModelLoadError
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.registry import FAMILIES, decoder_spec
from tests.model.paged import run

if TYPE_CHECKING:
    from collections.abc import Sequence

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-dynamic-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-yarn-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 7, "pad_token_id": 0}),
    "phi3-longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "pad_token_id": 0,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
}

SEQUENCES = [list(range(5, 28)), [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]


def reference(name: str, options: dict[str, Any]) -> Any:
    """A random transformers model with weights large enough to tell layers apart."""
    torch.manual_seed(0)
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(**TINY, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    return model


def ours(model: Any) -> CausalLM:
    raw = model.config.to_dict()
    raw["architectures"] = [type(model).__name__]
    config = ModelConfig.from_hf(raw)
    weights = unstacked(model.state_dict(), config)
    return CausalLM(
        decoder_spec(config, 256),
        weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=256,
    )


def unstacked(state: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Checkpoints name each expert; transformers holds them stacked."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                base = name.removesuffix("gate_up_proj")
                weights[f"{base}{expert}.gate_proj.weight"] = gate
                weights[f"{base}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                weights[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = matrix
        else:
            weights[name] = tensor
    return weights


@pytest.mark.parametrize("chunks", [[64], [5], [9, 1, 1, 2]], ids=["whole", "chunks", "then-one"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, chunks: Sequence[int]) -> None:
    model = reference(*CASES[case])
    logits = run(ours(model), SEQUENCES, chunks)
    for sequence, found in zip(SEQUENCES, logits, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([sequence])).logits[0]
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < 1e-3


def test_an_unknown_architecture_lists_those_known() -> None:
    config = ModelConfig.from_hf({**TINY, "architectures": ["WhisperForCausalLM"]})
    with pytest.raises(ModelLoadError) as caught:
        decoder_spec(config, 64)
    assert all(name in str(caught.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected: extra"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            "misshapen: model.norm.weight is [3] instead of [64]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_listed(change: Any, said: str) -> None:
    model = reference("Llama", {"tie_word_embeddings": False})
    config = ModelConfig.from_hf({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    weights = dict(model.state_dict())
    change(weights)
    with pytest.raises(ModelLoadError) as caught:
        CausalLM(
            decoder_spec(config, 64),
            weights,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
        )
    assert said in str(caught.value)
