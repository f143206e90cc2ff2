"""`AttentionBackend`: how a layer's keys and values get into the paged cache and are read back.

A backend belongs to one lane: it may keep a workspace or a plan of the batch in progress (law 6).
The model gets it by argument; there is no current context.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aengine.kernels.attention import plan_attention, run_attention, write_kv
from aengine.kernels.norm import rms_norm
from aengine.kernels.rope import rope_write_kv

if TYPE_CHECKING:
    import torch

    from aengine.kernels.attention import AttentionGroup, KVLayer
    from aengine.model.batch import ForwardBatch


class HeadNorm(NamedTuple):
    """An RMS norm of each head of queries and keys, before they turn: weights [D] and epsilon."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class AttentionBackend(Protocol):
    """Shape legend as in `aengine.kernels.attention`: T tokens, N query and H key heads, D dims."""

    def write(
        self,
        q_TND: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        cos_sin: torch.Tensor | None,
        batch: ForwardBatch,
        kv: KVLayer,
        *,
        norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        """Normalise the heads of queries and keys (if `norm` is given), rotate them (unless
        `cos_sin` is None), write keys and values at the batch's slots, and return the queries,
        [T, N, D]. May change `q_TND` in place."""
        ...

    def attend(
        self,
        q_TND: torch.Tensor,
        batch: ForwardBatch,
        kv: KVLayer,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention over the paged context: [T, N, D], contiguous."""
        ...


class _Planned(threading.local):
    """What is kept of a batch. By thread: two lanes of a CPU, each a thread, compute at once."""

    def __init__(self) -> None:
        self.batch: ForwardBatch | None = None
        self.plans: dict[int | None, list[AttentionGroup]] = {}


class TorchBackend:
    """The plain-torch attention, for CPUs and as the oracle of others.

    Index arithmetic and masks are the same for all layers of a batch with the same window, so they
    are planned at the first one and kept until another batch comes.
    """

    def __init__(self) -> None:
        self._planned = _Planned()

    def write(
        self,
        q_TND: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        cos_sin: torch.Tensor | None,
        batch: ForwardBatch,
        kv: KVLayer,
        *,
        norm: HeadNorm | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.write`."""
        if norm is not None:
            q_TND = rms_norm(q_TND, norm.q_weight, norm.eps)
            k_THD = rms_norm(k_THD, norm.k_weight, norm.eps)
        if cos_sin is None:
            write_kv(k_THD, v_THD, kv, batch.slot_mapping)
            return q_TND
        return rope_write_kv(q_TND, k_THD, v_THD, cos_sin, batch.positions, kv, batch.slot_mapping)

    def attend(
        self,
        q_TND: torch.Tensor,
        batch: ForwardBatch,
        kv: KVLayer,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan = self._plan(q_TND, batch, kv, sliding_window)
        return run_attention(q_TND, kv, plan, scale, soft_cap=soft_cap)

    def _plan(
        self, q_TND: torch.Tensor, batch: ForwardBatch, kv: KVLayer, window: int | None
    ) -> list[AttentionGroup]:
        if self._planned.batch is not batch:
            self._planned.batch, self._planned.plans = batch, {}
        if window not in self._planned.plans:
            self._planned.plans[window] = plan_attention(
                batch.block_tables,
                batch.query_start,
                batch.context_lens,
                block_size=kv.k.shape[1],
                elements_a_position=kv.k.shape[2] * kv.k.shape[3],
                dtype=q_TND.dtype,
                sliding_window=window,
                num_decode=batch.num_decode,
                max_context_len=batch.max_context_len,
            )
        return self._planned.plans[window]
