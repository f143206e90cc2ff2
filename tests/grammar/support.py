"""What the grammar tests share: a small vocabulary, masks as sets, random walks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.errors import GenerationError
from aengine.grammar import TokenizerInfo

if TYPE_CHECKING:
    import random

    from aengine.grammar import GrammarMatcher

EOS = 256
OTHER_EOS = 257
CALL = 258
PIECES = (
    b'{"',
    b'":',
    b'", "',
    b'"}',
    b"name",
    b"true",
    b"null",
    b"  ",
    b"12",
    b"ab",
    "é".encode(),
)
"""Tokens of several bytes, so that a text has many spellings."""


def byte_info(encode: Any = None, vocab_size: int = 0) -> TokenizerInfo:
    """All bytes, two end tokens, one special token, a few longer pieces."""
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>", b"<end>", b"<call>", *PIECES]
    return TokenizerInfo(
        tokens=tokens,
        eos_ids=(EOS, OTHER_EOS),
        special_ids=frozenset({EOS, OTHER_EOS, CALL}),
        vocab_size=vocab_size,
        encode=encode,
    )


def allowed(matcher: GrammarMatcher, info: TokenizerInfo) -> set[int]:
    """The token ids that the matcher's mask allows."""
    row = np.zeros(info.mask_words, dtype=np.int32)
    matcher.fill_bitmask(row)
    return ids_of(row)


def ids_of(row: np.ndarray[Any, Any]) -> set[int]:
    """The token ids whose bits are set."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def text_of(tokens: list[int], info: TokenizerInfo) -> str:
    """The text of tokens, end tokens left out."""
    return b"".join(info.tokens[t] for t in tokens if t not in info.eos_ids).decode()


def feed(matcher: GrammarMatcher, text: str | bytes) -> None:
    """Advance byte by byte."""
    for byte in text.encode() if isinstance(text, str) else text:
        matcher.advance(byte)


def takes(matcher: GrammarMatcher, text: str | bytes, info: TokenizerInfo) -> bool:
    """Whether the text is allowed byte by byte and may end there.

    It asks `advance`, since a mask allows only one spelling of text that is forced anyway.
    """
    try:
        feed(matcher, text)
    except GenerationError:
        return False
    return EOS in allowed(matcher, info)


def walk(
    matcher: GrammarMatcher, info: TokenizerInfo, rng: random.Random, limit: int = 600
) -> list[int] | None:
    """Random allowed tokens until the end; None when the limit came first.

    Ends and closing characters are likelier than chance, or few walks would end.
    """
    taken: list[int] = []
    closing = [t for t in range(len(info.tokens)) if info.tokens[t] in (b'"', b"]", b"}", b'"}')]
    for step in range(limit):
        choices = allowed(matcher, info)
        ends = sorted(choices & set(info.eos_ids))
        closes = sorted(choices & set(closing))
        hurry = 0.15 + 0.7 * step / limit
        if ends and (rng.random() < hurry or choices <= set(info.eos_ids)):
            token = rng.choice(ends)
        elif closes and rng.random() < hurry:
            token = rng.choice(closes)
        else:
            token = rng.choice(sorted(choices - set(ends)))
        matcher.advance(token)
        taken.append(token)
        if matcher.is_terminated:
            return taken
    return None


def dumps(value: Any) -> str:
    """JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
