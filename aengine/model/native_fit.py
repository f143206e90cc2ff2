"""Whether a network is plain enough for the CPU kernels that compute a whole step in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.model.decoder import NormNames

if TYPE_CHECKING:
    from aengine.model.decoder import DecoderSpec


def native_obstacle(spec: DecoderSpec, max_model_len: int) -> str | None:
    """Why `aengine.kernels.native` cannot compute this network; None: it can.

    The kernels know the plain decoder (Llama, Mistral within its window, Qwen2): SwiGLU, one
    rotary embedding over the whole head in every layer, norms before the sublayers, biases on
    q, k and v at most. The frequencies that they need are `spec.ropes["global"].inv_freq`,
    [head_dim/2] float32.

    Args:
        spec: the network.
        max_model_len: longest sequence to be served; a window that long never hides anything.
    """
    for holds, what in _checks(spec, max_model_len):
        if not holds:
            return what
    return None


def _checks(spec: DecoderSpec, max_model_len: int) -> list[tuple[bool, str]]:
    dim = spec.config.head_dim
    layers = spec.layers
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    rope = spec.ropes.get("global")
    turns = rope is not None and all(layer.rope == "global" for layer in layers)
    return [
        (spec.activation == "silu", f"its activation is {spec.activation}"),
        (all(layer.moe is None for layer in layers), "it is a mixture of experts"),
        (min(windows, default=max_model_len) >= max_model_len, "it has sliding windows"),
        (turns, "its layers have different position embeddings"),
        (rope is None or 2 * len(rope.inv_freq) == dim, "only a part of each head is rotated"),
        (rope is None or rope.scale == 1.0, "its rotary embedding is scaled"),
        (spec.qk_norm is None, "it normalises q and k"),
        (spec.norms == NormNames(), "its norms are in other places"),
        (spec.norm_offset == 0.0, "its norm weights have an offset"),
        (not spec.o_bias and not spec.mlp_bias, "its output projections have biases"),
        (not spec.merged, "its checkpoint stores merged projections"),
        (abs(spec.scale * dim**0.5 - 1) < 1e-6, "it scales its scores otherwise"),
        (spec.attention_soft_cap is None, "it caps its scores"),
        (spec.logit_soft_cap is None, "it caps its logits"),
        (
            (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_divisor) == (1, 1, 1),
            "it has multipliers",
        ),
    ]
