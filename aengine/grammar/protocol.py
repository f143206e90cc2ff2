"""What the engine sees of a grammar library. A second library needs these three and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aengine.errors import GenerationError
    from aengine.grammar.translate import GrammarSource


class GrammarMatcher(Protocol):
    """Where one sequence stands in its grammar. Calls may come from any thread, one at a time."""

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled.

        Raises:
            GenerationError: the grammar does not allow it here; the matcher stays unusable.
        """

    def fill_bitmask(self, row: NDArray[np.int32]) -> None:
        """Write the allowed next tokens into `row`, int32 [ceil(V/32)], bit i%32 of word i//32.

        Raises:
            GenerationError: nothing can follow, or a limit of the library was hit.
        """

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that must come next whatever the model says; empty when it has a choice.

        They are not taken: call `advance` for each that is appended.
        """

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""

    def fork(self) -> GrammarMatcher:
        """An independent matcher in the same state."""

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar (more may be allowed)."""

    @property
    def is_terminated(self) -> bool:
        """Whether the end token was taken: nothing may follow."""


class CompiledGrammar(Protocol):
    """A grammar ready for use by any number of sequences."""

    @property
    def weakenings(self) -> tuple[str, ...]:
        """What the grammar does not enforce, a sentence each; empty when it enforces all."""

    @property
    def nbytes(self) -> int:
        """Estimated memory in bytes, for the cache's bound."""

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of the text."""


class GrammarBackend(Protocol):
    """A grammar library bound to one vocabulary."""

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile; blocks, with the GIL released where the library allows it.

        Raises:
            GrammarError: the library refuses the grammar; its message is kept.
        """

    def fill_bitmasks(
        self, matchers: Sequence[GrammarMatcher], bitmask: NDArray[np.int32]
    ) -> Mapping[int, GenerationError]:
        """Fill row i of `bitmask` (int32 [rows, ceil(V/32)]) for matcher i, in one GIL release.

        Returns what failed, by index; the other rows are good.
        """
