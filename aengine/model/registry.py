"""Which architectures are known, and the network that each one is.

A family is a function from a `ModelConfig` to a `DecoderSpec`. A new one is a file with such a
function and a line in `FAMILIES`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from aengine.errors import ModelLoadError
from aengine.model import llama, qwen

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.model.config import ModelConfig
    from aengine.model.decoder import DecoderSpec

    Family = Callable[[ModelConfig, int], DecoderSpec]

FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": llama.llama,
        "MistralForCausalLM": llama.llama,
        "Qwen2ForCausalLM": qwen.qwen2,
        "Qwen3ForCausalLM": qwen.qwen3,
        "Qwen3MoeForCausalLM": qwen.qwen3_moe,
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
