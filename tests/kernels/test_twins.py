"""The plain-torch norms, rope, activations and experts against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch

from aengine.kernels.activation import gated_activation
from aengine.kernels.attention import KVLayer
from aengine.kernels.moe import moe_mlp, route
from aengine.kernels.norm import add_rms_norm, rms_norm
from aengine.kernels.rope import apply_rope, rope_table, rope_write_kv

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def rms64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms(dtype):
    x, residual = torch.randn(2, 5, 33).to(dtype)
    weight = torch.randn(33)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), rms64(x, weight, 1e-5), **tolerance)
    hidden, total = add_rms_norm(x, residual, weight, 1e-5)
    want = x.double() + residual.double()
    torch.testing.assert_close(total.double(), want, **tolerance)
    torch.testing.assert_close(hidden.double(), rms64(want, weight, 1e-5), **tolerance)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rope_turns_pairs_by_position_times_frequency(rotary_dim):
    half = rotary_dim // 2
    inv_freq = 100.0 ** (-torch.arange(half) / half)
    table = rope_table(inv_freq, 50, scale=1.5)
    assert table.shape == (50, rotary_dim)
    x = torch.randn(4, 3, 16)
    positions = torch.tensor([0, 49, 7, 7])
    got = apply_rope(x, table, positions)
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            turn = complex(math.cos(position * inv_freq[i]), math.sin(position * inv_freq[i])) * 1.5
            for n in range(3):
                want = complex(x[t, n, i], x[t, n, i + half]) * turn
                assert abs(complex(got[t, n, i], got[t, n, i + half]) - want) < 1e-4
    torch.testing.assert_close(got[..., rotary_dim:], x[..., rotary_dim:])


def test_rope_write_kv_is_rope_then_write():
    table = rope_table(torch.tensor([1.0, 0.1, 0.01, 0.001]), 32)
    qkv = torch.randn(5, 4, 8)
    q, k, v = qkv[:, :2], qkv[:, 2:3], qkv[:, 3:]
    want_q, want_k, want_v = (
        apply_rope(q, table, torch.arange(5)),
        apply_rope(k, table, torch.arange(5)),
        v.clone(),
    )
    kv = KVLayer(torch.full((2, 8, 1, 8), math.nan), torch.full((2, 8, 1, 8), math.nan))
    slots = torch.tensor([3, 4, 5, 8, 15])
    got = rope_write_kv(q, k, v, table, torch.arange(5), kv, slots)
    torch.testing.assert_close(got, want_q)
    torch.testing.assert_close(kv.k.view(16, 1, 8)[slots], want_k)
    torch.testing.assert_close(kv.v.view(16, 1, 8)[slots], want_v)


def test_rope_write_kv_normalises_heads_first():
    table = rope_table(torch.tensor([1.0, 0.1, 0.01, 0.001]), 32)
    q, k, v = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    weights = {"q_weight": torch.randn(8), "k_weight": torch.randn(8), "eps": 1e-5}
    kv = KVLayer(torch.zeros(2, 8, 1, 8), torch.zeros(2, 8, 1, 8))
    slots = torch.arange(5)
    got = rope_write_kv(q, k, v, table, torch.arange(5), kv, slots, **weights)
    want_q, want_k = (
        apply_rope(rms64(x, weights[name], 1e-5).float(), table, torch.arange(5))
        for x, name in ((q, "q_weight"), (k, "k_weight"))
    )
    torch.testing.assert_close(got, want_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv.k.view(16, 1, 8)[slots], want_k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv.v.view(16, 1, 8)[slots], v)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated_activation(dtype, activation):
    gate_up = torch.randn(7, 26).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    factor = {
        "silu": 1 / (1 + torch.exp(-gate)),
        "gelu_tanh": 0.5 * (1 + torch.tanh(inner)),
        "gelu": 0.5 * (1 + torch.erf(gate / math.sqrt(2))),
    }[activation]
    out = torch.empty(7, 13, dtype=dtype)
    got = gated_activation(gate_up, activation, out)
    assert got is out
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(got.double(), gate * factor * up, **tolerance)


@pytest.mark.parametrize("normalise", [True, False])
def test_moe_is_the_weighted_sum_of_the_chosen_experts(normalise):
    experts, active, hidden, inner = 6, 2, 12, 5
    x = torch.randn(9, hidden)
    gate_up = torch.randn(experts, 2 * inner, hidden)
    down = torch.randn(experts, hidden, inner)
    logits = torch.randn(9, experts)
    routing = route(logits, active, normalise=normalise)
    got = moe_mlp(x, gate_up, down, routing, "silu")
    for t in range(9):
        probability = logits[t].double().softmax(0)
        chosen = probability.argsort(descending=True)[:active]
        assert routing.experts_TA[t].tolist() == chosen.tolist()
        total = probability[chosen].sum() if normalise else 1.0
        want = torch.zeros(hidden, dtype=torch.float64)
        for e in chosen.tolist():
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            want += (
                probability[e] / total * (down[e].double() @ (gate / (1 + torch.exp(-gate)) * up))
            )
        torch.testing.assert_close(got[t].double(), want, atol=1e-4, rtol=1e-4)
