"""One compiler over the small vocabulary, shared by the tests that only compile and match."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aengine.grammar import GrammarCompiler, TokenizerInfo

from .support import byte_info

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def info() -> TokenizerInfo:
    return byte_info(vocab_size=300)


@pytest.fixture(scope="session")
def compiler(info: TokenizerInfo) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(info)
    yield compiler
    compiler.close()
