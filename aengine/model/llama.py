"""Llama 2 and 3.x, SmolLM2, Mistral: the plain decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.model.decoder import DecoderSpec, activation_of, global_rope, uniform_layers

if TYPE_CHECKING:
    from aengine.model.config import ModelConfig


def llama(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The network of a Llama-like model."""
    return DecoderSpec(
        config=config,
        layers=uniform_layers(config),
        ropes=global_rope(config, max_model_len),
        activation=activation_of(config),
        scale=config.head_dim**-0.5,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=bool(config.extra.get("mlp_bias", False)),
    )
