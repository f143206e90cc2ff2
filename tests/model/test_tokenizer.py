"""Token ids equal llama.cpp's, whatever the pre-tokenizer; bytes and text come back whole.

The expected ids were made by `benchmarks/make_token_ids.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aengine.model.gguf import read_gguf
from aengine.model.tokenizer_gguf import tokenizer_from_gguf

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "smollm2_token_ids.json").read_text()
)
CORPUS: list[str] = DATA["corpus"]


@pytest.fixture(scope="module")
def metadata(smollm2_gguf: Path) -> dict[str, Any]:
    return dict(read_gguf(smollm2_gguf).metadata)


@pytest.mark.parametrize("pre", sorted(DATA["pre"]))
def test_ids_equal_llama_cpps(pre: str, metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": pre})
    wrong = [
        text
        for text, ids in zip(CORPUS, DATA["pre"][pre], strict=True)
        if tokenizer.encode(text, add_special_tokens=False) != ids
    ]
    assert wrong == []


def test_special_tokens_in_plain_text_are_text(metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(metadata)
    for text, ids in zip(CORPUS, DATA["plain"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == ids


def test_every_text_comes_back(metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(metadata)
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_long_text_cut_into_pieces_has_the_same_ids(metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(metadata)
    text = "\n".join(CORPUS) * 200
    whole = tokenizer._library.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    assert tokenizer.encode(text, add_special_tokens=False) == whole


def test_sentencepiece_ids_equal_llama_cpps() -> None:
    entry = DATA["sentencepiece"]
    tokenizer = tokenizer_from_gguf(entry["metadata"])
    for text, ids in zip(CORPUS, entry["ids"], strict=True):
        if "\0" in text:
            continue  # llama.cpp reads the vocabulary piece "\\0" as an empty string
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_no_text_has_fewer_tokens_than_its_length_tells(metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(metadata)
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))
    spelled = tokenizer.token_bytes(longest).decode()
    for text in (*CORPUS, spelled * 50, "\n" * 5000, " " * 5000, "x" * 5000, "<|im_start|>" * 50):
        found = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.fewest_tokens(text) <= len(found)
    assert tokenizer.fewest_tokens("x" * 5_000_000) > 30_000
    assert tokenizer_from_gguf(DATA["sentencepiece"]["metadata"]).fewest_tokens("x" * 999) == 0
