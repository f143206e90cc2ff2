"""Structured extraction: a JSON object for every text file of a folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

from aengine import AEngineError, Engine, RequestOutput, SamplingParams, StructuredOutput

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


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.txt"))}


async def extract_folder(engine: Engine, folder: Path) -> dict[str, dict[str, Any] | None]:
    """The objects by file name; None if a letter is too long or its answer was cut."""
    letters = await asyncio.to_thread(read, folder)
    prompts = [[{"role": "user", "content": TASK + letter}] for letter in letters.values()]
    found = await engine.generate_many(prompts, PARAMS, return_exceptions=True)
    return dict(zip(letters, map(parse, found), strict=True))


def parse(found: RequestOutput | AEngineError) -> dict[str, Any] | None:
    if isinstance(found, AEngineError) or found.finish_reason != "stop":
        return None
    return json.loads(found.text)
