"""Bounds: vocabularies, limits, sizes and depths that make no sense are refused."""

from __future__ import annotations

import pytest

from aengine.errors import ConfigError, GrammarError
from aengine.grammar import GrammarCompiler, GrammarLimits, TokenizerInfo
from aengine.request import StructuredOutput

from .support import byte_info


def test_limits_and_vocabularies_are_checked() -> None:
    for bad in (
        {"tokens": [], "eos_ids": (0,)},
        {"tokens": [b"a"], "eos_ids": ()},
        {"tokens": [b"a"], "eos_ids": (1,)},
        {"tokens": [b"a"], "eos_ids": (0,), "special_ids": frozenset({5})},
        {"tokens": [b"a", b"b"], "eos_ids": (0,), "vocab_size": 1},
    ):
        with pytest.raises(ConfigError):
            TokenizerInfo(**bad)  # type: ignore[arg-type]
    for limits in ({"max_depth": 0}, {"compile_seconds": float("inf")}, {"cache_bytes": 1.5}):
        with pytest.raises(ConfigError, match="grammar"):
            GrammarLimits(**limits)  # type: ignore[arg-type]


def test_limits_on_size_and_depth() -> None:
    small = GrammarCompiler(byte_info(), GrammarLimits(max_spec_bytes=200, max_depth=5))
    with pytest.raises(GrammarError, match="more than the limit"):
        small.compile(StructuredOutput.regex("a" * 201))
    with pytest.raises(GrammarError, match="more than the limit"):
        small.compile(StructuredOutput.regex("é" * 101))
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(5):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="deeper than 5"):
        small.compile(StructuredOutput.json(deep))
    with pytest.raises(GrammarError, match="deeper than 5"):
        small.compile(StructuredOutput(kind="json", spec="[" * 200))
    with pytest.raises(GrammarError, match="surrogate"):
        small.compile(StructuredOutput.regex("\ud800"))
