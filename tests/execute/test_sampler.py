"""`Sampler` against a naive float64 loop: every parameter, in any batch, through churn.

The loop is `tests.engine.naive.Rules`: one sequence, whole rows, no state but the lists of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.batch import ForcedTokens, SlotInit
from aengine.errors import GenerationError
from aengine.execute.sampler import Sampler
from aengine.kernels import sampling, sampling_cpu
from aengine.request import Request, SamplingParams
from aengine.testing import EOS, ByteTokenizer
from tests.engine.naive import Rules, log_softmax

V = 257
SLOTS = 5
FILES: Any = SimpleNamespace(tokenizer=ByteTokenizer(), end_token_ids=frozenset({EOS}))


@pytest.fixture(params=[sampling_cpu, sampling], ids=["cpu", "twin"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return request.param


def spiky(outputs: Any, logits: torch.Tensor) -> torch.Tensor:
    """A processor that depends on what was generated."""
    changed = logits.clone()
    changed[(sum(outputs) * 7) % V] += 4.0
    return changed


tokens = st.integers(0, V - 1)
optional: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-50, 1e-3, 0.4, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 1, 3, 40, 257, 10**6]),
    "top_p": st.sampled_from([1e-9, 0.2, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-6, 0.05, 0.9, 1.0]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.3, 3),
    "logit_bias": st.dictionaries(tokens, st.floats(-100, 100), min_size=1, max_size=5),
    "allowed_token_ids": st.lists(tokens, min_size=1, max_size=30),
    "bad_words": st.lists(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=6),
    "min_tokens": st.integers(1, 8),
    "stop_token_ids": st.lists(tokens, max_size=5),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 20),
    "logits_processors": st.just((spiky,)),
}
options = st.fixed_dictionaries({"seed": st.integers(-(2**63), 2**64 - 1)}, optional=optional)


@dataclass
class Life:
    """A request in the naive loop and in the sampler."""

    request: Request
    rules: Rules
    slot: int = 0
    outputs: list[int] = field(default_factory=list)


def life(seq_id: int, given_options: dict[str, Any], prompt: list[int], index: int) -> Life:
    params = SamplingParams(**{"max_tokens": 99} | given_options)
    words = [
        tuple(text.encode()) for word in params.bad_words for text in (word, " " + word.lstrip())
    ]
    request = Request(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        prompt_token_ids=tuple(prompt),
        params=params,
        max_tokens=99,
        end_token_ids=frozenset({EOS}),
        index=index,
        bad_word_token_ids=tuple(dict.fromkeys(words)),
    )
    return Life(request, Rules(FILES, params, prompt, index, 999))


class Bench:
    """A sampler whose slots change hands; every token is compared with the naive one."""

    def __init__(self, kernels: Any) -> None:
        self.sampler = Sampler(max_num_seqs=SLOTS, vocab_size=V, device="cpu", kernels=kernels)

    def admit(self, each: Life, slot: int) -> None:
        """For the first time, or again after a preemption, in whatever slot."""
        each.slot = slot
        outputs = tuple(each.outputs)
        init = SlotInit(slot=slot, request=each.request, output_token_ids=outputs)
        self.sampler.admit(init)

    def step(self, lives: list[Life], seed: int, masks: bool = False) -> None:
        """Sample these in one call."""
        logits = logits_for(len(lives), seed)
        raw = logits.double().numpy().copy()
        slots = np.array([each.slot for each in lives], dtype=np.int32)
        positions = [len(each.rules.prompt) + len(each.outputs) for each in lives]
        allowed = np.ones((len(lives), V), dtype=bool)
        extra: dict[str, Any] = {}
        if masks:
            rows = np.arange(0, len(lives), 2)
            allowed[rows] = np.random.default_rng(seed).random((len(rows), V)) < 0.3
            words = np.zeros((len(rows), -(-V // 32) * 32), dtype=np.uint8)
            words[:, :V] = allowed[rows]
            bits = np.packbits(words, axis=1, bitorder="little").view(np.int32)
            extra = {"bitmask": torch.from_numpy(bits), "bitmask_rows": rows}
        sampled = self.sampler.sample(logits, slots, np.array(positions, dtype=np.int64), **extra)
        read = sampled.start_copy().read()
        for row, each in enumerate(lives):
            wanted = each.rules.choose(raw[row], each.outputs, allowed[row])
            if wanted is None:
                assert isinstance(read.errors[row], GenerationError)
                assert read.errors[row].request_id == each.request.request_id
                # The engine ends it here; the loop goes on with what the sampler chose.
                each.outputs.append(read.token_ids[row])
                continue
            assert row not in read.errors
            assert read.token_ids[row] == wanted, each.request.params
            assert self.sampler.future_map[each.slot] == wanted
            each.outputs.append(wanted)
            self.check_logprobs(each, read.logprobs.get(row), log_softmax(raw[row]), wanted)

    def check_logprobs(self, each: Life, found: Any, wanted: Any, token: int) -> None:
        """Of the raw logits: no penalty, mask or temperature shows in them."""
        count = each.request.params.logprobs
        if count is None:
            assert found is None
            return
        assert found.token_id == token
        assert found.logprob == pytest.approx(wanted[token], abs=1e-5)
        assert found.rank == (wanted > wanted[token]).sum() + 1
        order = np.argsort(-wanted, kind="stable")[:count]
        assert [t for t, _ in found.top] == order.tolist()
        assert [p for _, p in found.top] == pytest.approx(wanted[order].tolist(), abs=1e-5)


def logits_for(rows: int, seed: int) -> torch.Tensor:
    """Rows that favour few tokens, so that penalties and bad words meet what they are about."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (rows, V))
    logits[:, 97:100] += 6.0
    logits[:, EOS] += 6.0
    return torch.from_numpy(logits.astype(np.float32))


@given(
    requests=st.lists(
        st.tuples(options, st.lists(tokens, min_size=1, max_size=6), st.integers(0, 3)),
        min_size=1,
        max_size=7,
    ),
    moves=st.lists(st.integers(0, 2**32), min_size=1, max_size=25),
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_every_parameter_in_any_batch_through_churn(requests: Any, moves: list[int]) -> None:
    """known-faults: V#27878, S#22049. Sequences take slots, give way, come back elsewhere, are
    given forced tokens, and sit out steps; each samples what it would alone."""
    for kernels in (sampling_cpu, sampling):
        bench = Bench(kernels)
        waiting = [life(i, *each) for i, each in enumerate(requests)]
        running: list[Life] = []
        for move in moves:
            rng = np.random.default_rng(move)
            if running and rng.random() < 0.35:
                waiting.append(running.pop(rng.integers(len(running))))
            while waiting and len(running) < SLOTS and rng.random() < 0.8:
                free = sorted(set(range(1, SLOTS + 1)) - {each.slot for each in running})
                running.append(waiting.pop(rng.integers(len(waiting))))
                bench.admit(running[-1], int(rng.choice(free)))
            if running and rng.random() < 0.3:
                lucky = running[rng.integers(len(running))]
                forced = tuple(rng.integers(97, 100, rng.integers(1, 4)).tolist())
                bench.sampler.force(ForcedTokens(slot=lucky.slot, token_ids=forced))
                lucky.outputs += forced
            batch = [each for each in running if rng.random() < 0.8]
            rng.shuffle(batch)  # type: ignore[arg-type]
            if batch:
                bench.step(batch, move, masks=rng.random() < 0.3)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.02}])
def test_v51187_a_seed_says_the_same_alone_and_in_any_batch(
    kernels: Any, truncation: dict[str, Any]
) -> None:
    """Bit for bit: the same logits give the same token at each position, whoever is beside it."""
    mine = {"seed": 12, "temperature": 1.1, **truncation}

    def answer(neighbours: int, slot: int) -> list[int]:
        bench = Bench(kernels)
        one = life(0, mine, [5, 6], 0)
        bench.admit(one, slot)
        free = [s for s in range(1, SLOTS + 1) if s != slot][:neighbours]
        others = []
        for i, s in enumerate(free):
            wants = {"seed": i, "temperature": [0.0, 0.7, 1.5, 2.0][i], "top_k": [0, 3, 0, 9][i]}
            others.append(life(i + 1, wants, [7] * (i + 1), 0))
            bench.admit(others[-1], s)
        for step in range(30):
            logits = logits_for(1, step).repeat(neighbours + 1, 1)
            rows = [*others[: step % (neighbours + 1)], one, *others[step % (neighbours + 1) :]]
            sampled = bench.sampler.sample(
                logits,
                np.array([each.slot for each in rows], dtype=np.int32),
                np.array([len(each.rules.prompt) + len(each.outputs) for each in rows]),
            )
            for each, token in zip(rows, sampled.token_ids.tolist(), strict=True):
                each.outputs.append(token)
        return one.outputs

    alone = answer(0, 1)
    assert len(set(alone)) > 5
    assert answer(0, 4) == alone
    assert answer(3, 2) == alone
    assert answer(4, 5) == alone


def test_the_completions_of_a_seed_differ_and_no_seed_is_random(kernels: Any) -> None:
    texts = set()
    for index, seed in [(0, 3), (1, 3), (2, 3), (0, 4), (0, None), (0, None)]:
        bench, one = Bench(kernels), life(0, {"seed": seed, "temperature": 1.0}, [1], index)
        bench.admit(one, 1)
        for step in range(20):
            sampled = bench.sampler.sample(
                logits_for(1, step), np.array([1]), np.array([1 + len(one.outputs)])
            )
            one.outputs.append(int(sampled.token_ids[0]))
        texts.add(tuple(one.outputs))
    assert len(texts) == 6


def broken(outputs: Any, logits: Any) -> Any:
    raise ZeroDivisionError("no such thing")


def misshapen(outputs: Any, logits: Any) -> Any:
    return logits[:-1]


def not_numbers(outputs: Any, logits: Any) -> Any:
    return logits * float("nan")


def greedy_hands(outputs: Any, logits: Any) -> Any:
    logits.zero_()  # what it was given is its own
    return [1.0] * V


@pytest.mark.parametrize("processor", [broken, misshapen, not_numbers, greedy_hands])
def test_nnsight_641_mlx_lm_1513_a_processor_that_fails_is_its_rows_fault(
    kernels: Any, processor: Any
) -> None:
    """known-faults: one row's exception in a batch of eight; here of five, every place."""
    for place in range(SLOTS):
        bench = Bench(kernels)
        lives = [life(i, {"seed": i, "temperature": 0.9}, [i], 0) for i in range(SLOTS)]
        lives[place] = life(9, {"logits_processors": [processor]}, [9], 0)
        for slot, each in enumerate(lives, start=1):
            bench.admit(each, slot)
        logits = logits_for(SLOTS, place)
        raw = logits.double().numpy().copy()
        slots = np.arange(1, SLOTS + 1, dtype=np.int32)
        read = (
            bench.sampler.sample(logits, slots, np.ones(SLOTS, dtype=np.int64)).start_copy().read()
        )
        assert list(read.errors) == [place]
        assert processor.__name__ in str(read.errors[place])
        assert read.errors[place].request_id == "r9"
        for row, each in enumerate(lives):
            if row != place:
                assert read.token_ids[row] == each.rules.choose(raw[row], [], None)


def test_rows_that_use_nothing_pay_for_nothing() -> None:
    """A greedy batch is one argmax: no other kernel is called, no counts are kept."""
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                calls.append(name)
                return getattr(sampling_cpu, name)(*args)

            return call

    bench = Bench(Counting())
    lives = [life(i, {"temperature": 0.0}, [i], 0) for i in range(SLOTS)]
    for slot, each in enumerate(lives, start=1):
        bench.admit(each, slot)
    for step in range(3):
        bench.step(lives, step)
    assert calls == ["argmax"] * 3
    assert bench.sampler.table._seen is None
    calls.clear()
    bench.admit(life(7, {"temperature": 0.0, "presence_penalty": 1.0}, [1], 0), 2)
    bench.sampler.sample(logits_for(2, 9), np.array([1, 2]), np.array([4, 1]))
    assert sorted(calls) == ["argmax", "count_", "peaks", "penalise_"]
