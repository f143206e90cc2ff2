"""What a caller receives: chunks, results, usage, metrics, statistics. Frozen and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aengine.batch import TokenLogprobs
    from aengine.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds; None where the phase was never reached.

    `ttft` is time to first token, `mean_itl` the mean inter-token latency, both engine-side.
    """

    queue_time: float | None = None
    prefill_time: float | None = None
    ttft: float | None = None
    mean_itl: float | None = None
    e2e: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A delta: what was generated since the chunk before. The last one has a `finish_reason`.

    The texts and token ids of all chunks of one `index`, joined, equal the awaited result.
    `stop_reason` is the stop string or token id that matched; `usage` and `metrics` come last.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished completion of a request (there are n of them)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The awaited result of a request. `text`, `token_ids`, `finish_reason` are of completion 0."""

    request_id: str
    completions: tuple[CompletionOutput, ...]
    usage: Usage
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.completions[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.completions[0].logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine. Counters run from its start; times are seconds."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    steps_in_flight: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_in_use: int = 0
    kv_blocks_leased: int = 0
    """Freed, but a launched step may still touch them: reusable when it is done."""
    swap_blocks_total: int = 0
    """KV blocks of host memory (`swap_space`)."""
    swap_blocks_in_use: int = 0
    """Those that preempted sequences hold."""
    swapped_out: int = 0
    """How often a preempted sequence's blocks were copied to the host, `swapped_in`: back."""
    swapped_in: int = 0
    copies_in_flight: int = 0
    mux: Mapping[str, Any] = field(default_factory=dict)
    """With `mux`: switches, faults of the policy, and by partition the share of time and the mean
    decode step (seconds)."""
    device: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks that running sequences hold, 0 to 1."""
        return self.kv_blocks_in_use / self.kv_blocks_total if self.kv_blocks_total else 0.0
