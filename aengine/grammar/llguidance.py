"""The llguidance library behind the room's protocols.

The library reports errors by state: a call that fails leaves the matcher in an error state for good
and its mask then allows the end token, which would end a broken text as if it were whole. So every
call here is followed by a look at that state.

What holds the GIL: building the tokenizer (once, 0.1 to 0.3 s for 49,152 tokens: build it where the
weights are loaded), and `advance` (a few µs). Compiling and filling masks release it.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import llguidance as lib
import numpy as np

from aengine.errors import GenerationError
from aengine.grammar.refusal import refused, shorten
from aengine.grammar.vocabulary import wrap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from aengine.config import GrammarLimits
    from aengine.grammar.protocol import GrammarMatcher
    from aengine.grammar.translate import GrammarSource
    from aengine.grammar.vocabulary import TokenizerInfo

logger = logging.getLogger("aengine.grammar")

# Measured with this library's 1.9: 220 KB for a small grammar after use, and about 140 bytes of
# automaton per byte of a large schema.
_BASE_BYTES = 256 * 1024
_BYTES_PER_SPEC_BYTE = 140

# Classes of tokens whose masks are prepared: pieces of JSON strings. These two of the library's 4
# make masks as quick as all do (31 and 34 µs a token); the tokenizer's build is a fifth shorter.
_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+')

# No wish to show the parser's inner state, and the caller's schema, in error messages.
_PARSER_LIMITS = {"verbose_errors": False}


class LLGuidanceBackend:
    """Compiles grammars for one vocabulary.

    Building one holds the GIL for 0.1 to 0.3 s.

    Args:
        tokenizer: the vocabulary.
        limits: bounds; only `mask_threads` is read here.
    """

    def __init__(self, tokenizer: TokenizerInfo, limits: GrammarLimits) -> None:
        self.tokenizer = tokenizer
        self._tokenizer = lib.LLTokenizer(
            wrap(tokenizer),
            slices=list(_SLICES),
            eos_token=list(tokenizer.eos_ids),
            n_vocab=tokenizer.vocab_size,
        )
        self._executor = lib.LLExecutor(num_threads=limits.mask_threads)
        self._end_row = np.zeros(tokenizer.mask_words, dtype=np.int32)
        for token in tokenizer.eos_ids:
            self._end_row.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def compile(self, source: GrammarSource) -> LLGuidanceGrammar:
        """Compile, and make sure that at least one first token exists.

        Raises:
            GrammarError: the library refuses the grammar, or nothing matches it.
        """
        matcher = lib.LLMatcher(
            self._tokenizer,
            source.text,
            log_level=0,
            limits=lib.LLParserLimits(**_PARSER_LIMITS),
        )
        if matcher.is_error():
            raise refused(matcher.get_error(), source)
        weakenings = (*source.weakenings, *matcher.get_grammar_warnings())
        for weakening in weakenings:
            logger.warning("structured output is weaker than asked for: %s", weakening)
        grammar = LLGuidanceGrammar(self, matcher, weakenings, len(source.text))
        try:
            grammar.matcher().fill_bitmask(np.empty(self.tokenizer.mask_words, dtype=np.int32))
        except GenerationError as error:
            raise refused(f"nothing matches it: {error}", source) from error
        return grammar

    def fill_bitmasks(
        self, matchers: Sequence[GrammarMatcher], bitmask: NDArray[np.int32]
    ) -> Mapping[int, GenerationError]:
        """Fill row i of `bitmask` (int32 [rows, ceil(V/32)]) for matcher i, in one GIL release.

        Returns what failed, by index; the other rows are good.

        Raises:
            ValueError: the array has another shape or layout, or a matcher is another library's.
        """
        words = self.tokenizer.mask_words
        if bitmask.dtype != np.int32 or bitmask.ndim != 2 or bitmask.shape[1] != words:
            raise ValueError(f"a bitmask is int32 [rows, {words}]")
        if not bitmask.flags.c_contiguous or bitmask.shape[0] < len(matchers):
            raise ValueError("a bitmask is contiguous and has a row for each matcher")
        failed: dict[int, GenerationError] = {}
        running: list[tuple[LLGuidanceMatcher, int]] = []
        for index, matcher in enumerate(matchers):
            if not isinstance(matcher, LLGuidanceMatcher):
                raise ValueError("a matcher of another library")
            if matcher.is_terminated:
                bitmask[index] = self._end_row
            else:
                running.append((matcher, index))
        with ExitStack() as stack:
            for matcher, _ in sorted(running, key=lambda pair: id(pair[0])):
                stack.enter_context(matcher.lock)
            if running:
                self._executor.unsafe_compute_mask_ptr(
                    [(matcher.inner, index) for matcher, index in running],
                    bitmask.ctypes.data,
                    words * 4,
                    bitmask.shape[0],
                )
            for matcher, index in running:
                try:
                    matcher.check("computing its mask")
                except GenerationError as error:
                    failed[index] = error
        return failed

    def fill_end(self, row: NDArray[np.int32]) -> None:
        """Write the mask that allows the end tokens and nothing else."""
        row[:] = self._end_row


class LLGuidanceGrammar:
    """A compiled grammar; its matchers share the automaton that is built as it is used."""

    def __init__(
        self,
        backend: LLGuidanceBackend,
        template: lib.LLMatcher,
        weakenings: tuple[str, ...],
        spec_bytes: int,
    ) -> None:
        self._backend = backend
        self._template = template
        self.weakenings = weakenings
        self.nbytes = _BASE_BYTES + _BYTES_PER_SPEC_BYTE * spec_bytes

    def matcher(self) -> LLGuidanceMatcher:
        """A matcher at the beginning of the text."""
        return LLGuidanceMatcher(self._backend, self._template.deep_copy())


class LLGuidanceMatcher:
    """One sequence's place in its grammar. A lock makes each call safe from any thread."""

    def __init__(
        self, backend: LLGuidanceBackend, inner: lib.LLMatcher, taken: int = 0, ended: int = 0
    ) -> None:
        self._backend = backend
        self.inner = inner
        self.lock = threading.Lock()
        self._taken = taken
        self._ended = ended

    def check(self, doing: str) -> None:
        """Raise if the library's matcher is in its error state.

        Raises:
            GenerationError: it is.
        """
        if self.inner.is_error():
            raise GenerationError(
                f"the grammar failed while {doing}: {shorten(self.inner.get_error())}"
            )

    def advance(self, token_id: int) -> None:
        """Take the sampled token. End tokens are taken when the text so far is whole.

        Raises:
            GenerationError: the grammar does not allow the token; the matcher stays unusable.
        """
        with self.lock:
            self.check("taking a token")
            ends = token_id in self._backend.tokenizer.eos_ids
            if self._ended and not ends:
                raise GenerationError(f"token {token_id} after the end of the structured output")
            if not 0 <= token_id < self._backend.tokenizer.vocab_size:
                raise GenerationError(f"token {token_id} is outside the vocabulary")
            if ends and (self._ended or self.inner.is_accepting()):
                self._ended += 1  # with ignore_eos a sequence goes on, in end tokens
                return
            taken = self.inner.consume_token(token_id)
            self.check(f"taking token {token_id}")
            if not taken:
                raise GenerationError(f"token {token_id} is not allowed by the grammar")
            self._taken += 1

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Write the allowed next tokens into `row`, contiguous int32 [ceil(V/32)].

        Raises:
            GenerationError: nothing can follow, or a limit of the library was hit.
            ValueError: `row` has another shape or type.
        """
        words = self._backend.tokenizer.mask_words
        if row.dtype != np.int32 or row.shape != (words,) or not row.flags.c_contiguous:
            raise ValueError(f"a mask row is contiguous int32 [{words}]")
        with self.lock:
            if self._ended:
                self._backend.fill_end(row)
                return
            self.check("computing its mask")
            self.inner.unsafe_compute_mask_ptr(row.ctypes.data, words * 4)
            self.check("computing its mask")

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that must come next; at a text that cannot go on, the end token.

        Raises:
            GenerationError: a limit of the library was hit.
        """
        with self.lock:
            if self._ended:
                return ()
            self.check("looking for forced tokens")
            if self.inner.is_stopped():
                return self._backend.tokenizer.eos_ids[:1]
            if not self.inner.compute_ff_bytes():  # much cheaper, and mostly the answer
                return ()
            forced = self.inner.compute_ff_tokens()
            self.check("looking for forced tokens")
            return tuple(forced)

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens (an end token is one of them).

        Raises:
            ValueError: fewer tokens were taken.
            GenerationError: the library cannot go back.
        """
        with self.lock:
            self.check("rolling back")
            if not 0 <= count <= self._taken + self._ended:
                raise ValueError(f"cannot roll back {count} of {self._taken + self._ended} tokens")
            if count == 0:
                return
            steps = max(0, count - self._ended)
            self._ended = max(0, self._ended - count)
            if steps and not self.inner.rollback(steps):
                self.check("rolling back")
                raise GenerationError("the grammar cannot be rolled back")
            self._taken -= steps
            self.check("rolling back")

    def fork(self) -> LLGuidanceMatcher:
        """An independent matcher in the same state."""
        with self.lock:
            return LLGuidanceMatcher(
                self._backend, self.inner.deep_copy(), self._taken, self._ended
            )

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar (more may be allowed)."""
        with self.lock:
            return self._ended > 0 or (not self.inner.is_error() and self.inner.is_accepting())

    @property
    def is_terminated(self) -> bool:
        """Whether the end token was taken: nothing may follow."""
        return self._ended > 0
