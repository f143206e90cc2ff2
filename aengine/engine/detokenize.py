"""From token ids to text, a delta at a time: never half a character, never part of a stop string.

Synchronous and pure. A tokenizer's own incremental decoder swallows invalid bytes and cannot be
flushed; a table of bytes and Python's incremental UTF-8 decoder give the text of decoding all at
once, for every way to cut it into deltas.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.request import SamplingParams


class TokenTable(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, and the stop string that ended it if one did."""

    text: str
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class _Match:
    end: int
    start: int
    stop: str


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: token bytes and special tokens.
        params: stop strings, `min_tokens`, and what to leave out of the text.
    """

    def __init__(self, tokenizer: TokenTable, params: SamplingParams) -> None:
        self._bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(params.stop)
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._count = 0
        self._held = ""
        self._exempt = 0
        """Characters of `_held` that came before `min_tokens`: no match may end within them."""

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Take new tokens; what can be shown now."""
        if not self._stops:
            return Delta(self._decode(token_ids))
        for token in token_ids:
            # One at a time, so that the match that is found does not depend on how tokens came.
            self._count += 1
            self._held += self._decode((token,))
            if self._count < self._min_tokens:
                self._exempt = len(self._held)
            elif (match := self._find()) is not None:
                end = match.end if self._keep_stop else match.start
                text, self._held, self._stops = self._held[:end], "", ()
                return Delta(text, match.stop)
        return Delta(self._release())

    def finish(self) -> str:
        """What was held back, when nothing more comes. An unfinished character becomes U+FFFD."""
        text, self._held = self._held, ""
        return text + self._decoder.decode(b"", final=True)

    def _decode(self, token_ids: Sequence[int]) -> str:
        skipped = self._skipped
        if len(token_ids) == 1:  # nearly always
            token = token_ids[0]
            return "" if token in skipped else self._decoder.decode(self._bytes(token))
        data = b"".join(self._bytes(token) for token in token_ids if token not in skipped)
        return self._decoder.decode(data)

    def _find(self) -> _Match | None:
        """The match that ends first; of those the one that begins first."""
        best: _Match | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, self._exempt - len(stop) + 1))
            if start >= 0:
                match = _Match(start + len(stop), start, stop)
                if best is None or (match.end, match.start) < (best.end, best.start):
                    best = match
        return best

    def _release(self) -> str:
        """Text that can no longer become part of a stop string; the rest stays held."""
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._exempt = max(0, self._exempt - cut)
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
