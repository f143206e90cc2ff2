"""Deltas joined equal decoding all at once; stop strings match as a naive search does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.engine.detokenize import Detokenizer
from aengine.request import SamplingParams
from aengine.testing import EOS, ByteTokenizer

TOKENIZER = ByteTokenizer()


def naive(data: bytes, stops: list[str], keep: bool, min_tokens: int) -> tuple[str, str | None]:
    """Decode every prefix from scratch; the first that holds a stop ends the text."""
    floor = len(data[: max(0, min_tokens - 1)].decode(errors="ignore") if min_tokens else "")
    for count in range(max(1, min_tokens), len(data) + 1):
        decoder_text = shown(data[:count])
        found = [
            (decoder_text.find(s, max(0, floor - len(s) + 1)), s)
            for s in stops
            if decoder_text.find(s, max(0, floor - len(s) + 1)) >= 0
        ]
        if found:
            start, stop = min(found, key=lambda m: (m[0] + len(m[1]), m[0]))
            return decoder_text[: start + len(stop) if keep else start], stop
    return data.decode(errors="replace"), None


def shown(data: bytes) -> str:
    """What is certain of the text of a prefix of the bytes."""
    import codecs

    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def run(data: bytes, cuts: list[int], params: SamplingParams) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(TOKENIZER, params)
    texts, position = [], 0
    for cut in [*cuts, len(data)]:
        piece = data[position : position + cut]
        position += cut
        delta = detokenizer.push(list(piece))
        texts.append(delta.text)
        if delta.stop is not None:
            return texts, delta.stop
    texts.append(detokenizer.finish())
    return texts, None


cuts = st.lists(st.integers(0, 5), max_size=40)


@given(st.text(max_size=40).map(str.encode) | st.binary(max_size=40), cuts)
def test_deltas_joined_equal_decoding_all(data: bytes, cuts: list[int]) -> None:
    """known-faults: llama-cpp-python PR 118, exo PR 1691."""
    texts, _ = run(data, cuts, SamplingParams())
    assert "".join(texts) == data.decode(errors="replace")


@pytest.mark.parametrize("text", ["👩‍👩‍👧 family", "漢字かな交じり", "ภาษาไทย", "مرحبا", "e\u0301"])
def test_no_delta_holds_half_a_character(text: str) -> None:
    texts, _ = run(text.encode(), [1] * 60, SamplingParams())
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == text


@given(
    st.text(alphabet="abé漢", max_size=30),
    st.lists(st.text(alphabet="abé漢", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts,
    st.booleans(),
)
def test_stop_strings_match_as_a_naive_search_does(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    """known-faults: V#3574, V PR 45636."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep)
    texts, stop = run(text.encode(), cuts, params)
    assert ("".join(texts), stop) == naive(text.encode(), stops, keep, 0)


@given(st.text(alphabet="ab", max_size=20), st.integers(1, 12))
def test_min_tokens_exempts_what_came_before(text: str, min_tokens: int) -> None:
    params = SamplingParams(stop=["ab"], min_tokens=min_tokens)
    texts, stop = run(text.encode(), [1] * 20, params)
    assert ("".join(texts), stop) == naive(text.encode(), ["ab"], False, min_tokens)


def test_the_hold_back_is_the_smallest_possible() -> None:
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=["abcd"]))
    shown = [detokenizer.push([byte]).text for byte in b"xaabcx"]
    assert shown == ["x", "", "a", "", "", "abcx"]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    for skip in (True, False):
        detokenizer = Detokenizer(TOKENIZER, SamplingParams(skip_special_tokens=skip))
        assert detokenizer.push([ord("a"), EOS]).text + detokenizer.finish() == "a"
