"""Models bound to their KV cache: what `ModelRunner` calls once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from aengine.kernels.attention import KVLayer
    from aengine.model.attention import AttentionBackend
    from aengine.model.batch import ForwardBatch
    from aengine.model.causal_lm import CausalLM


class TorchForward:
    """A `CausalLM` computed by torch.

    Args:
        model: the network with its weights.
        kv_cache: one entry a layer.
        backend: attention; it belongs to the stream that the forward runs on.
    """

    def __init__(
        self, model: CausalLM, kv_cache: Sequence[KVLayer], backend: AttentionBackend
    ) -> None:
        self.vocab_size = model.vocab_size
        self._model = model
        self._kv_cache = kv_cache
        self._backend = backend

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab_size] float32."""
        return self._model.forward(batch, self._kv_cache, self._backend)
