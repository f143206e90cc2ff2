"""What distinguishes one decoder-only family from another, as data: `DecoderSpec`.

The families here are one network with different settings; a family's file turns a `ModelConfig`
into such a spec, and `causal_lm` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from aengine.errors import ModelLoadError
from aengine.model.rope_scaling import rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aengine.kernels.activation import Activation
    from aengine.model.config import ModelConfig
    from aengine.model.rope_scaling import RopeFrequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Checkpoint names of a layer's norms; None where a family has none at that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


SANDWICH_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
"""Gemma 2 and 3: a norm before and after each sublayer."""

POST_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
"""OLMo 2: sublayers read the residual stream as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in the place of a feed-forward layer."""

    experts: int
    active: int
    width: int
    normalise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer."""

    sliding_window: int | None = None
    rope: str | None = "global"
    """Key of `DecoderSpec.ropes`; None: no position embedding in this layer."""
    moe: MoeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One family's network. Sizes come from `config`; the rest are the family's own settings.

    `merged` says that the checkpoint stores `qkv_proj` and `gate_up_proj`; `qk_norm` whether q and
    k are normalised a head at a time or over all heads; `norm_offset` is added to norm weights.
    """

    config: ModelConfig
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeFrequencies]
    activation: Activation
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    merged: bool = False
    qk_norm: Literal["head", "full"] | None = None
    norms: NormNames = field(default_factory=NormNames)
    norm_offset: float = 0.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0


def activation_of(config: ModelConfig) -> Activation:
    """The gate's activation.

    Raises:
        ModelLoadError: one that no kernel computes.
    """
    names: dict[str, Activation] = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_tanh": "gelu_tanh",
    }
    name = config.extra.get("hidden_activation") or config.hidden_act  # Gemma's key, or the rest's
    if name not in names:
        raise ModelLoadError(
            f"the activation {name!r} is not supported; known are {', '.join(names)}"
        )
    return names[name]


def global_rope(config: ModelConfig, max_model_len: int) -> Mapping[str, RopeFrequencies]:
    """The one rotary embedding that all layers of most families share."""
    partial = config.extra.get("partial_rotary_factor")
    scaling = config.rope_scaling
    if scaling is not None:
        partial = scaling.get("partial_rotary_factor", partial)
        # Where a config has this beside the scaling's mapping (Phi-3), it is the one that counts.
        original = config.extra.get("original_max_position_embeddings")
        if original is not None:
            scaling = {**scaling, "original_max_position_embeddings": original}
    return {
        "global": rope_frequencies(
            config.rope_theta,
            int(config.head_dim * (1.0 if partial is None else partial)),
            scaling,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=max_model_len,
        )
    }


def uniform_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """All layers alike, with the config's sliding window."""
    return (LayerSpec(sliding_window=config.sliding_window),) * config.num_layers


def windowed_layers(config: ModelConfig, windowed: Callable[[int], bool]) -> tuple[LayerSpec, ...]:
    """Layers of which some see only the sliding window: those that the config's `layer_types`
    names, or without that key those for which `windowed(index)` holds.

    Raises:
        ModelLoadError: `layer_types` is no list of known names, one a layer.
    """
    types = config.extra.get("layer_types")
    if types is None:
        types = [
            "sliding_attention" if windowed(index) else "full_attention"
            for index in range(config.num_layers)
        ]
    known = {"sliding_attention": config.sliding_window, "full_attention": None}
    if (
        not isinstance(types, list)
        or len(types) != config.num_layers
        or not all(isinstance(name, str) and name in known for name in types)
    ):
        raise ModelLoadError(
            f"config.json has layer_types={types!r}: {config.num_layers} names are needed, each "
            f"one of {', '.join(known)}"
        )
    return tuple(LayerSpec(sliding_window=known[name]) for name in types)


def positive(config: ModelConfig, key: str, default: float | None = None) -> float:
    """A positive number that only some families have.

    Raises:
        ModelLoadError: it is missing and has no default, or is no positive number.
    """
    value = config.extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelLoadError(f"config.json has {key}={value!r}: a positive number is needed")
    return float(value)


def tied_unless_said(config: ModelConfig) -> ModelConfig:
    """The config with tied embeddings, unless its file says otherwise: files leave out what is
    their family's default."""
    if "tie_word_embeddings" in config.extra:
        return config
    return replace(config, tie_word_embeddings=True)
