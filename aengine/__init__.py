"""aengine: an LLM inference engine that lives inside an asyncio program.

::

    from aengine import Engine, SamplingParams

    async with Engine("smollm2-135m") as engine:
        async for chunk in engine.generate("Why is the sky blue?", SamplingParams(max_tokens=64)):
            print(chunk.text, end="", flush=True)

Names are imported when first used, so that `import aengine` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aengine.config import EngineConfig
    from aengine.engine.blocking import BlockingEngine
    from aengine.engine.front import Engine
    from aengine.engine.health import Health
    from aengine.engine.stream import Stream
    from aengine.errors import (
        AEngineError,
        ConfigError,
        ContextLengthError,
        DeadlineExceededError,
        DeviceError,
        DeviceLostError,
        EngineClosedError,
        EngineDeadError,
        EngineOverloadedError,
        EngineStateError,
        GenerationError,
        GrammarError,
        GrammarTimeoutError,
        InvalidRequestError,
        ModelLoadError,
        OutOfMemoryError,
        ReaderConflictError,
        RequestAbortedError,
        RequestError,
    )
    from aengine.outputs import (
        Chunk,
        CompletionOutput,
        EngineStats,
        RequestMetrics,
        RequestOutput,
        Usage,
    )
    from aengine.request import FinishReason, SamplingParams, StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "AEngineError",
    "BlockingEngine",
    "Chunk",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "DeadlineExceededError",
    "DeviceError",
    "DeviceLostError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineOverloadedError",
    "EngineStateError",
    "EngineStats",
    "FinishReason",
    "GenerationError",
    "GrammarError",
    "GrammarTimeoutError",
    "Health",
    "InvalidRequestError",
    "ModelLoadError",
    "OutOfMemoryError",
    "ReaderConflictError",
    "RequestAbortedError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "StructuredOutput",
    "Usage",
]

_HOMES = MappingProxyType(
    {
        "BlockingEngine": "aengine.engine.blocking",
        "Chunk": "aengine.outputs",
        "CompletionOutput": "aengine.outputs",
        "Engine": "aengine.engine.front",
        "EngineConfig": "aengine.config",
        "EngineStats": "aengine.outputs",
        "FinishReason": "aengine.request",
        "Health": "aengine.engine.health",
        "RequestMetrics": "aengine.outputs",
        "RequestOutput": "aengine.outputs",
        "SamplingParams": "aengine.request",
        "Stream": "aengine.engine.stream",
        "StructuredOutput": "aengine.request",
        "Usage": "aengine.outputs",
    }
)

# A library is silent until its host program says where its log goes.
logging.getLogger("aengine").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aengine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "aengine.errors")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
