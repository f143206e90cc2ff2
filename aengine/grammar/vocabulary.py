"""A vocabulary as the grammar room needs it: bytes per token, end tokens, special tokens.

It knows no tokenizer class, so that any tokenizer (or a made-up one in a test) can be described.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aengine.errors import ConfigError

logger = logging.getLogger("aengine.grammar")

Encode = Callable[[str], Sequence[int]]
"""Text -> token ids without special tokens; used to spell forced text as the model would."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizerInfo:
    """What grammars need to know of a tokenizer.

    Args:
        tokens: the bytes of each token, index = token id; for special tokens their name's bytes.
        eos_ids: tokens that end the output; the first is the one forced at a grammar's end.
        special_ids: tokens that free text and JSON never contain (control tokens, eos included).
        vocab_size: width of the model's logits; ids from `len(tokens)` up are never allowed.
        encode: how the tokenizer spells a text; None: longest match.

    Raises:
        ConfigError: no tokens, an id out of range, or vocab_size below the number of tokens.
    """

    tokens: Sequence[bytes]
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    encode: Encode | None = None

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if not count:
            raise ConfigError("a tokenizer for grammars needs at least one token")
        if not self.vocab_size:
            object.__setattr__(self, "vocab_size", count)
        if self.vocab_size < count:
            raise ConfigError(f"vocab_size={self.vocab_size} is below the {count} tokens given")
        if not self.eos_ids:
            raise ConfigError("structured output needs at least one end-of-sequence token")
        for token in (*self.eos_ids, *self.special_ids):
            if not 0 <= token < count:
                raise ConfigError(f"token id {token} is outside the vocabulary of {count}")

    @property
    def mask_words(self) -> int:
        """Length of a packed mask: 32 tokens a word."""
        return mask_words(self.vocab_size)

    def special_token_starting(self, text: str) -> int | None:
        """The special token whose name `text` begins with (the longest such), if there is one."""
        data = text.encode()
        best: int | None = None
        for token in self.special_ids:
            name = self.tokens[token]
            if (
                name
                and data.startswith(name)
                and (best is None or len(name) > len(self.tokens[best]))
            ):
                best = token
        return best


class Describable(Protocol):
    """What `describe` needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> Sequence[int]:
        """Token ids of a text."""


def describe(
    tokenizer: Describable, eos_ids: Iterable[int], vocab_size: int | None = None
) -> TokenizerInfo:
    """A tokenizer as grammars need it.

    Args:
        tokenizer: any object with these four members.
        eos_ids: tokens that end the output.
        vocab_size: width of the model's logits; None: the tokenizer's.

    Raises:
        ConfigError: there is no end token, or the logits are narrower than the vocabulary.
    """
    ends = tuple(sorted(set(eos_ids)))
    return TokenizerInfo(
        tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
        eos_ids=ends,
        special_ids=tokenizer.special_ids | set(ends),
        vocab_size=vocab_size or tokenizer.vocab_size,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
    )


def mask_words(vocab_size: int) -> int:
    """Number of int32 words of a packed mask over `vocab_size` tokens."""
    return (vocab_size + 31) // 32


def encode_vocabulary(info: TokenizerInfo) -> bytes:
    """The vocabulary as one line of JSON, for a worker process (bytes as Latin-1 text)."""
    document = {
        "tokens": [token.decode("latin-1") for token in info.tokens],
        "eos_ids": list(info.eos_ids),
        "special_ids": sorted(info.special_ids),
    }
    return json.dumps(document).encode() + b"\n"


def decode_vocabulary(line: str) -> TokenizerInfo:
    """What `encode_vocabulary` wrote, without `encode`."""
    document = json.loads(line)
    return TokenizerInfo(
        tokens=[token.encode("latin-1") for token in document["tokens"]],
        eos_ids=tuple(document["eos_ids"]),
        special_ids=frozenset(document["special_ids"]),
    )


def wrap(info: TokenizerInfo) -> Any:
    """The tokenizer as llguidance takes it."""
    return _Wrapper(info)


class _Wrapper:
    """A tokenizer by the attribute names that the library reads."""

    is_tokenizer_wrapper = True

    def __init__(self, info: TokenizerInfo) -> None:
        padding = info.vocab_size - len(info.tokens)
        self.tokens = [*info.tokens, *([b""] * padding)]
        self.eos_token_id = info.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(info.special_ids)
        self._info = info
        self._by_bytes = {
            data: token
            for token, data in reversed(list(enumerate(info.tokens)))
            if data and token not in info.special_ids
        }
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str) -> list[int]:
        """Spell forced text. An exception here would end the process's thread: never raise."""
        data = text.encode()
        if self._info.encode is not None:
            try:
                spelled = [int(token) for token in self._info.encode(text)]
                if b"".join(self.tokens[token] for token in spelled) == data:
                    return spelled
            except Exception:
                logger.exception("the tokenizer failed to encode forced text")
        return self._longest_match(data)

    def _longest_match(self, data: bytes) -> list[int]:
        spelled = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token = self._by_bytes.get(data[at:end])
                if token is not None:
                    spelled.append(token)
                    at = end
                    break
            else:
                return spelled
        return spelled
