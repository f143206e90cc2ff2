"""StructuredOutput in, CompiledGrammar out: check, translate, try where it can be stopped, compile.

A grammar that could be slow to compile is compiled in a worker process first. Only when that ended
in time is it compiled here as well, where it then takes about as long. So no thread of this process
is ever caught in a compile without end: 57 KB of schema can take the library minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.config import GrammarLimits
from aengine.grammar.llguidance import LLGuidanceBackend
from aengine.grammar.translate import GrammarSource, translate
from aengine.grammar.worker_pool import WorkerPool

if TYPE_CHECKING:
    from aengine.grammar.protocol import CompiledGrammar, GrammarBackend
    from aengine.grammar.vocabulary import TokenizerInfo
    from aengine.request import StructuredOutput


class GrammarCompiler:
    """Compiles for one vocabulary. Thread-safe: calls may overlap. Close it when done.

    Building one holds the GIL for 0.1 to 0.3 s (see `llguidance`): build it where the model loads.

    Args:
        tokenizer: the vocabulary.
        limits: bounds on size, depth, time and memory.
        backend: the grammar library; None: llguidance.
    """

    def __init__(
        self,
        tokenizer: TokenizerInfo,
        limits: GrammarLimits | None = None,
        *,
        backend: GrammarBackend | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits or GrammarLimits()
        self.backend: GrammarBackend = backend or LLGuidanceBackend(tokenizer, self.limits)
        self.workers = WorkerPool(tokenizer, self.limits)

    def prepare(self, structured: StructuredOutput) -> GrammarSource:
        """Check and translate; quick, pure Python.

        Raises:
            GrammarError: the spec is malformed, too large, or cannot be enforced.
        """
        return translate(structured, self.tokenizer, self.limits)

    def compile_source(self, source: GrammarSource) -> CompiledGrammar:
        """Compile what `prepare` returned. Blocks; a heavy one up to the time limit, twice.

        Raises:
            GrammarError: the library refuses it.
            GrammarTimeoutError: it took too long.
        """
        if source.heavy:
            self.workers.check(source)
        return self.backend.compile(source)

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Check, translate and compile. Blocks.

        Raises:
            GrammarError: the spec is malformed, too large, refused, or matches nothing.
            GrammarTimeoutError: it took longer than `limits.compile_seconds`.
            EngineClosedError: the compiler was closed.
        """
        return self.compile_source(self.prepare(structured))

    def close(self) -> None:
        """Stop the worker processes. Idempotent."""
        self.workers.close()
