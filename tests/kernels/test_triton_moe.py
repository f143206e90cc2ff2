"""The experts on Triton against the twin in float64: odd sizes, idle experts, one busy expert."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.moe import Routing, moe_mlp, route
from aengine.kernels.triton_moe import moe_mlp as triton_moe_mlp
from tests.kernels.triton_device import DEVICE, INTERPRETED, needs_device, poison, relative_error

pytestmark = needs_device

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compare(
    tokens: int,
    experts: int,
    active: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    routing: Routing | None = None,
) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    torch.manual_seed(tokens + experts)
    x = torch.randn(tokens, hidden).to(dtype)
    gate_up = (torch.randn(experts, 2 * width, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, width) / width**0.5).to(dtype)
    if routing is None:
        routing = route(torch.randn(tokens, experts), active, normalise=True)
    wide = (x.double(), gate_up.double(), down.double())
    want = moe_mlp(*wide, routing, "silu")
    poison()
    moved = [tensor.to(DEVICE) for tensor in (x, gate_up, down)]
    chosen = Routing(routing.weights_TA.to(DEVICE), routing.experts_TA.to(DEVICE))
    got = triton_moe_mlp(*moved, chosen, "silu")
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "experts", "active", "hidden", "width"),
    [(1, 4, 2, 64, 32), (5, 8, 3, 72, 40), (33, 3, 2, 96, 24), (70, 2, 1, 64, 16)],
)
def test_equals_the_twin(
    tokens: int, experts: int, active: int, hidden: int, width: int, dtype: torch.dtype
) -> None:
    compare(tokens, experts, active, hidden, width, dtype)


def test_one_expert_gets_all_and_the_others_none() -> None:
    everywhere = Routing(torch.ones(40, 1), torch.full((40, 1), 5))
    compare(40, 6, 1, 48, 16, torch.float32, everywhere)


def test_experts_in_blocks_of_many_sizes() -> None:
    """15, 16, 17, 0 and 1 pairs: around the size of a block of rows."""
    experts = torch.tensor([0] * 15 + [1] * 16 + [2] * 17 + [4])
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(3))
    routing = Routing(torch.rand(len(experts), 1), experts[order].unsqueeze(1))
    compare(len(experts), 5, 1, 32, 16, torch.float32, routing)


def test_no_tokens() -> None:
    empty = Routing(
        torch.zeros(0, 2, device=DEVICE), torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    )
    x = torch.zeros(0, 32, device=DEVICE)
    weights = torch.zeros(4, 32, 32, device=DEVICE), torch.zeros(4, 32, 16, device=DEVICE)
    assert triton_moe_mlp(x, *weights, empty, "silu").shape == (0, 32)
