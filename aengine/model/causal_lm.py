"""`CausalLM`: the decoder-only network that every family here is, built from a `DecoderSpec`.

`embed`, `run_layers` and `logits` are separate so that a prefill can stop between layers and park
its hidden state; `forward` runs them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aengine.kernels.ops import Ops
from aengine.kernels.rope import rope_table
from aengine.model.layers import Attention, VocabEmbedding, VocabHead
from aengine.model.loading import WeightReader
from aengine.model.mlp import GatedMlp, MoeMlp
from aengine.model.parallel import ParallelConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aengine.kernels.attention import KVLayer
    from aengine.model.attention import AttentionBackend
    from aengine.model.batch import ForwardBatch
    from aengine.model.decoder import DecoderSpec, LayerSpec
    from aengine.model.loading import Weights


class Hidden(NamedTuple):
    """What flows between layers, [T, K] each. The stream so far is `residual + update`.

    `update` is what the last sublayer gave; adding it is left to the next norm, which does both in
    one pass. It is None before the first layer.
    """

    residual: torch.Tensor
    update: torch.Tensor | None


class DecoderLayer:
    """Attention and feed-forward with the norms that the family puts around them."""

    def __init__(
        self,
        reader: WeightReader,
        index: int,
        spec: DecoderSpec,
        layer: LayerSpec,
        parallel: ParallelConfig,
        cos_sin: torch.Tensor | None,
    ) -> None:
        prefix = f"model.layers.{index}"
        self._eps = spec.config.rms_norm_eps
        self._multiplier = spec.residual_multiplier
        self.attention = Attention(reader, f"{prefix}.self_attn", spec, layer, parallel, cos_sin)
        self.mlp: GatedMlp | MoeMlp = (
            GatedMlp(reader, f"{prefix}.mlp", spec, parallel)
            if layer.moe is None
            else MoeMlp(reader, f"{prefix}.mlp", spec, layer.moe, parallel)
        )

        def norm(name: str | None) -> torch.Tensor | None:
            if name is None:
                return None
            size = spec.config.hidden_size
            return reader.norm(f"{prefix}.{name}.weight", size, offset=spec.norm_offset)

        names = spec.norms
        self._before_attention = norm(names.before_attention)
        self._after_attention = norm(names.after_attention)
        self._before_mlp = norm(names.before_mlp)
        self._after_mlp = norm(names.after_mlp)

    def __call__(
        self,
        hidden: Hidden,
        batch: ForwardBatch,
        kv: KVLayer,
        backend: AttentionBackend,
        ops: Ops,
    ) -> Hidden:
        """One layer further."""
        x, residual = self._enter(hidden, self._before_attention, ops)
        update = self._leave(self.attention(x, batch, kv, backend, ops), self._after_attention, ops)
        x, residual = self._enter(Hidden(residual, update), self._before_mlp, ops)
        return Hidden(residual, self._leave(self.mlp(x, ops), self._after_mlp, ops))

    def _enter(
        self, hidden: Hidden, weight: torch.Tensor | None, ops: Ops
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a sublayer reads, and the stream."""
        return enter(hidden, weight, self._eps, ops)

    def _leave(self, x: torch.Tensor, weight: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        if weight is not None:
            x = ops.rms_norm(x, weight, self._eps)
        return x if self._multiplier == 1.0 else x * self._multiplier


def enter(
    hidden: Hidden, weight: torch.Tensor | None, eps: float, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor]:
    """The (normalised) stream, and the stream itself."""
    residual, update = hidden
    if weight is None:
        stream = residual if update is None else residual + update
        return stream, stream
    if update is None:
        return ops.rms_norm(residual, weight, eps), residual
    return ops.add_rms_norm(update, residual, weight, eps)


class CausalLM:
    """A model of one family, on one rank.

    Args:
        spec: the network.
        weights: tensors by Hugging Face name; None: random ones (`load_format="dummy"`).
        dtype, device: of the weights and activations (norms stay float32).
        max_model_len: positions that the rotary tables cover.
        parallel: this rank's share.
        ops: the operators that the layers call.

    `num_heads`, `num_kv_heads` and `weight_bytes` are those of this rank.

    Raises:
        ModelLoadError: tensors are missing, unexpected or misshapen; the message lists them.
        ConfigError: the model cannot be split over the ranks.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        parallel: ParallelConfig | None = None,
        ops: Ops | None = None,
        seed: int = 0,
    ) -> None:
        parallel = parallel or ParallelConfig()
        reader = WeightReader(weights, dtype=dtype, device=device, seed=seed)
        tables = {
            name: rope_table(rope.inv_freq.to(device), max_model_len, scale=rope.scale)
            for name, rope in spec.ropes.items()
        }
        self.config = spec.config
        self.vocab_size = spec.config.vocab_size
        self.num_heads = parallel.split("num_heads", spec.config.num_heads).size
        self.num_kv_heads = parallel.split_kv_heads(spec.config.num_kv_heads).size
        self._ops = ops or Ops()
        self._embedding = VocabEmbedding(reader, spec, parallel)
        self._layers = [
            DecoderLayer(
                reader,
                index,
                spec,
                layer,
                parallel,
                None if layer.rope is None else tables[layer.rope],
            )
            for index, layer in enumerate(spec.layers)
        ]
        self._norm = reader.norm(
            "model.norm.weight", spec.config.hidden_size, offset=spec.norm_offset
        )
        self._head = VocabHead(reader, spec, parallel, self._embedding)
        reader.finish()
        self.weight_bytes = reader.bytes_handed_out

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """[rows of this rank, K]."""
        return self._embedding.weight

    def embed(self, batch: ForwardBatch) -> Hidden:
        """The stream before the first layer."""
        return Hidden(self._embedding(batch.token_ids), None)

    def run_layers(
        self,
        hidden: Hidden,
        start: int,
        stop: int,
        batch: ForwardBatch,
        kv_cache: Sequence[KVLayer],
        backend: AttentionBackend,
    ) -> Hidden:
        """Layers `start .. stop-1`."""
        for index in range(start, stop):
            hidden = self._layers[index](hidden, batch, kv_cache[index], backend, self._ops)
        return hidden

    def logits(self, hidden: Hidden, logit_index: torch.Tensor | None) -> torch.Tensor:
        """[S, V] float32 of the tokens at `logit_index` ([S] int64; None: of all)."""
        if logit_index is not None:
            residual, update = hidden
            hidden = Hidden(residual[logit_index], None if update is None else update[logit_index])
        x, _ = enter(hidden, self._norm, self.config.rms_norm_eps, self._ops)
        return self._head(x, self._ops)

    def forward(
        self, batch: ForwardBatch, kv_cache: Sequence[KVLayer], backend: AttentionBackend
    ) -> torch.Tensor:
        """[S, V] float32 logits of one step; writes the step's keys and values."""
        hidden = self.run_layers(self.embed(batch), 0, self.num_layers, batch, kv_cache, backend)
        return self.logits(hidden, batch.logit_index)
