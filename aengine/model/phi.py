"""Phi-3 and Phi-4-mini: a Llama whose checkpoints keep q, k, v and gate, up in one matrix each.

Source: the Phi-3 technical report, Microsoft, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aengine.model.decoder import DecoderSpec, activation_of, global_rope, uniform_layers

if TYPE_CHECKING:
    from aengine.model.config import ModelConfig


def phi3(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The network of a Phi-3 model."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.get("rope_type") in ("su", "yarn"):
        # Early files call LongRoPE so.
        config = replace(config, rope_scaling={**scaling, "rope_type": "longrope"})
    return DecoderSpec(
        config=config,
        layers=uniform_layers(config),
        ropes=global_rope(config, max_model_len),
        activation=activation_of(config),
        scale=config.head_dim**-0.5,
        merged=True,
    )
