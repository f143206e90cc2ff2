"""OpenTelemetry spans of requests, collected by the SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine import AEngineError, Engine, SamplingParams, StructuredOutput
from aengine.testing import Faults, scripted_engine

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture(params=["own", "caller"])
def loop_mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def attributes(exporter: InMemorySpanExporter) -> list[dict[str, Any]]:
    return [dict(span.attributes or {}) for span in exporter.get_finished_spans()]


async def test_a_request_is_a_span_below_its_callers(
    loop_mode: str, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    tracer = provider.get_tracer("app")
    async with scripted_engine(loop=loop_mode, tracer_provider=provider) as engine:
        with tracer.start_as_current_span("question") as parent:
            params = SamplingParams(max_tokens=4, temperature=0, seed=7, stop=["zzz"], top_k=5)
            await engine.generate("hello", params, request_id="user-1")
    span, asked = exporter.get_finished_spans()
    assert (span.name, asked.name) == ("text_completion scripted", "question")
    assert span.kind is trace.SpanKind.INTERNAL
    assert span.parent is not None
    assert span.parent.span_id == parent.get_span_context().span_id
    assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET
    assert (span.start_time or 0) < (span.end_time or 0)
    found = attributes(exporter)[0]
    times = found.pop("gen_ai.response.time_to_first_chunk"), found.pop("aengine.queue_time")
    assert all(seconds >= 0 for seconds in times)
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "aengine",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.id": "user-1",
        "gen_ai.output.type": "text",
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 4,
    }


async def test_chats_and_several_answers(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    structured = StructuredOutput.choice(["yes"])
    params = SamplingParams(max_tokens=9, n=3, structured=structured)
    async with scripted_engine(tracer_provider=provider) as engine:
        await engine.generate([{"role": "user", "content": "really?"}], params)
    (found,) = attributes(exporter)
    assert exporter.get_finished_spans()[0].name == "chat scripted"
    assert found["gen_ai.request.choice.count"] == 3
    assert found["gen_ai.output.type"] == "json"
    assert found["gen_ai.response.finish_reasons"] == ("stop",) * 3
    assert found["gen_ai.usage.output_tokens"] == 12


async def test_aborts_and_errors(
    loop_mode: str, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    faults = Faults(delay=0.001, raise_at={0: ZeroDivisionError()})
    async with scripted_engine(loop=loop_mode, faults=faults, tracer_provider=provider) as engine:
        with pytest.raises(AEngineError):
            await engine.generate([1])
        with pytest.raises(AEngineError):
            await engine.generate([10**6])
        stream = engine.generate([1], SamplingParams(max_tokens=400))
        await anext(stream)
        stream.abort()
        await stream
    failed, refused, aborted = exporter.get_finished_spans()
    assert [dict(s.attributes or {}).get("error.type") for s in (failed, refused, aborted)] == [
        "generation_failed",
        "invalid_request",
        None,
    ]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert attributes(exporter)[2]["gen_ai.response.finish_reasons"] == ("abort",)


async def test_off_and_by_default(exporter: InMemorySpanExporter) -> None:
    async with scripted_engine(tracer_provider=False) as engine:
        await engine.generate([1], SamplingParams(max_tokens=2))
        assert engine._service.spans is None
    async with scripted_engine() as engine:  # the program's provider: there is none, all is no-op
        await engine.generate([1], SamplingParams(max_tokens=2))
        assert engine._service.spans is not None


async def test_telemetry_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Provider:
        def get_tracer(self, *args: Any, **options: Any) -> Any:
            return self

        def start_span(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("no")

    async with scripted_engine(tracer_provider=Provider()) as engine:
        for _ in range(2):
            await engine.generate([1], SamplingParams(max_tokens=2))
    assert "could not be made" in caplog.text


async def test_other_loops_and_threads(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    async def ask(engine: Engine) -> None:
        await engine.generate([1], SamplingParams(max_tokens=2))

    async with scripted_engine(tracer_provider=provider) as engine:
        await asyncio.gather(*[asyncio.to_thread(asyncio.run, ask(engine)) for _ in range(5)])
    assert len(exporter.get_finished_spans()) == 5
