"""OpenTelemetry spans: one a request, by the GenAI semantic conventions.

Only the API is used: where spans go, and whether anywhere, is the host's business. A span is made
when its request ends, with the times of what happened, so that a step costs nothing more. Its
parent is the span that was current where `generate` was called. Prompts and answers are not in it.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aengine.errors import AEngineError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aengine.engine.channel import Channel
    from aengine.engine.messages import Prompt
    from aengine.outputs import Chunk
    from aengine.request import SamplingParams

logger = logging.getLogger("aengine")

_PLAIN = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A request that has not ended. Times are nanoseconds since the epoch."""

    context: Any
    start: int
    operation: str
    params: SamplingParams
    chunks: list[Chunk] = field(default_factory=list)


class Spans:
    """Makes the spans of one engine.

    Args:
        provider: a `TracerProvider`; None: the one that the program has set.
        model_name: in names and attributes.

    Raises:
        ConfigError: opentelemetry-api is not installed, or that is no provider.
    """

    def __init__(self, provider: Any, *, model_name: str) -> None:
        # Imported when spans are wanted: an optional dependency.
        try:
            from opentelemetry import context, trace
        except ImportError:
            raise ConfigError("spans need opentelemetry-api: install aengine-llm[otel]") from None
        from aengine import __version__

        self._context = context
        self._trace = trace
        self._tracer = trace.get_tracer("aengine", __version__, tracer_provider=provider)
        self._model = model_name

    def begin(self, prompt: Prompt, params: SamplingParams) -> OpenSpan:
        """Note a request, in the context of its caller."""
        chat = not isinstance(prompt, str) and not isinstance(prompt[0], int)
        operation = "chat" if chat else "text_completion"
        return OpenSpan(self._context.get_current(), time.time_ns(), operation, params)

    def saw(self, channel: Channel, item: Chunk | AEngineError) -> None:
        """A sequence of the request ended with this chunk, or the request with this error."""
        open_span: OpenSpan | None = channel.span
        if open_span is None:
            return
        error = item if isinstance(item, AEngineError) else None
        if not isinstance(item, AEngineError):
            open_span.chunks.append(item)
            if len(open_span.chunks) < channel.n:
                return
        channel.span = None
        try:
            self._make(channel.request_id, open_span, error)
        except Exception:  # telemetry ends no request
            logger.exception("the span of request %s could not be made", channel.request_id)

    def _make(self, request_id: str, ended: OpenSpan, error: AEngineError | None) -> None:
        span = self._tracer.start_span(
            f"{ended.operation} {self._model}",
            context=ended.context,
            kind=self._trace.SpanKind.INTERNAL,
            start_time=ended.start,
            attributes=self._asked(request_id, ended),
        )
        for name, value in _answered(ended.chunks).items():
            span.set_attribute(name, value)
        if error is not None:
            span.set_attribute("error.type", error.code)
            span.set_status(self._trace.StatusCode.ERROR, str(error))
        span.end(time.time_ns())

    def _asked(self, request_id: str, ended: OpenSpan) -> Mapping[str, Any]:
        params = ended.params
        found: dict[str, Any] = {
            "gen_ai.operation.name": ended.operation,
            "gen_ai.provider.name": "aengine",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request_id,
            "gen_ai.output.type": "text" if params.structured is None else "json",
        }
        for name, attribute in _PLAIN.items():
            if (value := getattr(params, name)) is not None:
                found[attribute] = value
        if params.top_k:
            found["gen_ai.request.top_k"] = params.top_k
        if params.stop:
            found["gen_ai.request.stop_sequences"] = list(params.stop)
        if params.n != 1:
            found["gen_ai.request.choice.count"] = params.n
        return found


def _answered(chunks: Sequence[Chunk]) -> Mapping[str, Any]:
    """What the last chunks of a request's sequences tell."""
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    reasons = [str(c.finish_reason) for c in sorted(chunks, key=lambda chunk: chunk.index)]
    if not usages:
        return {}
    found: dict[str, Any] = {
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": max(usage.prompt_tokens for usage in usages),
        "gen_ai.usage.cache_read.input_tokens": max(usage.cached_tokens for usage in usages),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
    }
    firsts = [c.metrics.ttft for c in chunks if c.metrics is not None and c.metrics.ttft]
    if firsts:
        found["gen_ai.response.time_to_first_chunk"] = min(firsts)
    queued = [c.metrics.queue_time for c in chunks if c.metrics is not None]
    if queued and queued[0] is not None:
        found["aengine.queue_time"] = queued[0]
    return found


def spans_of(provider: Any, *, model_name: str) -> Spans | None:
    """The spans that a `tracer_provider` setting means; None: none are made.

    Raises:
        ConfigError: a provider is given and opentelemetry-api is not installed.
    """
    if provider is False:
        return None
    try:
        return Spans(provider, model_name=model_name)
    except ConfigError:
        if provider is not None:
            raise
        return None  # nobody asked, and there is none
