"""Sampling kernels of the CPU and their torch twin against float64, and the random numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from aengine.execute.sampler_state import stream_key
from aengine.kernels import sampling, sampling_cpu
from aengine.kernels.sampling import DrawParams, PenaltyParams, counter_uniform, mix64
from tests.engine import naive

KERNELS: list[Any] = [sampling, sampling_cpu]
SIZES = [1, 40, 129, 5000, 49_152]


@pytest.fixture(params=KERNELS, ids=["twin", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return request.param


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2.5


# -- random numbers --------------------------------------------------------------------------------


def chi_square(counts: Any, expected: Any) -> float:
    """How many standard deviations the statistic lies above its mean (many degrees of freedom)."""
    counts, expected = np.asarray(counts, dtype=float), np.asarray(expected, dtype=float)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def test_mix64_and_uniforms_are_those_of_plain_integers() -> None:
    rng = np.random.default_rng(3)
    edges = [0, 1, -1, 2**63 - 1, -(2**63)]
    keys = np.array([*edges, *rng.integers(-(2**63), 2**63, 200)], dtype=np.int64)
    positions = np.array([*range(5), *rng.integers(0, 2**40, 200)], dtype=np.int64)
    wanted = [naive.mix64(int(k) & naive.MASK64) for k in keys]
    assert mix64(keys).view(np.uint64).tolist() == wanted
    uniforms = [
        naive.uniform(int(k) & naive.MASK64, int(p)) for k, p in zip(keys, positions, strict=True)
    ]
    assert counter_uniform(keys, positions).tolist() == uniforms


def test_uniforms_of_tensors_are_those_of_arrays_bit_for_bit() -> None:
    rng = np.random.default_rng(4)
    keys = rng.integers(-(2**63), 2**63, 5000)
    positions = rng.integers(0, 2**20, 5000)
    array = counter_uniform(keys, positions)
    tensor = counter_uniform(torch.from_numpy(keys), torch.from_numpy(positions))
    assert array.dtype == np.float64
    assert tensor.dtype == torch.float64
    assert tensor.tolist() == array.tolist()
    assert array.min() >= 0
    assert array.max() < 1


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_uniforms_of_one_stream_are_even_and_do_not_follow_each_other(seed: int) -> None:
    positions = np.arange(200_000)
    drawn = counter_uniform(np.full(200_000, stream_key(seed, 0)), positions)
    assert abs(chi_square(np.histogram(drawn, 256, (0, 1))[0], np.full(256, 200_000 / 256))) < 5
    pairs = np.histogram2d(drawn[:-1], drawn[1:], 16, ((0, 1), (0, 1)))[0]
    assert abs(chi_square(pairs.ravel(), np.full(256, 199_999 / 256))) < 5


@pytest.mark.parametrize("neighbour", ["seeds", "completions"])
def test_neighbouring_streams_are_independent(neighbour: str) -> None:
    """Seeds 0, 1, 2 ... (and the n completions of one seed) at the same position."""
    streams = range(30_000)
    keys = [stream_key(i, 0) if neighbour == "seeds" else stream_key(7, i) for i in streams]
    assert len(set(keys)) == len(keys)
    for position in (0, 17):
        drawn = counter_uniform(np.array(keys), np.full(len(keys), position))
        expected = np.full(64, len(keys) / 64)
        assert abs(chi_square(np.histogram(drawn, 64, (0, 1))[0], expected)) < 5
        pairs = np.histogram2d(drawn[:-1], drawn[1:], 8, ((0, 1), (0, 1)))[0]
        assert abs(chi_square(pairs.ravel(), np.full(64, (len(keys) - 1) / 64))) < 5


# -- the draw --------------------------------------------------------------------------------------


def draw_params(uniform: Any, **options: Any) -> DrawParams:
    """The same temperature and truncation for each row."""
    rows = len(uniform)
    chosen = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0} | options
    reals = {
        name: torch.full((rows,), chosen[name], dtype=torch.float64)
        for name in ("temperature", "top_p", "min_p")
    }
    truncated = bool(chosen["top_k"]) or chosen["top_p"] < 1 or chosen["min_p"] > 0
    return DrawParams(
        uniform=torch.as_tensor(uniform, dtype=torch.float64),
        top_k=torch.full((rows,), chosen["top_k"], dtype=torch.int64),
        truncated=truncated,
        largest_top_k=chosen["top_k"] or None,
        **reals,
    )


def shares(logits_V: torch.Tensor, **options: Any) -> Any:
    """The probability of each token in float64."""
    chosen = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0} | options
    scores = logits_V.double().numpy()
    weights = np.exp((scores - scores.max()) / chosen["temperature"])
    kept = np.ones(len(scores), dtype=bool)
    if 0 < chosen["top_k"] < len(scores):
        kept &= scores >= np.sort(scores)[-chosen["top_k"]]
    if chosen["top_p"] < 1:
        order = np.argsort(-scores, kind="stable")
        sums = np.cumsum((weights * kept)[order])
        kept &= scores >= scores[order[(sums < chosen["top_p"] * sums[-1]).sum()]]
    kept &= weights >= chosen["min_p"]
    return weights * kept / (weights * kept).sum()


OPTIONS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product([0.3, 1.0, 2.0], [0, 1, 7, 2000], [1.0, 0.9, 0.05], [0, 0.1])
]


@pytest.mark.parametrize("vocabulary", SIZES)
def test_each_draw_lies_in_its_tokens_interval(kernels: Any, vocabulary: int) -> None:
    some = OPTIONS if vocabulary < 5000 else OPTIONS[::5]
    for number, options in enumerate(some):
        logits = logits_of(3, vocabulary, number)
        rng = np.random.default_rng(number)
        uniform = rng.random(3)
        uniform[0] = rng.choice([0.0, 1 - 2.0**-52, uniform[0]])
        params = draw_params(uniform, **options)
        tokens = kernels.draw(logits, torch.arange(3), kernels.peaks(logits), params).tolist()
        for row, token in enumerate(tokens):
            share = shares(logits[row], **options)
            assert share[token] > 0, options
            upto = np.cumsum(share)
            assert upto[token] - share[token] - 1e-5 <= uniform[row] <= upto[token] + 1e-5, options


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 9}, {"top_p": 0.8}])
def test_draws_are_distributed_as_they_should(kernels: Any, options: dict[str, Any]) -> None:
    count, vocabulary = 20_000, 40
    logits_V = logits_of(1, vocabulary, 5)[0] * 0.6
    share = shares(logits_V, **options)
    uniform = counter_uniform(np.full(count, stream_key(11, 0)), np.arange(count))
    logits = logits_V.repeat(count, 1)
    drawn = kernels.draw(
        logits, torch.arange(count), kernels.peaks(logits), draw_params(uniform, **options)
    )
    counts = np.bincount(drawn.numpy(), minlength=vocabulary)
    assert counts[share == 0].sum() == 0
    assert abs(chi_square(counts[share > 0], share[share > 0] * count)) < 4


def test_equal_logits_share_their_fate(kernels: Any) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]]).repeat(400, 1)
    uniform = np.arange(400) / 400
    for options in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}):
        params = draw_params(uniform, **options)
        drawn = kernels.draw(logits, torch.arange(400), kernels.peaks(logits), params)
        assert set(drawn.tolist()) == {1, 2, 3}, options


@pytest.mark.parametrize("vocabulary", [40, 5000, 49_152])
def test_a_row_draws_the_same_whatever_is_beside_it(kernels: Any, vocabulary: int) -> None:
    logits = logits_of(6, vocabulary, 9)
    logits[1] = -torch.inf
    logits[4, 3] = torch.nan
    uniform = np.random.default_rng(1).random(6)
    for options in ({}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.05, "temperature": 1.3}):
        together = kernels.draw(
            logits, torch.arange(6), kernels.peaks(logits), draw_params(uniform, **options)
        )
        assert ((together >= 0) & (together < vocabulary)).all()
        for row in (0, 2, 3, 5):
            alone = logits[row : row + 1].clone()
            params = draw_params(uniform[row : row + 1], **options)
            drawn = kernels.draw(alone, torch.arange(1), kernels.peaks(alone), params)
            assert drawn[0] == together[row]
        some = torch.tensor([5, 2])
        params = draw_params(uniform[[5, 2]], **options)
        drawn = kernels.draw(logits, some, kernels.peaks(logits), params)
        assert drawn.tolist() == together[some].tolist()


# -- the rest --------------------------------------------------------------------------------------


def test_argmax_and_peaks(kernels: Any) -> None:
    logits = logits_of(4, 5000)
    logits[1, [7, 4000]] = 50.0
    logits[2] = -torch.inf
    logits[3, 9] = torch.nan
    assert kernels.argmax(logits)[:2].tolist() == [logits[0].argmax().item(), 7]
    assert kernels.peaks(logits).isfinite().tolist() == [True, True, False, False]


@pytest.mark.parametrize("vocabulary", SIZES)
def test_a_mask_forbids_what_its_bits_say(kernels: Any, vocabulary: int) -> None:
    logits = logits_of(3, vocabulary)
    before = logits.clone()
    allowed = np.random.default_rng(vocabulary).random((2, vocabulary)) < 0.5
    padded = np.zeros((2, -(-vocabulary // 32) * 32), dtype=np.uint8)
    padded[:, :vocabulary] = allowed
    padded[:, vocabulary:] = 1  # bits of no token
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    kernels.apply_bitmask_(logits, torch.from_numpy(bits), torch.tensor([2, 0]))
    for row, mask in ((2, allowed[0]), (0, allowed[1])):
        assert torch.equal(logits[row][torch.from_numpy(mask)], before[row][torch.from_numpy(mask)])
        assert (logits[row][torch.from_numpy(~mask)] == -torch.inf).all()
    assert torch.equal(logits[1], before[1])


def test_penalties_and_counts_are_those_of_a_loop(kernels: Any) -> None:
    vocabulary, rng = 300, np.random.default_rng(8)
    for trial in range(20):
        seen = torch.zeros(5, vocabulary, dtype=torch.int32)
        prompts = [set(rng.integers(0, vocabulary, 30).tolist()) for _ in range(2)]
        outputs: list[list[int]] = [[], []]
        slots = torch.tensor([4, 1])
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            seen[slot, sorted(prompt)] = 1
        for _ in range(25):
            tokens = rng.integers(0, 40, 2)
            kernels.count_(seen, slots, torch.from_numpy(tokens))
            for output, token in zip(outputs, tokens.tolist(), strict=True):
                output.append(token)
        values = rng.uniform([0.5, -2, -2], [2, 2, 2], (2, 3))
        params = PenaltyParams(
            repetition=torch.from_numpy(values[:, 0].copy()),
            presence=torch.from_numpy(values[:, 1].copy()),
            frequency=torch.from_numpy(values[:, 2].copy()),
        )
        logits = logits_of(3, vocabulary, trial)
        wanted = logits.double().numpy()
        kernels.penalise_(logits, torch.tensor([2, 0]), slots, seen, params)
        for row, prompt, output, (factor, presence, frequency) in zip(
            (2, 0), prompts, outputs, values, strict=True
        ):
            for token in prompt | set(output):
                wanted[row, token] *= 1 / factor if wanted[row, token] > 0 else factor
            for token in set(output):
                wanted[row, token] -= presence + frequency * output.count(token)
        np.testing.assert_allclose(logits.double().numpy(), wanted, atol=1e-4)
        others = [0, 2, 3]
        assert not seen[others].any()
