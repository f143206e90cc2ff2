"""Bounds on what a grammar may cost: bytes, nesting, seconds, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from aengine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What compiling and keeping grammars may cost.

    Args:
        max_spec_bytes: longest schema, pattern or grammar, in bytes of UTF-8.
        max_depth: deepest nesting of a JSON schema (brackets inside brackets).
        compile_seconds: a compile that takes longer is stopped: GrammarTimeoutError.
        max_heavy: heavy compiles at a time, each in a worker process of its own.
        max_queued: compiles waiting; above it a request gets EngineOverloadedError.
        worker_bytes: memory (address space) that a worker process may take.
        cache_bytes: estimated bytes of compiled grammars kept for later requests.
        mask_threads: threads of the library's own pool for filling many masks at once.

    Raises:
        ConfigError: a value is not above 0.
    """

    max_spec_bytes: int = 512 * 1024
    max_depth: int = 64
    compile_seconds: float = 10.0
    max_heavy: int = 2
    max_queued: int = 64
    worker_bytes: int = 2 << 30
    cache_bytes: int = 256 << 20
    mask_threads: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name != "compile_seconds"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "an integer" if whole else "a number"
                raise ConfigError(f"grammar {field.name}={value!r} must be {kind}")
            if value <= 0 or not math.isfinite(value):
                raise ConfigError(f"grammar {field.name}={value} must be above 0")
