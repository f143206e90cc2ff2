"""Models bound to their KV cache: what `ModelRunner` calls once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from aengine.execute.inputs import HostBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.kernels.attention import KVLayer
    from aengine.kernels.native import NativeModel
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


class NativeForward:
    """A quantised model computed by the CPU kernels, a step in one call.

    Args:
        model: the packed model.
        kv_cache: one float16 or float32 entry a layer; kept alive here, used by address.
    """

    def __init__(self, model: NativeModel, kv_cache: Sequence[KVLayer]) -> None:
        self.vocab_size = model.spec.vocab_size
        self._model = model
        self._kv_cache = kv_cache
        self._keys = [layer.k.data_ptr() for layer in kv_cache]
        self._values = [layer.v.data_ptr() for layer in kv_cache]
        self._blocks = tuple(kv_cache[0].k.shape[:2])
        dtype = kv_cache[0].k.dtype
        if dtype not in (torch.float16, torch.float32):
            raise ValueError(f"keys and values of {dtype}: the CPU kernels take float16 or float32")
        self._kv_itemsize = dtype.itemsize

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab_size] float32."""
        index = batch.logit_index
        return self.compute(
            HostBatch(
                token_ids=batch.token_ids.numpy(),
                positions=batch.positions.numpy(),
                slot_mapping=batch.slot_mapping.numpy(),
                query_start=batch.query_start.numpy(),
                context_lens=batch.context_lens.numpy(),
                block_tables=batch.block_tables.numpy(),
                logit_index=np.arange(len(batch.token_ids)) if index is None else index.numpy(),
            )
        )

    def compute(self, batch: HostBatch) -> torch.Tensor:
        """The same, of arrays."""
        logits = np.empty((len(batch.logit_index), self.vocab_size), dtype=np.float32)
        num_blocks, block_size = self._blocks
        # Two lanes may call at once.
        with self._model.busy:
            self._model.forward(
                **batch._asdict(),
                keys=self._keys,
                values=self._values,
                kv_itemsize=self._kv_itemsize,
                num_blocks=num_blocks,
                block_size=block_size,
                out=logits,
            )
        return torch.from_numpy(logits)
