"""SmolLM3: a Llama that leaves the position embedding out of every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aengine.errors import ModelLoadError
from aengine.model.decoder import positive, tied_unless_said, windowed_layers
from aengine.model.llama import llama

if TYPE_CHECKING:
    from aengine.model.config import ModelConfig
    from aengine.model.decoder import DecoderSpec

_THETA = 2_000_000.0
"""The rotary base of files that leave it out."""


def smollm3(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The network of a SmolLM3 model."""
    config = tied_unless_said(config)
    if "rope_theta" not in config.extra and not config.extra.get("rope_parameters"):
        config = replace(config, rope_theta=_THETA)
    if not config.extra.get("use_sliding_window"):
        config = replace(config, sliding_window=None)
    turns = _turning(config)
    layers = windowed_layers(config, lambda index: not turns[index])
    return replace(
        llama(config, max_model_len),
        layers=tuple(
            layer if turn else replace(layer, rope=None)
            for layer, turn in zip(layers, turns, strict=True)
        ),
    )


def _turning(config: ModelConfig) -> list[bool]:
    """Which layers have a position embedding. The key's name means the opposite of its values."""
    flags = config.extra.get("no_rope_layers")
    if flags is None:
        interval = int(positive(config, "no_rope_layer_interval", 4))
        return [bool((index + 1) % interval) for index in range(config.num_layers)]
    if not isinstance(flags, list) or len(flags) < config.num_layers:
        raise ModelLoadError(
            f"config.json has no_rope_layers={flags!r}: a list of {config.num_layers} zeros and "
            "ones is needed"
        )
    return [bool(flag) for flag in flags[: config.num_layers]]
