"""Qwen2 and 2.5 (biases on q, k, v), Qwen3 (normalised q and k), Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aengine.errors import ModelLoadError
from aengine.model.decoder import (
    DecoderSpec,
    LayerSpec,
    MoeSpec,
    activation_of,
    global_rope,
    uniform_layers,
    windowed_layers,
)

if TYPE_CHECKING:
    from aengine.model.config import ModelConfig


def qwen2(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """Qwen2: Llama with biases on the query, key and value projections."""
    return DecoderSpec(
        config=config,
        layers=_windowed(config),
        ropes=global_rope(config, max_model_len),
        activation=activation_of(config),
        scale=config.head_dim**-0.5,
        qkv_bias=True,
    )


def qwen3(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """Qwen3: queries and keys are normalised a head at a time."""
    return replace(
        qwen2(config, max_model_len),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm="head",
    )


def qwen3_moe(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """Qwen3-MoE: experts in all layers but those that the config excludes."""
    extra = config.extra
    moe = MoeSpec(
        experts=_integer(extra, "num_experts", "num_local_experts"),
        active=_integer(extra, "num_experts_per_tok"),
        width=_integer(extra, "moe_intermediate_size"),
        normalise=bool(extra.get("norm_topk_prob", False)),
    )
    dense = set(extra.get("mlp_only_layers") or ())
    step = int(extra.get("decoder_sparse_step") or 1)
    layers = tuple(
        replace(layer, moe=None if index in dense or (index + 1) % step else moe)
        for index, layer in enumerate(_windowed(config))
    )
    return replace(qwen3(config, max_model_len), layers=layers)


def _windowed(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Full attention below `max_window_layers`, the sliding window from there on, if it is on."""
    if config.sliding_window is None or not config.extra.get("use_sliding_window"):
        return uniform_layers(replace(config, sliding_window=None))
    first = int(config.extra.get("max_window_layers", 0))
    return windowed_layers(config, lambda index: index >= first)


def _integer(extra: Any, key: str, other: str = "") -> int:
    value = extra.get(key, extra.get(other))
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json has {key}={value!r}: a positive integer is needed")
    return value
