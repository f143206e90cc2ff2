"""Structured output: check and compile what a caller asks for, match tokens, fill token masks.

Synchronous and thread-safe; the engine calls it from worker threads. See `docs/design/grammar.md`.
"""

from aengine.config import GrammarLimits
from aengine.grammar.cache import GrammarCache, GrammarCacheStats
from aengine.grammar.compiler import GrammarCompiler
from aengine.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher
from aengine.grammar.vocabulary import TokenizerInfo, describe

__all__ = [
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarCache",
    "GrammarCacheStats",
    "GrammarCompiler",
    "GrammarLimits",
    "GrammarMatcher",
    "TokenizerInfo",
    "describe",
]
