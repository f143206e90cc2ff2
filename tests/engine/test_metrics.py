"""Prometheus series of engines, in a registry that the test gives."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from aengine import ConfigError, SamplingParams
from aengine.testing import Faults, scripted_engine

prometheus_client = pytest.importorskip("prometheus_client")

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count",
]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def value(registry: Any, name: str, engine: str = "0", **more: str) -> float | None:
    labels = {"engine": engine, "model_name": "scripted"} | more
    return registry.get_sample_value(f"aengine_{name}", labels)


@pytest.mark.parametrize("loop_mode", ["own", "caller"])
async def test_the_series_say_what_happened(loop_mode: str) -> None:
    registry = prometheus_client.CollectorRegistry()
    faults = Faults(delay=0.001)
    async with scripted_engine(loop=loop_mode, metrics=registry, faults=faults) as engine:
        prompt = list(range(40))
        await engine.generate(prompt, params(5))
        await engine.generate(prompt, params(5))
        stream = engine.generate([1], params(300))
        await anext(stream)
        assert value(registry, "num_requests_running") == 1
        assert (value(registry, "kv_cache_usage_perc") or 0) > 0
        stream.abort()
        aborted = await stream
    assert value(registry, "request_success_total", finished_reason="length") == 2
    assert value(registry, "request_success_total", finished_reason="abort") == 1
    assert value(registry, "prompt_tokens_total") == 81
    assert value(registry, "generation_tokens_total") == 10 + len(aborted.token_ids)
    assert (value(registry, "prefix_cache_hits_total") or 0) > 0
    for name in NAMES[-6:-1]:
        assert value(registry, name) is not None
        assert (value(registry, name) or 0) >= 2
    assert value(registry, "num_requests_running") == 0
    text = prometheus_client.generate_latest(registry).decode()
    assert [name for name in NAMES if f"aengine_{name}" not in text] == []


async def test_engines_share_a_registry_and_leave_the_hosts_series_alone() -> None:
    registry = prometheus_client.CollectorRegistry()
    own = prometheus_client.Counter("host_requests", "The host's own.", registry=registry)
    own.inc()
    async with (
        scripted_engine(metrics=registry) as first,
        scripted_engine(metrics=registry) as second,
    ):
        await asyncio.gather(
            first.generate([1], params(3)),
            second.generate([1], params(4)),
            second.generate([2], params(4)),
        )
    counts = [value(registry, "generation_tokens_total", engine) for engine in ("0", "1")]
    assert sorted(count or 0 for count in counts) == [3, 8]
    assert registry.get_sample_value("host_requests_total") == 1


async def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"aengine-llm\[metrics\]"):
        async with scripted_engine(metrics=prometheus_client.CollectorRegistry()):
            pass


async def test_an_engine_has_a_registry_of_its_own() -> None:
    async with scripted_engine() as one, scripted_engine() as two:
        await one.generate([1], params(5))
        assert value(one.metrics, "generation_tokens_total") == 5
        assert value(two.metrics, "generation_tokens_total") == 0
    assert value(one.metrics, "request_success_total", finished_reason="length") == 1
    async with scripted_engine(metrics=False) as engine:
        assert engine.metrics is None
        await engine.generate([1], params(5))


async def test_a_registry_that_breaks_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    registry = prometheus_client.CollectorRegistry()
    async with scripted_engine(metrics=registry) as engine:
        registry._aengine_series.success.labels = None
        assert (await engine.generate([1], params(5))).finish_reason == "length"
        assert (await engine.generate([1], params(5))).finish_reason == "length"
    assert caplog.text.count("metrics failed") == 1
