"""Projections of few rows against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.activation import gated_activation
from aengine.kernels.triton_linear import LinearTile, few_rows_linear, gated_linear, linear

from .triton_device import DEVICE, needs_device, poison, relative_error

pytestmark = needs_device
TILES = [
    LinearTile(outputs=4, inputs=64, warps=1, plain=True),
    LinearTile(outputs=16, inputs=64, warps=2, stages=2),
]


@pytest.mark.parametrize("tile", TILES, ids=["plain", "products"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 33, 100), (3, 48, 64), (17, 7, 130)])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh", "gelu"])
def test_few_rows(tile, rows, outputs, inputs, activation):
    if tile.plain and rows > 1:
        pytest.skip("for one row")
    wide = torch.randn(rows, inputs + 5)
    outer = outputs * (1 if activation is None else 2)
    x, weight = wide[:, :inputs], torch.randn(outer, inputs) / inputs**0.5
    poison()
    got = few_rows_linear(wide.to(DEVICE)[:, :inputs], weight.to(DEVICE), activation, tile=tile)
    want = F.linear(x.double(), weight.double())
    if activation is not None:
        want = gated_activation(want, activation)
    assert got.shape == (rows, outputs)
    assert relative_error(got, want) < 1e-5


def test_the_result_may_be_wider_than_the_operands():
    half = torch.float16  # under the interpreter bfloat16 is not what it is on a GPU
    x, weight = torch.randn(2, 96).to(DEVICE, half), (torch.randn(40, 96) / 10).to(DEVICE, half)
    got = few_rows_linear(x, weight, tile=TILES[1], dtype=torch.float32)
    assert got.dtype == torch.float32
    assert relative_error(got, F.linear(x.double(), weight.double())) < 1e-5


@pytest.mark.parametrize("rows", [1, 5, 32, 33])
def test_the_chosen_way_computes_the_same(rows):
    x, weight = torch.randn(rows, 64).to(DEVICE), (torch.randn(48, 64) / 8).to(DEVICE)
    x, weight = x.half(), weight.half()
    want = F.linear(x.double(), weight.double())
    assert relative_error(linear(x, weight, dtype=torch.float32), want) < 1e-3
    assert relative_error(gated_linear(x, weight, "silu"), gated_activation(want, "silu")) < 3e-3


def test_no_rows():
    x = torch.empty(0, 8, device=DEVICE)
    assert few_rows_linear(x, torch.ones(3, 8, device=DEVICE), tile=TILES[1]).shape == (0, 3)


def test_a_row_is_the_same_in_any_batch():
    x, weight = torch.randn(9, 200, device=DEVICE), torch.randn(40, 200, device=DEVICE)
    tile = LinearTile(outputs=16, inputs=64, warps=2, stages=2)
    whole = few_rows_linear(x, weight, tile=tile)
    for row in range(9):
        assert torch.equal(few_rows_linear(x[row : row + 1], weight, tile=tile)[0], whole[row])
