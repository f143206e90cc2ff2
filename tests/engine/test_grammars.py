"""`Grammars`: built once, beside the start of the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine import StructuredOutput
from aengine.engine import grammars as module
from aengine.engine.grammars import Grammars
from aengine.testing.tokens import ByteTokenizer


@pytest.mark.parametrize("prepared", [True, False])
async def test_the_vocabulary_is_described_once(
    prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    describe = module.describe

    def counted(*args: Any) -> Any:
        calls.append(1)
        return describe(*args)

    monkeypatch.setattr(module, "describe", counted)
    tokenizer = ByteTokenizer()
    made = Grammars(tokenizer, tokenizer.eos_token_ids, vocab_size=tokenizer.vocab_size)
    if prepared:
        made.prepare()
    wanted = StructuredOutput.regex("a+")
    await asyncio.gather(*[made.matcher(wanted) for _ in range(3)])
    made.close()
    assert len(calls) == 1


async def test_a_failure_comes_up_at_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no bytes for token 7")

    monkeypatch.setattr(module, "describe", broken)
    tokenizer = ByteTokenizer()
    made = Grammars(tokenizer, tokenizer.eos_token_ids, vocab_size=tokenizer.vocab_size)
    made.prepare()
    with pytest.raises(ValueError, match="token 7"):
        await made.matcher(StructuredOutput.regex("a+"))
    made.close()
