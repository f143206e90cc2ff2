"""Matchers: masks, forced tokens, the end, rolling back, forks, errors by state."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aengine.errors import GenerationError
from aengine.grammar import GrammarCompiler
from aengine.request import StructuredOutput

from .support import (
    EOS,
    OTHER_EOS,
    allowed,
    byte_info,
    dumps,
    feed,
    ids_of,
    text_of,
    walk,
)

if TYPE_CHECKING:
    from aengine.grammar import GrammarMatcher, TokenizerInfo

_DOCUMENT = {"name": "Ann", "tags": ["x", "y"], "n": 12}
_ONE_PATH = StructuredOutput.json(
    {"const": _DOCUMENT, "x-guidance": {"whitespace_flexible": False}}
)
_OBJECT = StructuredOutput.json(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)


def _greedy(matcher: GrammarMatcher, info: TokenizerInfo, rng: np.random.Generator) -> list[int]:
    """A decode loop as the engine runs it: logits, mask, argmax, advance."""
    row = np.zeros(info.mask_words, dtype=np.int32)
    taken: list[int] = []
    while not matcher.is_terminated:
        matcher.fill_bitmask(row)
        legal = sorted(ids_of(row))
        logits = rng.normal(size=info.vocab_size) + 1000.0
        logits[legal] = -1000.0 - np.arange(len(legal))  # the model wants anything but these
        mask = np.unpackbits(row.view(np.uint8), bitorder="little")[: info.vocab_size]
        token = int(np.where(mask == 1, logits, -np.inf).argmax())
        matcher.advance(token)
        taken.append(token)
    return taken


def test_adversarial_logits_with_one_legal_path(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    """V#26292, V#29379: no fragment twice, no step lost, whatever the logits say."""
    grammar = compiler.compile(_ONE_PATH)
    for seed in range(20):
        taken = _greedy(grammar.matcher(), info, np.random.default_rng(seed))
        assert text_of(taken, info) == dumps(_DOCUMENT)
        assert taken[-1] in info.eos_ids


def test_first_token_advances_before_the_first_decode_mask(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    """S#25388: the token sampled after prefill is part of the text."""
    matcher = compiler.compile(_OBJECT).matcher()
    first = allowed(matcher, info)
    matcher.advance(ord("{"))
    second = allowed(matcher, info)
    assert ord("{") in first
    assert ord("{") not in second
    assert ord('"') in second


def test_mask_allows_exactly_what_advance_takes(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    rng = random.Random(3)
    matcher = compiler.compile(_OBJECT).matcher()
    while not matcher.is_terminated:
        mask = allowed(matcher, info)
        for token in sorted({*mask, *range(0, info.vocab_size, 7), *b'"{}:,0a', EOS}):
            trial = matcher.fork()
            try:
                trial.advance(token)
            except GenerationError:
                assert token not in mask
            else:
                assert token in mask
        matcher.advance(rng.choice(sorted(mask)))


def test_only_the_forced_text_is_allowed(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    matcher = compiler.compile(_ONE_PATH).matcher()
    taken: list[int] = []
    while forced := matcher.forced_tokens():
        for i, token in enumerate(forced):
            mask = allowed(matcher, info)
            assert token in mask
            if token in info.eos_ids:
                assert mask == set(info.eos_ids)
            else:
                ahead = b"".join(info.tokens[t] for t in forced[i:])
                for other in mask:
                    spelled = info.tokens[other]
                    assert ahead.startswith(spelled) or spelled.startswith(ahead)
            matcher.advance(token)
            taken.append(token)
    assert matcher.is_terminated
    assert text_of(taken, info) == dumps(_DOCUMENT)


def test_jump_forward_ends_where_single_steps_end(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(_OBJECT)
    rng = random.Random(5)
    jumped = 0
    for _ in range(10):
        tokens = walk(grammar.matcher(), info, rng)
        assert tokens is not None
        text = text_of(tokens, info).encode()
        matcher, at = grammar.matcher(), 0
        while at < len(text):
            forced = matcher.forced_tokens()
            spelled = b"".join(info.tokens[t] for t in forced) or text[at : at + 1]
            assert text.startswith(spelled, at)
            for token in forced or spelled:
                matcher.advance(token)
            at += len(spelled)
            jumped += len(forced) > 0
        assert matcher.is_complete
        assert matcher.forced_tokens() == (EOS,)
    assert jumped >= 10


def test_nothing_is_forced_where_there_is_a_choice(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutput.choice(["alpha", "beta"])).matcher()
    assert matcher.forced_tokens() == ()


def test_forced_text_is_spelled_by_the_tokenizer() -> None:
    spelled: list[str] = []

    def encode(text: str) -> list[int]:
        spelled.append(text)
        return list(text.encode())

    info = byte_info(encode)
    with_encode = GrammarCompiler(info)
    matcher = with_encode.compile(StructuredOutput.choice(["name"])).matcher()
    # The last token is left open, since the text after it could merge with it.
    assert matcher.forced_tokens() == tuple(b"name")
    assert "name" in spelled


@pytest.mark.parametrize("fault", ["raises", "wrong text", "out of range"])
def test_a_faulty_encode_falls_back_to_longest_match(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    def encode(text: str) -> list[int]:
        if fault == "raises":
            raise RuntimeError("boom")
        return [ord("x")] if fault == "wrong text" else [10**9]

    info = byte_info(encode)
    matcher = GrammarCompiler(info).compile(StructuredOutput.choice(["name"])).matcher()
    assert text_of(list(matcher.forced_tokens()), info) == "name"


def test_end_is_allowed_when_complete_and_alone_when_nothing_else_may_follow(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    open_ended = compiler.compile(StructuredOutput.regex("[0-9]+")).matcher()
    assert not open_ended.is_complete
    assert not allowed(open_ended, info) & {EOS, OTHER_EOS}
    feed(open_ended, "1")
    assert open_ended.is_complete
    assert {EOS, OTHER_EOS, ord("2")} <= allowed(open_ended, info)
    closed = compiler.compile(StructuredOutput.regex("[0-9]")).matcher()
    feed(closed, "1")
    assert allowed(closed, info) == {EOS, OTHER_EOS}
    assert closed.forced_tokens() == (EOS,)


@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_after_the_end_only_ends_follow(
    end: int, compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    matcher = compiler.compile(StructuredOutput.regex("[0-9]+")).matcher()
    feed(matcher, "1")
    matcher.advance(end)
    assert matcher.is_terminated
    assert matcher.forced_tokens() == ()
    assert allowed(matcher, info) == {EOS, OTHER_EOS}
    matcher.advance(EOS)  # ignore_eos goes on sampling
    with pytest.raises(GenerationError):
        matcher.advance(ord("2"))


def test_end_before_the_text_is_whole_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutput.regex("[0-9]{2}")).matcher()
    feed(matcher, "1")
    with pytest.raises(GenerationError):
        matcher.advance(EOS)


def test_special_and_padding_tokens_are_never_allowed(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    matcher = compiler.compile(StructuredOutput.regex("(?s:.)*")).matcher()
    mask = allowed(matcher, info)
    assert mask & info.special_ids == {EOS, OTHER_EOS}
    assert max(mask) < len(info.tokens) < info.vocab_size


@pytest.mark.parametrize("token", [ord("x"), -1, 299, 10**6])
def test_an_illegal_token_ends_this_matcher_and_no_other(
    token: int, compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    """S#21171: a failure is reported at once and stays reported."""
    grammar = compiler.compile(StructuredOutput.regex("[0-9]+"))
    good, bad = grammar.matcher(), grammar.matcher()
    with pytest.raises(GenerationError):
        bad.advance(token)
    assert not good.is_complete
    feed(good, "1")
    assert ord("2") in allowed(good, info)


def test_a_failed_matcher_stays_failed(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    matcher = compiler.compile(StructuredOutput.regex("[0-9]+")).matcher()
    feed(matcher, "1")
    with pytest.raises(GenerationError, match="taking token"):
        matcher.advance(ord("x"))
    assert not matcher.is_complete
    for call in (
        lambda: allowed(matcher, info),
        matcher.forced_tokens,
        lambda: matcher.rollback(1),
        lambda: matcher.advance(ord("2")),
    ):
        with pytest.raises(GenerationError):
            call()


def test_a_dead_end_is_an_error_and_not_an_end(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    """The library's mask allows the end token then, which would pass a broken text as whole."""
    matcher = compiler.compile(StructuredOutput.grammar('start: "a" b\nb: b "x"')).matcher()
    matcher.advance(ord("a"))
    with pytest.raises(GenerationError):
        allowed(matcher, info)


def test_rollback_restores_every_earlier_mask(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(_OBJECT)
    rng = random.Random(11)
    for _ in range(8):
        tokens = walk(grammar.matcher(), info, rng)
        assert tokens is not None
        matcher = grammar.matcher()
        masks = []
        for token in tokens:
            masks.append(allowed(matcher, info))
            matcher.advance(token)
        back = rng.randint(1, len(tokens))
        matcher.rollback(back)
        for at in range(len(tokens) - back, len(tokens)):
            assert allowed(matcher, info) == masks[at]
            matcher.advance(tokens[at])
        assert matcher.is_terminated


def test_rollback_of_too_much_is_refused(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutput.regex("[0-9]+")).matcher()
    feed(matcher, "12")
    for count in (3, -1):
        with pytest.raises(ValueError, match="roll back"):
            matcher.rollback(count)
    matcher.rollback(0)
    matcher.rollback(2)
    assert not matcher.is_complete


def test_forks_are_independent(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    matcher = compiler.compile(StructuredOutput.choice(["ab1", "ab2"])).matcher()
    feed(matcher, "ab")
    fork = matcher.fork()
    feed(fork, "1")
    assert allowed(fork, info) == {EOS, OTHER_EOS}
    assert allowed(matcher, info) == {ord("1"), ord("2")}
    fork.rollback(3)
    assert not allowed(fork, info) & {ord("1"), EOS}


def test_filling_many_rows_equals_filling_each(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    specs = [_OBJECT, StructuredOutput.regex("[0-9]+"), StructuredOutput.json_object()]
    matchers = [compiler.compile(spec).matcher() for spec in specs]
    matchers.append(compiler.compile(specs[1]).matcher())
    feed(matchers[1], "12")
    feed(matchers[3], "1")
    matchers[3].advance(EOS)
    bitmask = np.full((6, info.mask_words), 7, dtype=np.int32)
    assert compiler.backend.fill_bitmasks(matchers, bitmask) == {}
    for i, matcher in enumerate(matchers):
        assert ids_of(bitmask[i]) == allowed(matcher, info)
    assert (bitmask[4:] == 7).all()
    assert compiler.backend.fill_bitmasks([], bitmask) == {}


def test_a_failed_row_of_many_is_named(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    grammar = compiler.compile(StructuredOutput.regex("[0-9]+"))
    matchers = [grammar.matcher() for _ in range(3)]
    with pytest.raises(GenerationError):
        matchers[1].advance(ord("x"))
    bitmask = np.zeros((3, info.mask_words), dtype=np.int32)
    failed = compiler.backend.fill_bitmasks(matchers, bitmask)
    assert list(failed) == [1]
    assert isinstance(failed[1], GenerationError)
    assert ids_of(bitmask[2]) == set(range(ord("0"), ord("9") + 1)) | {info.tokens.index(b"12")}


def test_masks_of_a_wrong_shape_are_refused(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    matcher = compiler.compile(_OBJECT).matcher()
    words = info.mask_words
    for row in (
        np.zeros(words + 1, np.int32),
        np.zeros(words, np.int64),
        np.zeros(2 * words, np.int32)[::2],
    ):
        with pytest.raises(ValueError, match="int32"):
            matcher.fill_bitmask(row)
    for bitmask in (
        np.zeros((1, words + 1), np.int32),
        np.zeros((0, words), np.int32),
        np.zeros((1, 2 * words), np.int32)[:, ::2],
    ):
        with pytest.raises(ValueError, match="bitmask"):
            compiler.backend.fill_bitmasks([matcher], bitmask)


def test_matchers_of_one_grammar_run_in_many_threads(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(_OBJECT)
    start = threading.Barrier(8)

    def run(seed: int) -> str:
        start.wait(timeout=30)
        tokens = walk(grammar.matcher(), info, random.Random(seed))
        assert tokens is not None
        return text_of(tokens, info)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(8)))
    alone = [text_of(walk(grammar.matcher(), info, random.Random(s)) or [], info) for s in range(8)]
    assert together == alone


def test_one_matcher_survives_calls_from_two_threads(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    matcher = compiler.compile(StructuredOutput.regex("[0-9]*")).matcher()

    def fill() -> None:
        for _ in range(300):
            assert EOS in allowed(matcher, info)

    with ThreadPoolExecutor(2) as pool:
        filling = pool.submit(fill)
        for _ in range(300):
            matcher.advance(ord("1"))
        filling.result()
    matcher.rollback(300)
