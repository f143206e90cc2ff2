"""Random checkpoints of any network: the tensors that its reader asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch

from aengine.model import causal_lm
from aengine.model.causal_lm import CausalLM
from aengine.model.loading import WeightReader

if TYPE_CHECKING:
    from aengine.model.decoder import DecoderSpec


def random_checkpoint(spec: DecoderSpec, *, std: float = 0.3) -> dict[str, torch.Tensor]:
    """Names and float32 tensors, norms included; the same for the same network."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(len(spec.layers))

    class Making(WeightReader):
        def _full(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            made[name] = torch.empty(shape).normal_(std=std, generator=generator)
            return made[name]

    with mock.patch.object(causal_lm, "WeightReader", Making):
        CausalLM(spec, {}, dtype=torch.float32, device=torch.device("cpu"), max_model_len=1)
    return made
