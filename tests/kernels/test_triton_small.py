"""Triton norms, activations, rope and KV writes against their twins and float64."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels import activation as activation_twin
from aengine.kernels import norm as norm_twin
from aengine.kernels import rope as rope_twin
from aengine.kernels.attention import KVLayer, write_kv
from aengine.kernels.triton_activation import gated_activation
from aengine.kernels.triton_norm import add_rms_norm, rms_norm
from aengine.kernels.triton_rope import rope_write_kv
from aengine.kernels.triton_rope import write_kv as triton_write_kv

from .triton_device import DEVICE, needs_device, poison, relative_error

pytestmark = needs_device

BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("width", [33, 576, 4096])
def test_norms(dtype, width):
    x, residual = random(2, 5, width, dtype=dtype)
    weight = random(width)
    poison()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert relative_error(got, norm_twin.rms_norm(x.double(), weight, 1e-5)) < BOUND[dtype]
    want = norm_twin.add_rms_norm(x.double(), residual.double(), weight, 1e-5)
    result = add_rms_norm(x, residual, weight, 1e-5)
    assert result.residual is residual, "the sum takes the residual's place"
    assert relative_error(result.hidden, want.hidden) < BOUND[dtype]
    assert relative_error(result.residual, want.residual) < BOUND[dtype]


def test_norms_of_strided_rows():
    """Heads within a merged projection, a row of one dimension, and no row at all."""
    merged = random(5, 6, 20)
    weight = random(20)
    got = rms_norm(merged[:, 1:4], weight, 1e-6)
    torch.testing.assert_close(got, norm_twin.rms_norm(merged[:, 1:4], weight, 1e-6))
    got = rms_norm(merged[2, 3], weight, 1e-6)
    torch.testing.assert_close(got, norm_twin.rms_norm(merged[2, 3], weight, 1e-6))
    flat = merged.flatten(1)
    x, residual = flat[:, :20], flat[:, 40:60].clone()
    want = norm_twin.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(add_rms_norm(x, flat[:, 40:60], weight, 1e-6).hidden, want.hidden)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-6).residual, want.residual)
    assert rms_norm(merged[:0], weight, 1e-6).shape == (0, 6, 20)
    assert add_rms_norm(flat[:0, :20], flat[:0, :20], weight, 1e-6).hidden.shape == (0, 20)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated_activation(dtype, activation):
    gate_up = random(7, 2 * 1030, dtype=dtype)
    out = torch.full((7, 1030), float("nan"), dtype=dtype, device=DEVICE)
    assert gated_activation(gate_up, activation, out) is out
    want = activation_twin.gated_activation(gate_up.double(), activation)
    assert relative_error(out, want) < BOUND[dtype]
    torch.testing.assert_close(gated_activation(gate_up, activation), out)
    assert gated_activation(gate_up[:0], activation).shape == (0, 1030)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(4, 2, 16, 16), (9, 3, 64, 64), (10, 10, 80, 32), (17, 1, 20, 12)],
)
@pytest.mark.parametrize("norm", [False, True])
def test_rope_write_kv(dtype, heads, kv_heads, dim, rotary_dim, norm):
    tokens, page = 5, 16
    table = rope_twin.rope_table(torch.logspace(0, -2, rotary_dim // 2), 200, scale=1.25).to(DEVICE)
    merged = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = merged.split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.tensor([0, 199, 17, 18, 3], device=DEVICE)
    slots = torch.tensor([40, 3, 17, 18, 63], device=DEVICE)
    kv, want_kv = (
        KVLayer(*torch.full((2, 4, page, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE))
        for _ in range(2)
    )
    weights = {}
    old_q, old_k = q.clone(), k.clone()
    if norm:
        weights = {"q_weight": random(dim), "k_weight": random(dim), "eps": 1e-3}
        old_q = norm_twin.rms_norm(q, weights["q_weight"], 1e-3)
        old_k = norm_twin.rms_norm(k, weights["k_weight"], 1e-3)
    untouched = k.clone(), v.clone()
    want = rope_twin.rope_write_kv(old_q, old_k, v, table, positions, want_kv, slots)
    got = rope_write_kv(q, k, v, table, positions, kv, slots, **weights)
    assert relative_error(got, want) < BOUND[dtype]
    assert relative_error(kv.k, want_kv.k) < BOUND[dtype]
    assert torch.equal(kv.v, want_kv.v)
    assert torch.equal(k, untouched[0])
    assert torch.equal(v, untouched[1])


def test_write_kv_touches_its_slots_alone_and_converts():
    merged = random(3, 3, 5, 24)
    slots = torch.tensor([9, 31, 0], device=DEVICE)
    got, want = (
        KVLayer(*torch.zeros(2, 4, 8, 5, 24, dtype=torch.float16, device=DEVICE)) for _ in range(2)
    )
    triton_write_kv(merged[:, 1], merged[:, 2], got, slots)
    write_kv(merged[:, 1], merged[:, 2], want, slots)
    assert torch.equal(got.k, want.k)
    assert torch.equal(got.v, want.v)
    triton_write_kv(merged[:0, 1], merged[:0, 2], got, slots[:0])
