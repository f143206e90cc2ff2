"""`LiveSequence`: the engine's record of one running sequence, and how its chunks are made."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from aengine.outputs import Chunk, RequestMetrics, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.batch import TokenLogprobs
    from aengine.device.trace import Trace
    from aengine.engine.channel import Channel
    from aengine.engine.detokenize import Detokenizer
    from aengine.request import FinishReason, Request


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """One sequence from admission to its last chunk. Times are on the engine's clock, seconds."""

    request: Request
    channel: Channel
    detokenizer: Detokenizer
    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    def saw_tokens(self, count: int, now: float) -> None:
        """Account for `count` tokens that came at `now`."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.completion_tokens += count

    def metrics(self, now: float) -> RequestMetrics:
        """Times of this sequence, as of `now`."""
        itl = None
        if self.completion_tokens > 1 and self.first_token is not None and self.last_token:
            itl = (self.last_token - self.first_token) / (self.completion_tokens - 1)
        queued, first = self.scheduled, self.first_token
        return RequestMetrics(
            queue_time=None if queued is None else queued - self.arrival,
            prefill_time=None if queued is None or first is None else first - queued,
            ttft=None if first is None else first - self.arrival,
            mean_itl=itl,
            e2e=now - self.arrival,
            preemptions=self.preemptions,
        )

    def trace(self, trace: Trace, now: float) -> None:
        """Draw this sequence, which has ended, on a track of its own."""
        # The trace has a clock of its own.
        offset = time.perf_counter_ns() - round(now * 1e9)
        track = f"request {self.request.request_id} #{self.request.seq_id}"
        moments = [self.arrival, self.scheduled, self.first_token, now]
        phases = ("queue", "prefill", "decode")
        for name, (start, end) in zip(phases, pairwise(moments), strict=True):
            if start is not None:
                until = now if end is None else end
                span = [round(moment * 1e9) + offset for moment in (start, until)]
                trace.span(name, *span, track=track, args={"index": self.request.index})

    def chunk(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
    ) -> Chunk:
        """A delta in the middle of the sequence."""
        return Chunk(
            request_id=self.request.request_id,
            index=self.request.index,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=None if logprobs is None else tuple(logprobs),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )

    def last_chunk(
        self,
        text: str,
        token_ids: Sequence[int],
        *,
        reason: FinishReason,
        stop_reason: str | int | None,
        now: float,
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
    ) -> Chunk:
        """The delta that ends the sequence, with its usage and metrics."""
        return Chunk(
            request_id=self.request.request_id,
            index=self.request.index,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=None if logprobs is None else tuple(logprobs),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=Usage(
                prompt_tokens=len(self.request.prompt_token_ids),
                cached_tokens=self.cached_tokens,
                completion_tokens=self.completion_tokens,
            ),
            metrics=self.metrics(now),
        )


def empty_chunk(request_id: str, index: int, reason: FinishReason) -> Chunk:
    """The only chunk of a sequence that ended before it began."""
    return Chunk(
        request_id=request_id,
        index=index,
        finish_reason=reason,
        usage=Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
        metrics=RequestMetrics(),
    )
