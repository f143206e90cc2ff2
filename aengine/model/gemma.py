"""Gemma 2 and Gemma 3 (text): norms around each sublayer, and windows in most layers.

Source: the Gemma 2 and Gemma 3 technical reports, Google DeepMind, 2024 and 2025.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aengine.errors import ModelLoadError
from aengine.model.decoder import (
    SANDWICH_NORMS,
    DecoderSpec,
    activation_of,
    global_rope,
    positive,
    tied_unless_said,
    windowed_layers,
)
from aengine.model.rope_scaling import rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aengine.model.config import ModelConfig
    from aengine.model.rope_scaling import RopeFrequencies


def gemma2(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """Gemma 2: capped scores and logits, a window in every other layer."""
    return replace(
        _gemma(config, lambda index: index % 2 == 0),
        ropes=global_rope(config, max_model_len),
    )


def gemma3(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """Gemma 3: normalised q and k; windowed layers have a rotary base of their own."""
    pattern = int(positive(config, "sliding_window_pattern", 6))
    spec = _gemma(config, lambda index: bool((index + 1) % pattern))
    layers = tuple(
        layer if layer.sliding_window is None else replace(layer, rope="local")
        for layer in spec.layers
    )
    return replace(spec, layers=layers, ropes=_gemma3_ropes(config, max_model_len), qk_norm="head")


def _gemma(config: ModelConfig, windowed: Callable[[int], bool]) -> DecoderSpec:
    if config.extra.get("use_bidirectional_attention"):
        raise ModelLoadError(
            "config.json has use_bidirectional_attention=true: only causal models are supported"
        )
    caps = {
        key: None if config.extra.get(key) is None else positive(config, key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return DecoderSpec(
        config=tied_unless_said(config),
        layers=windowed_layers(config, windowed),
        ropes={},
        activation=activation_of(config),
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        norms=SANDWICH_NORMS,
        norm_offset=1.0,
        attention_soft_cap=caps["attn_logit_softcapping"],
        logit_soft_cap=caps["final_logit_softcapping"],
        embedding_multiplier=math.sqrt(config.hidden_size),
    )


def _gemma3_ropes(config: ModelConfig, max_model_len: int) -> Mapping[str, RopeFrequencies]:
    """Newer files have one mapping a kind of layer, older ones a key of each."""
    extra = config.extra
    by_kind = extra.get("rope_parameters") or {
        "full_attention": {
            **(extra.get("rope_scaling") or {}),
            "rope_theta": extra.get("rope_theta"),
        },
        "sliding_attention": {"rope_theta": extra.get("rope_local_base_freq")},
    }
    kinds = {
        "global": ("full_attention", 1_000_000.0),
        "local": ("sliding_attention", 10_000.0),
    }
    return {
        name: _rope(config, by_kind.get(kind), theta, max_model_len)
        for name, (kind, theta) in kinds.items()
    }


def _rope(
    config: ModelConfig, values: Any, default_theta: float, max_model_len: int
) -> RopeFrequencies:
    values = dict(values or {})
    theta = values.pop("rope_theta", None)
    if (kind := values.pop("type", None)) is not None:
        values.setdefault("rope_type", kind)
    return rope_frequencies(
        default_theta if theta is None else theta,
        config.head_dim,
        values,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=max_model_len,
    )
