"""The layers that all families are made of, as plain objects around tensors.

No `nn.Module`: nothing here is trained, moved or hooked, and a plain object shows all that a call
does. Nothing synchronises with the host, so that a decode step can be captured in a graph.

Shape legend: T tokens, K hidden size, N/H/D query heads, key heads and head dimension of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aengine.model.attention import HeadNorm

if TYPE_CHECKING:
    from aengine.kernels.attention import KVLayer
    from aengine.kernels.ops import Ops
    from aengine.model.attention import AttentionBackend
    from aengine.model.batch import ForwardBatch
    from aengine.model.decoder import DecoderSpec, LayerSpec
    from aengine.model.loading import WeightReader
    from aengine.model.parallel import ParallelConfig, Shard


class VocabEmbedding:
    """Token embedding, this rank's rows of the vocabulary."""

    def __init__(self, reader: WeightReader, spec: DecoderSpec, parallel: ParallelConfig) -> None:
        shape = (spec.config.vocab_size, spec.config.hidden_size)
        self._shard = parallel.split_vocab(spec.config.vocab_size)
        self._parallel = parallel
        # Gemma was trained with this factor rounded to the model's dtype.
        self._multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=reader.dtype))
        self.weight = reader.matrix("model.embed_tokens.weight", shape, shard=self._shard)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, K]."""
        if self._parallel.world_size == 1:
            hidden = F.embedding(token_ids, self.weight)
        else:
            outside = (token_ids < self._shard.start) | (token_ids >= self._shard.stop)
            local = (token_ids - self._shard.start).masked_fill(outside, 0)
            hidden = F.embedding(local, self.weight) if self._shard.size else self._zeros(local)
            hidden = hidden.masked_fill(outside.unsqueeze(-1), 0)
            hidden = self._parallel.collectives.all_reduce(hidden)
        return hidden if self._multiplier == 1.0 else hidden * self._multiplier

    def _zeros(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.new_zeros((*ids.shape, self.weight.shape[1]))


class VocabHead:
    """Hidden states to logits over the whole vocabulary, in float32."""

    def __init__(
        self,
        reader: WeightReader,
        spec: DecoderSpec,
        parallel: ParallelConfig,
        embedding: VocabEmbedding,
    ) -> None:
        self._size = spec.config.vocab_size
        self._shard = parallel.split_vocab(self._size)
        self._parallel = parallel
        self._spec = spec
        if spec.config.tie_word_embeddings:
            reader.ignore("lm_head.weight")
            self.weight = embedding.weight
        else:
            shape = (self._size, spec.config.hidden_size)
            self.weight = reader.matrix("lm_head.weight", shape, shard=self._shard)

    def __call__(self, hidden: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[S, K] -> [S, V] float32."""
        logits = ops.linear(hidden, self.weight, dtype=torch.float32)
        if self._parallel.world_size > 1:
            share = self._parallel.split_vocab_share(self._size)
            logits = F.pad(logits, (0, share - self._shard.size))  # gathered shards are of one size
            logits = self._parallel.collectives.all_gather(logits)[:, : self._size]
        if self._spec.logits_divisor != 1.0:
            logits = logits / self._spec.logits_divisor
        if self._spec.logit_soft_cap is not None:
            logits = torch.tanh(logits / self._spec.logit_soft_cap) * self._spec.logit_soft_cap
        return logits


class WideNorm:
    """Normalisation of queries or keys over all their heads, this rank's and the others'."""

    def __init__(
        self,
        reader: WeightReader,
        name: str,
        spec: DecoderSpec,
        heads: Shard,
        total_heads: int,
        parallel: ParallelConfig,
    ) -> None:
        dim = spec.config.head_dim
        self._eps = spec.config.rms_norm_eps
        self._width = total_heads * dim
        self._parallel = parallel
        self._repeats = parallel.copies(total_heads)
        self._weight = reader.norm(
            name, self._width, offset=spec.norm_offset, shard=heads.times(dim)
        )

    def __call__(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[T, N, D] -> [T, N, D]."""
        flat = x.flatten(1)
        if self._parallel.world_size == 1:
            return ops.rms_norm(flat, self._weight, self._eps).view(x.shape)
        wide = flat.float()
        squares = self._parallel.collectives.all_reduce(wide.square().sum(-1, keepdim=True))
        mean = squares / (self._width * self._repeats)
        wide = wide * torch.rsqrt(mean + self._eps) * self._weight
        return wide.to(x.dtype).view(x.shape)


class Attention:
    """Grouped-query attention of one layer over its paged cache; this rank's heads."""

    def __init__(
        self,
        reader: WeightReader,
        prefix: str,
        spec: DecoderSpec,
        layer: LayerSpec,
        parallel: ParallelConfig,
        cos_sin: torch.Tensor | None,
    ) -> None:
        config, dim = spec.config, spec.config.head_dim
        q_heads = parallel.split("num_heads", config.num_heads)
        kv_heads = parallel.split_kv_heads(config.num_kv_heads)
        self._heads, self._kv_heads, self._dim = q_heads.size, kv_heads.size, dim
        self._spec, self._layer, self._parallel = spec, layer, parallel
        self._cos_sin = cos_sin
        rows = {
            "q_proj": (config.num_heads * dim, q_heads.times(dim)),
            "k_proj": (config.num_kv_heads * dim, kv_heads.times(dim)),
            "v_proj": (config.num_kv_heads * dim, kv_heads.times(dim)),
        }
        self.qkv = reader.merged_linear(
            prefix, rows, config.hidden_size, spec.qkv_bias, "qkv_proj" if spec.merged else None
        )
        shape = (config.hidden_size, config.num_heads * dim)
        self.o = reader.row_parallel(
            f"{prefix}.o_proj", shape, q_heads.times(dim), spec.o_bias, parallel
        )
        self._head_norm: HeadNorm | None = None
        self._q_norm: WideNorm | None = None
        self._k_norm: WideNorm | None = None
        names = f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"
        if spec.qk_norm == "head":
            q, k = (reader.norm(name, dim, offset=spec.norm_offset) for name in names)
            self._head_norm = HeadNorm(q, k, config.rms_norm_eps)
        elif spec.qk_norm == "full":
            self._q_norm = WideNorm(reader, names[0], spec, q_heads, config.num_heads, parallel)
            self._k_norm = WideNorm(reader, names[1], spec, kv_heads, config.num_kv_heads, parallel)

    def __call__(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        kv: KVLayer,
        backend: AttentionBackend,
        ops: Ops,
    ) -> torch.Tensor:
        """[T, K] -> [T, K]."""
        sizes = [count * self._dim for count in (self._heads, self._kv_heads, self._kv_heads)]
        parts = torch.split(self.qkv(x, ops), sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, self._dim) for part in parts)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q, ops), self._k_norm(k, ops)
        q = backend.write(q, k, v, self._cos_sin, batch, kv, norm=self._head_norm)
        out = backend.attend(
            q,
            batch,
            kv,
            self._spec.scale,
            sliding_window=self._layer.sliding_window,
            soft_cap=self._spec.attention_soft_cap,
        )
        return self._parallel.collectives.all_reduce(self.o(out.flatten(1), ops))
