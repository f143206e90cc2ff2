"""The feed-forward half of a layer: a gated MLP, or a mixture of such."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aengine.kernels.moe import route

if TYPE_CHECKING:
    from aengine.kernels.ops import Ops
    from aengine.model.decoder import DecoderSpec, MoeSpec
    from aengine.model.loading import WeightReader
    from aengine.model.parallel import ParallelConfig


class GatedMlp:
    """`down(activation(gate(x)) * up(x))`, gate and up in one matrix; this rank's columns."""

    def __init__(
        self, reader: WeightReader, prefix: str, spec: DecoderSpec, parallel: ParallelConfig
    ) -> None:
        hidden, width = spec.config.hidden_size, spec.config.intermediate_size
        shard = parallel.split("intermediate_size", width)
        rows = {"gate_proj": (width, shard), "up_proj": (width, shard)}
        merged = "gate_up_proj" if spec.merged else None
        self.gate_up = reader.merged_linear(prefix, rows, hidden, spec.mlp_bias, merged)
        self.down = reader.row_parallel(
            f"{prefix}.down_proj", (hidden, width), shard, spec.mlp_bias, parallel
        )
        self._activation = spec.activation
        self._parallel = parallel

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[T, K] -> [T, K]."""
        out = self.down(self.gate_up.gated(x, self._activation, ops), ops)
        return self._parallel.collectives.all_reduce(out)


class MoeMlp:
    """Each token goes through its most probable experts; every rank has a slice of each expert."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        spec: DecoderSpec,
        moe: MoeSpec,
        parallel: ParallelConfig,
    ) -> None:
        hidden = spec.config.hidden_size
        shard = parallel.split("moe_intermediate_size", moe.width)
        self._moe, self._activation, self._parallel = moe, spec.activation, parallel
        self.router = reader.matrix(f"{prefix}.gate.weight", (moe.experts, hidden))
        wide, narrow = (moe.width, hidden), (hidden, moe.width)
        names = [f"{prefix}.experts.{expert}" for expert in range(moe.experts)]
        self.gate_up = torch.stack(
            [
                reader.merged(
                    [
                        (f"{name}.gate_proj.weight", wide, shard),
                        (f"{name}.up_proj.weight", wide, shard),
                    ]
                )
                for name in names
            ]
        )
        self.down = torch.stack(
            [reader.matrix(f"{n}.down_proj.weight", narrow, dim=1, shard=shard) for n in names]
        )

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[T, K] -> [T, K]."""
        routing = route(F.linear(x, self.router), self._moe.active, normalise=self._moe.normalise)
        out = ops.moe_mlp(x, self.gate_up, self.down, routing, self._activation)
        return self._parallel.collectives.all_reduce(out)
