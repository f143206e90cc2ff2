"""Tokens given without a sample leave the sampler as sampled ones would have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aengine.batch import ForcedTokens, SlotInit
from aengine.execute.sampler import Sampler
from aengine.request import Request, SamplingParams

V = 30


def init(outputs: tuple[int, ...], **params: Any) -> SlotInit:
    request = Request(
        seq_id=1,
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(**{"temperature": 0.0} | params),
        max_tokens=20,
        bad_word_token_ids=((5, 7, 9),) if "bad_words" in params else (),
    )
    return SlotInit(slot=2, request=request, output_token_ids=outputs)


def sampler() -> Sampler:
    return Sampler(max_num_seqs=3, vocab_size=V, device="cpu")


def token(of: Sampler, logits: torch.Tensor, position: int) -> int:
    sampled = of.sample(logits.clone(), np.array([2]), np.array([position]))
    return int(sampled.token_ids[0])


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"bad_words": ("x",)},
        {"frequency_penalty": 1.0, "bad_words": ("x",)},
    ],
    ids=["penalties", "bad words", "both"],
)
def test_forced_tokens_count_like_sampled_ones(params: dict[str, Any]) -> None:
    forced, resumed = sampler(), sampler()
    forced.admit(init((), **params))
    forced.force(ForcedTokens(slot=2, token_ids=(4, 5)))
    forced.force(ForcedTokens(slot=2, token_ids=(7,)))
    resumed.admit(init((4, 5, 7), **params))
    for seed in range(20):
        logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 3
        logits[0, 9] = 20.0  # the end of the bad word
        a, b = token(forced, logits, 6 + seed), token(resumed, logits, 6 + seed)
        assert a == b
        if seed == 0 and "bad_words" in params:
            assert a != 9


def test_processors_see_forced_tokens_in_order() -> None:
    seen: list[tuple[int, ...]] = []

    def look(history: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        seen.append(history)
        return logits

    of = sampler()
    of.admit(init((), logits_processors=(look,)))
    logits = torch.zeros(1, V)
    logits[0, 8] = 1.0
    assert token(of, logits, 3) == 8
    of.force(ForcedTokens(slot=2, token_ids=(4, 6)))
    token(of, logits, 6)
    assert seen == [(), (8, 4, 6)]


def test_rows_that_count_nothing_pay_nothing() -> None:
    of = sampler()
    of.admit(init(()))
    of.force(ForcedTokens(slot=2, token_ids=(4, 6)))
    assert of.table._seen is None
