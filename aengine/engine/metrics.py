"""Prometheus metrics in a registry that the host program gives (`Engine(metrics=registry)`), or in
one of the engine's own (`Engine.metrics`).

Names mirror vLLM's with the prefix `aengine_`; labels are `engine` and `model_name`. Engines that
share a registry share the series. What an engine adds is kept when it closes: counters go on.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING, Any

from aengine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.outputs import Chunk
    from aengine.policy.scheduler import SchedulerStats

_LABELS = ("engine", "model_name")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


def registry_of(setting: Any) -> Any:
    """The registry that a `metrics` setting means; None: nothing is counted."""
    if setting is False:
        return None
    if setting is not None:
        return setting
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


class _Series:
    """The series of one registry. Made once for it, by the first engine that uses it."""

    def __init__(self, registry: Any) -> None:
        # Imported when metrics are asked for: an optional dependency.
        try:
            from prometheus_client import Counter, Gauge, Histogram
        except ImportError:
            raise ConfigError(
                "metrics need prometheus_client: install aengine-llm[metrics]"
            ) from None

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"aengine_{name}", text, _LABELS, registry=registry)

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(f"aengine_{name}", text, (*_LABELS, *more), registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            full = f"aengine_{name}_seconds"
            return Histogram(full, text, _LABELS, registry=registry, buckets=buckets)

        self.numbers = itertools.count()
        self.running = gauge("num_requests_running", "Sequences with a slot.")
        self.waiting = gauge("num_requests_waiting", "Sequences without a slot.")
        self.kv = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = counter("prefix_cache_hits", "Prompt tokens found.")
        self.preemptions = counter("num_preemptions", "Sequences that lost their slot.")
        self.prompt = counter("prompt_tokens", "Prompt tokens of ended sequences.")
        self.generated = counter("generation_tokens", "Generated tokens of ended sequences.")
        self.success = counter("request_success", "Ended sequences.", "finished_reason")
        self.times = (
            seconds("time_to_first_token", "Arrival to first token.", _LONG),
            seconds("inter_token_latency", "Between two tokens: a sequence's mean.", _SHORT),
            seconds("e2e_request_latency", "Arrival to end.", _LONG),
            seconds("request_queue_time", "Arrival to slot.", _LONG),
            seconds("request_prefill_time", "Slot to first token.", _LONG),
            seconds("request_decode_time", "First to last token.", _LONG),
        )


class Metrics:
    """One engine's share of the series. On the engine's loop.

    Args:
        registry: a `prometheus_client.CollectorRegistry`.
        model_name: a label; the label `engine` counts the engines of this registry from 0.
        stats: the scheduler's counts.

    Raises:
        ConfigError: prometheus_client is not installed, or that is no registry.
    """

    def __init__(
        self, registry: Any, *, model_name: str, stats: Callable[[], SchedulerStats]
    ) -> None:
        series: _Series | None = getattr(registry, "_aengine_series", None)
        if series is None:
            # Kept with the registry, which refuses a name twice; nothing here is global.
            series = registry._aengine_series = _Series(registry)
        labels = (str(next(series.numbers)), model_name)
        self._stats = stats
        self._success: Any = lambda reason: series.success.labels(*labels, reason)
        self._gauges = [g.labels(*labels) for g in (series.running, series.waiting, series.kv)]
        cumulative = (series.queries, series.hits, series.preemptions)
        self._cumulative = [counter.labels(*labels) for counter in cumulative]
        self._tokens = [c.labels(*labels) for c in (series.prompt, series.generated)]
        self._times = [histogram.labels(*labels) for histogram in series.times]
        self._seen = (0, 0, 0)
        self._shown: tuple[float, ...] = ()

    def look(self) -> None:
        """Take over the scheduler's counts."""
        stats = self._stats()
        usage = stats.used_blocks / max(1, stats.total_blocks)
        values = (stats.running, stats.waiting, usage)
        if values != self._shown:
            self._shown = values
            for gauge, value in zip(self._gauges, values, strict=True):
                gauge.set(value)
        now = (stats.cache_queried_tokens, stats.cache_hit_tokens, stats.preemptions)
        if now != self._seen:
            for counter, count, before in zip(self._cumulative, now, self._seen, strict=True):
                counter.inc(max(0, count - before))
            self._seen = now

    def ended(self, chunk: Chunk) -> None:
        """A sequence ended with this chunk."""
        self._success(str(chunk.finish_reason)).inc()
        usage, times = chunk.usage, chunk.metrics
        if usage is None or times is None:
            return
        counts = (usage.prompt_tokens, usage.completion_tokens)
        for counter, count in zip(self._tokens, counts, strict=True):
            counter.inc(count)
        decode = None if times.mean_itl is None else times.mean_itl * (counts[1] - 1)
        values = (
            times.ttft,
            times.mean_itl,
            times.e2e,
            times.queue_time,
            times.prefill_time,
            decode,
        )
        for histogram, value in zip(self._times, values, strict=True):
            if value is not None:
                histogram.observe(value)
