"""A small application around an engine; `test_summaries.py` is its test suite."""

import asyncio
from collections.abc import Sequence

from aengine import AEngineError, Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=60, temperature=0)


async def summarize(engine: Engine, text: str, *, patience: float = 5.0) -> str:
    """One sentence about a text; its own first sentence if the engine cannot say one in time."""
    messages = [{"role": "user", "content": f"Summarize in one sentence: {text}"}]
    try:
        async with asyncio.timeout(patience):
            result = await engine.generate(messages, PARAMS)
    except (AEngineError, TimeoutError):
        return text.split(".")[0] + "."
    return result.text.strip()


async def summarize_all(engine: Engine, texts: Sequence[str]) -> list[str]:
    return await asyncio.gather(*(summarize(engine, text) for text in texts))
