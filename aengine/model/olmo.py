"""OLMo 2: norms after the sublayers, q and k normalised over all their heads.

Source: "2 OLMo 2 Furious", Allen Institute for AI, 2025.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aengine.model.decoder import POST_NORMS
from aengine.model.llama import llama

if TYPE_CHECKING:
    from aengine.model.config import ModelConfig
    from aengine.model.decoder import DecoderSpec


def olmo2(config: ModelConfig, max_model_len: int) -> DecoderSpec:
    """The network of an OLMo 2 model."""
    return replace(llama(config, max_model_len), norms=POST_NORMS, qk_norm="full")
