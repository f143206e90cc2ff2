"""GGUF tensors under their Hugging Face names and in Hugging Face's row order.

llama.cpp rotates neighbouring pairs of a head's dimensions, Hugging Face the two halves. Its
converter therefore stores the rows of the q and k projections of the Llama family pairwise:
within a head, row `2 i + j` is Hugging Face's row `j * head_dim / 2 + i`. Blocks of quantised
numbers lie along a row, so whole rows move and no number is decoded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from aengine.errors import ModelLoadError
from aengine.model.tensors import TensorTable, WeightTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aengine.model.config import ModelConfig
    from aengine.model.gguf import GGUFFile, GGUFTensor
    from aengine.model.tensors import FloatArray, IntArray, WeightSource

_PAIRWISE = frozenset({"llama"})
"""Architectures (GGUF names) whose q and k rows are stored pairwise."""

_ROPE_FACTORS = "rope_freqs.weight"

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    Raises:
        ModelLoadError: no supported architecture has such a tensor.
    """
    if name in _OUTER:
        return _OUTER[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        raise ModelLoadError(
            f"the GGUF file has the tensor {name!r}, which no supported architecture uses: its "
            "output would be wrong without it"
        )
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def rope_factors(file: GGUFFile) -> FloatArray | None:
    """The divisors of the rotary frequencies, [head_dim / 2], if the file brings its own."""
    tensor = file.tensors.get(_ROPE_FACTORS)
    return None if tensor is None else _plain(_ROPE_FACTORS, tensor).dequantize().reshape(-1)


def gguf_weights(file: GGUFFile, config: ModelConfig) -> WeightSource:
    """The file's tensors, renamed and with their rows in Hugging Face's order.

    Raises:
        ModelLoadError: a tensor that no supported architecture has, or two with one name.
    """
    pairwise = file.metadata["general.architecture"] in _PAIRWISE
    orders = _row_orders(config) if pairwise else {}
    tensors: dict[str, WeightTensor] = {}
    for name, stored in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        new = hf_name(name)
        if new in tensors:
            raise ModelLoadError(f"{file.path} has two tensors for {new!r}")
        tensors[new] = _tensor(new, stored, orders)
    return TensorTable(str(file.path), tensors)


def _row_orders(config: ModelConfig) -> dict[str, IntArray]:
    """Projection name -> the stored row for each Hugging Face row."""
    half = config.head_dim // 2
    head = np.arange(config.head_dim).reshape(half, 2).T.reshape(-1)
    return {
        name: (np.arange(heads)[:, None] * config.head_dim + head).reshape(-1)
        for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads))
    }


def _tensor(name: str, stored: GGUFTensor, orders: Mapping[str, IntArray]) -> WeightTensor:
    order = orders.get(name.split(".")[-2])
    if order is None:
        return _plain(name, stored)
    if stored.shape[0] != len(order):
        raise ModelLoadError(
            f"the tensor {name!r} has {stored.shape[0]} rows; heads and head size of the model "
            f"make {len(order)}"
        )
    if len(stored.shape) > 1:
        return WeightTensor(name, stored.shape, stored.type_name, stored.data, order)
    # A bias is one row of numbers: each element moves as a row of its own.
    if stored.type_name not in ("F32", "F16", "BF16"):
        raise ModelLoadError(f"the bias {name!r} has type {stored.type_name}: F32 is supported")
    elements = stored.data.reshape(len(order), -1)
    return WeightTensor(name, stored.shape, stored.type_name, elements, order)


def _plain(name: str, stored: GGUFTensor) -> WeightTensor:
    return WeightTensor(name, stored.shape, stored.type_name, stored.data)
