"""`Grammars`: the grammar room as the engine awaits it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aengine.grammar.cache import GrammarCache
from aengine.grammar.compiler import GrammarCompiler
from aengine.grammar.vocabulary import describe
from aengine.threads import DaemonPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from aengine.config import GrammarLimits
    from aengine.errors import GenerationError
    from aengine.grammar.protocol import GrammarMatcher
    from aengine.grammar.vocabulary import Describable
    from aengine.request import StructuredOutput


class Grammars:
    """Compiles grammars and fills masks for one engine, off its loop.

    Args:
        tokenizer: the model's tokenizer.
        eos_ids: tokens that end the output.
        vocab_size: width of the logits.
        limits: what compiling and keeping grammars may cost.
    """

    def __init__(
        self,
        tokenizer: Describable,
        eos_ids: frozenset[int],
        *,
        vocab_size: int,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._limits = limits
        self._pool = DaemonPool(1, "aengine-masks")
        self._compiler: GrammarCompiler | None = None
        self._cache: GrammarCache | None = None

    def prepare(self) -> None:
        """Build the library's tokenizer in the background.

        It holds the GIL for 0.1 to 0.3 s, so the time for it is while the engine starts. A failure
        comes up at the first request that needs it.
        """
        self._pool.submit(self._build)

    async def matcher(self, structured: StructuredOutput) -> GrammarMatcher:
        """A matcher at the beginning of this grammar; compiles it if it is not kept.

        Raises:
            GrammarError: the grammar is invalid, or asks for what cannot be enforced.
            GrammarTimeoutError: compiling took too long.
            EngineOverloadedError: too many grammars wait to be compiled.
        """
        if self._cache is None:
            # The one mask thread does it, so two first requests build it once.
            await asyncio.get_running_loop().run_in_executor(self._pool, self._build)
        assert self._cache is not None
        compiled = await asyncio.wrap_future(self._cache.submit(structured))
        return compiled.matcher()

    def discard(self, structured: StructuredOutput) -> None:
        """A matcher of this grammar failed: what it shares with others may be spoilt, so the next
        request compiles it anew."""
        if self._cache is not None:
            self._cache.discard(structured)

    def _build(self) -> None:
        if self._cache is None:
            info = describe(self._tokenizer, self._eos_ids, self._vocab_size)
            self._compiler = GrammarCompiler(info, self._limits)
            self._cache = GrammarCache(self._compiler)

    def fill(
        self, matchers: Sequence[GrammarMatcher], bitmask: npt.NDArray[np.int32]
    ) -> asyncio.Future[Mapping[int, GenerationError]]:
        """Begin to fill row i of `bitmask` for matcher i, in a thread and without the GIL.

        The future gives what failed, by index.
        """
        assert self._compiler is not None
        return asyncio.get_running_loop().run_in_executor(
            self._pool, self._compiler.backend.fill_bitmasks, matchers, bitmask
        )

    def close(self) -> None:
        """End the threads and worker processes; blocks until they are gone."""
        if self._cache is not None:
            self._cache.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
