"""The Triton kernels as a model's operators and attention; imported only where Triton is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.kernels.ops import Ops
from aengine.kernels.triton_activation import gated_activation
from aengine.kernels.triton_attention import paged_attention
from aengine.kernels.triton_decode import DecodeWorkspace
from aengine.kernels.triton_linear import gated_linear, linear
from aengine.kernels.triton_moe import moe_mlp
from aengine.kernels.triton_norm import add_rms_norm, rms_norm
from aengine.kernels.triton_rope import rope_write_kv, write_kv

if TYPE_CHECKING:
    import torch

    from aengine.kernels.attention import KVLayer
    from aengine.model.attention import HeadNorm
    from aengine.model.batch import ForwardBatch
    from aengine.model.causal_lm import CausalLM


def triton_ops() -> Ops:
    """Norms, activations and experts by Triton; none of them waits for the device."""
    return Ops(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        linear=linear,
        gated_linear=gated_linear,
        gated_activation=gated_activation,
        moe_mlp=moe_mlp,
    )


class TritonBackend:
    """Paged attention by Triton, for one lane.

    Args:
        model: whose heads the workspace is made for.
        max_rows: most decode rows of a batch.
        context_hint: the context length that decode launches are cut for. One for all steps,
            however long their contexts are: each way to cut is a compilation of its own.
        device: where the workspace goes.
    """

    def __init__(
        self, model: CausalLM, *, max_rows: int, context_hint: int, device: torch.device
    ) -> None:
        self._context_hint = context_hint
        self._workspace = DecodeWorkspace.allocate(
            max_rows=max_rows,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.config.head_dim,
            device=device,
        )

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
        """See `aengine.model.attention.AttentionBackend.write`: one launch, where heads turn."""
        if cos_sin is None:
            if norm is not None:
                q_TND = rms_norm(q_TND, norm.q_weight, norm.eps)
                k_THD = rms_norm(k_THD, norm.k_weight, norm.eps)
            write_kv(k_THD, v_THD, kv, batch.slot_mapping)
            return q_TND
        return rope_write_kv(
            q_TND,
            k_THD,
            v_THD,
            cos_sin,
            batch.positions,
            kv,
            batch.slot_mapping,
            q_weight=None if norm is None else norm.q_weight,
            k_weight=None if norm is None else norm.k_weight,
            eps=0.0 if norm is None else norm.eps,
        )

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
        """See `aengine.model.attention.AttentionBackend.attend`."""
        return paged_attention(
            q_TND,
            kv,
            batch.block_tables,
            batch.query_start,
            batch.context_lens,
            scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            num_decode=batch.num_decode,
            max_query_len=batch.max_query_len,
            max_context_len=self._context_hint,
            workspace=self._workspace,
        )
