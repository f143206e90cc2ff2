"""The real vocabulary of 49,152 tokens: many spellings, padded masks, forced text as spelled."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import jsonschema
import numpy as np
import pytest

from aengine.grammar import GrammarCompiler, describe
from aengine.model.gguf import read_gguf
from aengine.model.tokenizer_gguf import tokenizer_from_gguf
from aengine.request import StructuredOutput

from .support import allowed, dumps, ids_of, text_of, walk

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.grammar import TokenizerInfo
    from aengine.model.tokenizer import Tokenizer

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
            "required": ["street", "n"],
        },
    },
    "required": ["name", "tags", "address"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def info(tokenizer: Tokenizer) -> TokenizerInfo:
    return describe(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size + 64)


@pytest.fixture(scope="module")
def compiler(info: TokenizerInfo) -> GrammarCompiler:
    return GrammarCompiler(info)


def test_walks_validate(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    grammar = compiler.compile(StructuredOutput.json(_SCHEMA))
    ended = 0
    for seed in range(4):
        tokens = walk(grammar.matcher(), info, random.Random(seed), limit=150)
        if tokens is not None:
            jsonschema.validate(json.loads(text_of(tokens, info)), _SCHEMA)
            ended += 1
    assert ended


def test_one_legal_path_against_the_models_will(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    document = {"name": "Ann Lee", "n": 12}
    spec = StructuredOutput.json({"const": document, "x-guidance": {"whitespace_flexible": False}})
    matcher = compiler.compile(spec).matcher()
    row = np.zeros(info.mask_words, dtype=np.int32)
    taken: list[int] = []
    while not matcher.is_terminated:
        matcher.fill_bitmask(row)
        token = max(ids_of(row))
        matcher.advance(token)
        taken.append(token)
    assert text_of(taken, info) == dumps(document)


def test_forced_text_is_spelled_as_the_tokenizer_spells_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    text = "The quick brown fox, über and naïve; 12,345 times."
    matcher = compiler.compile(StructuredOutput.choice([text])).matcher()
    forced: list[int] = []
    while not matcher.is_terminated:
        step = matcher.forced_tokens()
        assert step
        for token in step:
            matcher.advance(token)
            forced.append(token)
    assert forced[:-1] == tokenizer.encode(text, add_special_tokens=False)


def test_padding_and_special_tokens_are_never_allowed(
    compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    matcher = compiler.compile(StructuredOutput.regex(r"(?s:.)*")).matcher()
    mask = allowed(matcher, info)
    assert mask & info.special_ids == set(info.eos_ids)
    assert max(mask) < len(info.tokens)
    assert len(mask) > 40_000
