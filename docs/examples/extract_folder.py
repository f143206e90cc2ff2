"""Structured extraction: a JSON object for every text file of a folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

from aengine import Engine, RequestError, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "sender": {"type": "string", "maxLength": 40},
        "urgent": {"type": "boolean"},
        "topic": {"enum": ["invoice", "complaint", "other"]},
    },
    "required": ["sender", "urgent", "topic"],
    "additionalProperties": False,
}
PARAMS = SamplingParams(structured=StructuredOutput.json(SCHEMA), temperature=0, max_tokens=200)
TASK = f"Describe the letter as JSON of this schema: {json.dumps(SCHEMA)}\n\nThe letter:\n"


async def extract(engine: Engine, letter: str) -> dict[str, Any] | None:
    """The object; None if the letter is too long for the model or the answer was cut."""
    try:
        result = await engine.generate([{"role": "user", "content": TASK + letter}], PARAMS)
        return json.loads(result.text) if result.finish_reason == "stop" else None
    except RequestError:
        return None  # the other letters go on


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.txt"))}


async def extract_folder(engine: Engine, folder: Path) -> dict[str, dict[str, Any] | None]:
    letters = await asyncio.to_thread(read, folder)  # all at once: the engine queues them
    found = await asyncio.gather(*(extract(engine, letter) for letter in letters.values()))
    return dict(zip(letters, found, strict=True))
