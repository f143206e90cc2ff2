"""Which architectures are known, and the network that each one is.

A family is a function from a `ModelConfig` to a `DecoderSpec`. A new one is a file with such a
function and a line in `FAMILIES`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from aengine.errors import ModelLoadError
from aengine.model import gemma, granite, llama, olmo, phi, qwen, smollm

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.model.config import ModelConfig
    from aengine.model.decoder import DecoderSpec

    Family = Callable[[ModelConfig, int], DecoderSpec]

FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "Gemma2ForCausalLM": gemma.gemma2,
        "Gemma3ForCausalLM": gemma.gemma3,
        "GraniteForCausalLM": granite.granite,
        "LlamaForCausalLM": llama.llama,
        "MistralForCausalLM": llama.llama,
        "Olmo2ForCausalLM": olmo.olmo2,
        "Phi3ForCausalLM": phi.phi3,
        "Qwen2ForCausalLM": qwen.qwen2,
        "Qwen3ForCausalLM": qwen.qwen3,
        "Qwen3MoeForCausalLM": qwen.qwen3_moe,
        "SmolLM3ForCausalLM": smollm.smollm3,
    }
)
"""Hugging Face architecture name -> (config, max_model_len) -> network."""


def decoder_spec(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The network of a model.

    Raises:
        ModelLoadError: an unknown architecture; the message lists those known.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ModelLoadError(
            f"the architecture {config.architecture!r} is not supported; known are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return family(config, max_model_len)
