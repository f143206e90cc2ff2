"""Triton sampling against its twin, and the drawn tokens against exact intervals in float64."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels import sampling as twin
from aengine.kernels import triton_sampling as kernels
from aengine.kernels.sampling import DrawParams, PenaltyParams

from .triton_device import DEVICE, INTERPRETED, needs_device, poison

pytestmark = [
    *needs_device,
    # Under the interpreter numpy warns of infinities, which these kernels mean.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SIZES = [65, 4096, 9001] if INTERPRETED else [65, 4096, 9001, 128_256]


def random_logits(rows: int, vocabulary: int, spread: float = 2.5) -> torch.Tensor:
    return torch.randn(rows, vocabulary, device=DEVICE) * spread


def draw_params(
    rows: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> DrawParams:
    reals = torch.tensor([temperature, top_p, min_p], dtype=torch.float64, device=DEVICE)
    reals = reals.repeat(rows, 1)
    truncated = bool(top_k) or top_p < 1 or min_p > 0
    return DrawParams(
        uniform=torch.rand(rows, dtype=torch.float64).to(DEVICE),
        temperature=reals[:, 0],
        top_p=reals[:, 1],
        min_p=reals[:, 2],
        top_k=torch.full((rows,), top_k, device=DEVICE),
        truncated=truncated,
        largest_top_k=top_k if top_k and truncated else None,
    )


def exact_interval(
    logits_V: torch.Tensor, params: DrawParams, row: int, token: int
) -> tuple[float, float]:
    """The part of [0, 1) that draws this token, in float64; empty if the token is not kept."""
    logits = logits_V.double().cpu()
    temperature, top_p = float(params.temperature[row]), float(params.top_p[row])
    top_k, min_p = int(params.top_k[row]), float(params.min_p[row])
    weights = ((logits - logits.max()) / temperature).exp()
    kept = torch.ones_like(weights, dtype=torch.bool)
    order = logits.sort(descending=True).values
    if 0 < top_k < len(logits):
        kept &= logits >= order[top_k - 1]
    if top_p < 1:
        mass = (weights * kept).sum() * top_p
        sums = ((order - order[0]) / temperature).exp().cumsum(0)
        last = int((sums < mass * (1 - 1e-6)).sum())
        kept &= logits >= order[min(last, len(order) - 1)]
    kept &= weights >= min_p * (1 - 1e-5)
    weights = weights * kept
    upto = weights.cumsum(0) / weights.sum()
    return float(upto[token] - weights[token] / weights.sum()), float(upto[token])


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax_and_peaks(vocabulary, dtype):
    logits = random_logits(5, vocabulary).to(dtype)
    logits[1] = -float("inf")
    logits[2, 7] = float("nan")
    logits[3, 11], logits[3, vocabulary - 2] = 50.0, 50.0
    poison()
    found, tokens = kernels.peaks(logits), kernels.argmax(logits)
    assert found.dtype == torch.float32
    assert found.isfinite().tolist() == [True, False, False, True, True]
    for row in (0, 3, 4):
        assert found[row] == logits[row].max()
        assert tokens[row] == logits[row].argmax()
    assert tokens[3] == 11, "the first of equals"
    assert bool(((tokens >= 0) & (tokens < vocabulary)).all())
    assert kernels.argmax(logits[:0]).shape == (0,)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_bitmask(vocabulary):
    got = random_logits(4, vocabulary)
    want = got.clone()
    words = -(-vocabulary // 32)
    mask = torch.randint(-(2**31), 2**31, (2, words), dtype=torch.int64).to(torch.int32).to(DEVICE)
    rows = torch.tensor([3, 1], device=DEVICE)
    kernels.apply_bitmask_(got, mask, rows)
    twin.apply_bitmask_(want, mask, rows)
    assert torch.equal(got, want)


def test_penalties_and_counts():
    vocabulary = 9001
    got = random_logits(4, vocabulary)
    want = got.clone()
    seen = (torch.randint(0, 8, (6, vocabulary)) * (torch.rand(6, vocabulary) < 0.1)).int()
    seen = seen.to(DEVICE)
    rows, slots = torch.tensor([2, 0], device=DEVICE), torch.tensor([5, 3], device=DEVICE)
    reals = torch.tensor([[1.3, 0.5, 0.25], [0.9, -0.5, 1.0]], dtype=torch.float64, device=DEVICE)
    params = PenaltyParams(repetition=reals[:, 0], presence=reals[:, 1], frequency=reals[:, 2])
    kernels.penalise_(got, rows, slots, seen, params)
    twin.penalise_(want, rows, slots, seen, params)
    torch.testing.assert_close(got, want)
    counted = seen.clone()
    tokens = torch.tensor([9000, 17], device=DEVICE)
    kernels.count_(seen, slots, tokens)
    twin.count_(counted, slots, tokens)
    assert torch.equal(seen, counted)


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.7, "min_p": 0.02},
        {"top_k": 10_000_000, "top_p": 0.999},
    ],
    ids=str,
)
def test_draw_takes_the_token_whose_interval_holds_the_uniform(vocabulary, rules):
    rows = 2 if INTERPRETED else 16
    logits = random_logits(rows + 1, vocabulary)
    order = torch.randperm(rows + 1)[:rows].to(DEVICE)
    params = draw_params(rows, **rules)
    poison()
    tokens = kernels.draw(logits, order, kernels.peaks(logits), params)
    for row, token in enumerate(tokens.tolist()):
        low, high = exact_interval(logits[order[row]], params, row, token)
        assert low - 2e-5 <= float(params.uniform[row]) <= high + 2e-5
        assert high > low, "the token is one that is kept"


def test_ties_share_their_fate():
    """Equal logits at the bound are all kept, and a row may consist of them."""
    logits = torch.zeros(3, 500, device=DEVICE)
    logits[0, 100:110] = 5.0
    logits[1, 3] = 9.0
    for _ in range(4):
        params = draw_params(3, top_k=3, top_p=0.5)
        tokens = kernels.draw(logits, torch.arange(3, device=DEVICE), kernels.peaks(logits), params)
        want = twin.draw(logits, torch.arange(3, device=DEVICE), twin.peaks(logits), params)
        assert torch.equal(tokens, want)
        assert 100 <= int(tokens[0]) < 110


def test_forbidden_tokens_are_never_drawn():
    logits = random_logits(2, 5000)
    logits[:, 3:4990] = -float("inf")
    rows = torch.arange(2, device=DEVICE)
    for rules in ({"top_k": 100}, {"top_p": 0.99}, {"temperature": 50.0}):
        tokens = kernels.draw(logits, rows, kernels.peaks(logits), draw_params(2, **rules))
        assert bool(((tokens < 3) | (tokens >= 4990)).all())


def test_rows_that_cannot_be_sampled_give_a_valid_id_and_disturb_none():
    logits = random_logits(3, 700)
    logits[0], logits[2, 5] = -float("inf"), float("nan")
    rows = torch.arange(3, device=DEVICE)
    params = draw_params(3, top_k=5, top_p=0.9)
    tokens = kernels.draw(logits, rows, kernels.peaks(logits), params)
    assert bool(((tokens >= 0) & (tokens < 700)).all())
    low, high = exact_interval(logits[1], params, 1, int(tokens[1]))
    assert low - 2e-5 <= float(params.uniform[1]) <= high + 2e-5


def test_a_rows_token_is_the_same_alone_and_in_a_batch():
    rows = 3 if INTERPRETED else 40
    logits = random_logits(rows, 5000)
    params = draw_params(rows, top_p=0.95)
    everything = torch.arange(rows, device=DEVICE)
    together = kernels.draw(logits, everything, kernels.peaks(logits), params)
    alone = DrawParams(
        **{
            name: getattr(params, name)[1:2]
            for name in ("uniform", "temperature", "top_k", "top_p", "min_p")
        },
        truncated=True,
        largest_top_k=None,
    )
    one = kernels.draw(logits[1:2], everything[:1], kernels.peaks(logits[1:2]), alone)
    assert int(one) == int(together[1])
