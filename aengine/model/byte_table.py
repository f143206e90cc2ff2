"""What each token stands for, as bytes: the table that decoding and grammars work with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SEPARATOR = "\uffff"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[int, int]:
    """Byte-level BPE's alphabet: code point of the printed character -> byte.

    Printable Latin-1 stands for itself; the other bytes were numbered from 256 on, in order.
    Source: Radford et al., GPT-2, encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(hidden)}


def byte_level_table(tokens: Sequence[str], literal: Mapping[int, str]) -> list[bytes]:
    """Bytes of every token of a byte-level vocabulary.

    Args:
        tokens: spellings in the byte-level alphabet; index is the id.
        literal: added tokens (id -> text), which are spelled in plain text instead.
    """
    alphabet = byte_level_alphabet()
    joined = _SEPARATOR.join(tokens)
    if set(map(ord, set(joined))) <= alphabet.keys() | {ord(_SEPARATOR)} and tokens:
        # One pass in C over the whole vocabulary: ten times faster than token by token.
        spelled = joined.translate(alphabet).split(_SEPARATOR)
        table = [token.encode("latin-1") for token in spelled]
    else:
        table = [_byte_level(token, alphabet) for token in tokens]
    for token_id, text in literal.items():
        table[token_id] = text.encode()
    return table


def _byte_level(token: str, alphabet: Mapping[int, int]) -> bytes:
    if all(ord(c) in alphabet for c in token):
        return bytes(alphabet[ord(c)] for c in token)
    return token.encode()


def metaspace_table(tokens: Sequence[str], literal: Mapping[int, str]) -> list[bytes]:
    """Bytes of every token of a SentencePiece vocabulary: U+2581 is a space, <0xNN> one byte."""
    table = []
    for token in tokens:
        byte = _BYTE_TOKEN.fullmatch(token)
        table.append(bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode())
    for token_id, text in literal.items():
        table[token_id] = text.encode()
    return table
