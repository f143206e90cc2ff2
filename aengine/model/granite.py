"""Granite 3: a Llama with multipliers on embedding, scores, sublayers and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aengine.model.decoder import positive
from aengine.model.llama import llama

if TYPE_CHECKING:
    from aengine.model.config import ModelConfig
    from aengine.model.decoder import DecoderSpec


def granite(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The network of a Granite model."""
    return replace(
        llama(config, max_model_len),
        scale=positive(config, "attention_multiplier", 1.0),
        embedding_multiplier=positive(config, "embedding_multiplier", 1.0),
        residual_multiplier=positive(config, "residual_multiplier", 1.0),
        logits_divisor=positive(config, "logits_scaling", 1.0),
    )
