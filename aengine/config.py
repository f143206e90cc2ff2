"""The engine's settings: frozen, validated when built, derived values are properties.

`Engine(...)` builds an `EngineConfig` from its keyword arguments; its parts are handed to the rooms
that need them, so that no room sees more than its own settings.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from aengine.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")

LoopMode = Literal["own", "caller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler may admit.

    Args:
        max_num_seqs: most sequences running at once (slots).
        max_num_batched_tokens: most tokens computed in one step (prefill chunks and decode rows).
        max_num_queued_requests, max_num_queued_tokens: bounds of the waiting queue; None: no bound.
        block_size: tokens per KV block; None: what suits the device (16 on a CPU, 64 on a GPU).
        enable_prefix_cache: keep the KV blocks of finished prompts for later requests.
        priority_ageing: seconds of waiting that count as one level of priority.
        max_steps_in_flight: steps launched before the oldest must have settled (at least 1).
        swap_space: bytes of host memory (pinned, for a GPU) for the KV blocks of sequences that
            give way when blocks run out; 0: what they had computed is computed again.
        swap_min_tokens: sequences with fewer computed tokens are computed again all the same.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_queued_requests: int | None = 4096
    max_num_queued_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_cache: bool = True
    priority_ageing: float = 10.0
    max_steps_in_flight: int = 2
    swap_space: int = 0
    swap_min_tokens: int = 64

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1, 65_535)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 24)
        for name in ("max_num_queued_requests", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.block_size is not None:
            _at_least("block_size", self.block_size, 1, 4096)
        _positive("priority_ageing", self.priority_ageing)
        _boolean("enable_prefix_cache", self.enable_prefix_cache)
        _at_least("max_steps_in_flight", self.max_steps_in_flight, 1, 8)
        _at_least("swap_space", self.swap_space, 0)
        _at_least("swap_min_tokens", self.swap_min_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token a step"
            )

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or its default on a CPU."""
        return self.block_size or 16

    def on_gpu(self) -> SchedulerConfig:
        """The same with a GPU's defaults: its attention loads whole tiles of 64 positions."""
        return self if self.block_size else replace(self, block_size=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """How much memory the KV cache takes: bytes, or a fraction of what is left, not both.

    Args:
        memory: bytes for KV blocks.
        fraction: share of the memory that weights, activations of the largest step and captured
            graphs leave, above 0 to 1; None: 0.9 on a GPU, 0.25 on a CPU. (vLLM's
            `gpu_memory_utilization` is a share of the whole GPU, weights included.)
        dtype: of keys and values: "auto" (float16 where the CPU kernels compute in int8, else what
            the model computes in), "float32", "float16" or "bfloat16"; what the model's kernels
            cannot read is refused when it is loaded.
    """

    memory: int | None = None
    fraction: float | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.memory is not None and self.fraction is not None:
            raise ConfigError("give kv_cache_memory or kv_cache_fraction, not both")
        dtypes = ("auto", "float32", "float16", "bfloat16")
        if self.dtype not in dtypes:
            raise ConfigError(
                f"kv_cache_dtype={shown(self.dtype)} must be one of {', '.join(dtypes)}"
            )
        if self.memory is not None:
            _at_least("kv_cache_memory", self.memory, 1)
        if self.fraction is not None:
            _positive("kv_cache_fraction", self.fraction)
            if self.fraction > 1:
                raise ConfigError(f"kv_cache_fraction={self.fraction} must be at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What structured output may cost: bytes, nesting, seconds, memory.

    Args:
        max_spec_bytes: longest schema, pattern or grammar, in bytes of UTF-8.
        max_depth: deepest nesting of a JSON schema (brackets inside brackets).
        compile_seconds: a compile that takes longer is stopped: GrammarTimeoutError.
        max_heavy: heavy compiles at a time, each in a worker process of its own.
        max_queued: compiles waiting; above it a request gets EngineOverloadedError.
        worker_bytes: memory (address space) that a worker process may take.
        cache_bytes: estimated bytes of compiled grammars kept for later requests.
        mask_threads: threads of the library's own pool for filling many masks at once.
        mask_patience: seconds that a step waits for the masks of its rows; rows whose mask takes
            longer leave the step and come back with it.

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
    mask_patience: float = 0.05

    def __post_init__(self) -> None:
        for each in fields(self):
            check = _positive if each.type == "float" else partial(_at_least, low=1)
            check(f"grammar_{each.name}", getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. See `aengine.Engine` for what a caller needs to know.

    Args:
        model: a Hugging Face folder, a `.gguf` file, a hub id or a bundled alias.
        device: "auto", "cpu" or "cuda" ("cuda:1").
        dtype: "auto", "float32", "bfloat16", "float16", or "int8" (quantised CPU kernels).
        max_model_len: longest prompt plus output in tokens; None: what the model allows.
        loop: "own" (a thread with its own event loop) or "caller" (the caller's loop).
        shutdown_timeout: seconds that `aclose()` gives running requests before it aborts them.
        cpu_threads: threads of the CPU kernels; None: the cores this process may use.
        switch_interval: the interpreter's thread switch interval in seconds while the engine is
            open (restored at close); None leaves it alone.
        trace: path of a Chrome trace to write at close; None: no trace.
        load_format: "auto", or "dummy" for random weights.
        metrics: a `prometheus_client.CollectorRegistry` for the engine's series; None: one of its
            own (`Engine.metrics`), where prometheus_client is installed; False: no metrics.
        tracer_provider: an OpenTelemetry `TracerProvider` for a span of each request; None: the
            program's, where opentelemetry-api is installed; False: no spans.
        mux: chooses how prefill and decode share the device (an object with `select`, see
            `aengine.policy.mux`); None: they take turns.
        cuda_graphs: launch steady decode steps as captured graphs (on a GPU).
        debug: check what is taken for granted, slowly: each sampled token is read exactly once by
            the next forward. Steps that are captured graphs are not checked.

    Raises:
        ConfigError: a value is impossible; the message names it and what would be accepted.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    loop: LoopMode = "own"
    shutdown_timeout: float = 10.0
    cpu_threads: int | None = None
    switch_interval: float | None = None
    trace: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    cuda_graphs: bool = True
    debug: bool = False
    metrics: Any = None
    tracer_provider: Any = None
    mux: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={shown(self.model)} must be a path, a hub id or an alias")
        if "\x00" in self.model:
            raise ConfigError("model must not contain a null character")
        if not isinstance(self.device, str) or not _DEVICES.fullmatch(self.device):
            raise ConfigError(
                f"device={shown(self.device)} must be 'auto', 'cpu' or 'cuda[:index]'"
            )
        dtypes = ("auto", "float32", "bfloat16", "float16", "int8")
        if self.dtype not in dtypes:
            raise ConfigError(f"dtype={shown(self.dtype)} must be one of {', '.join(dtypes)}")
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.loop not in ("own", "caller"):
            raise ConfigError(f"loop={shown(self.loop)} must be 'own' or 'caller'")
        check_seconds("shutdown_timeout", self.shutdown_timeout)
        if self.cpu_threads is not None:
            _at_least("cpu_threads", self.cpu_threads, 1, 1024)
        if self.switch_interval is not None:
            _positive("switch_interval", self.switch_interval)
        policy = self.mux
        select = None if isinstance(policy, type) else getattr(policy, "select", None)
        if policy is not None and not callable(select):
            raise ConfigError(f"mux={shown(self.mux)} must be an object with a method select(load)")
        for name in ("cuda_graphs", "debug"):
            _boolean(name, getattr(self, name))
        if self.trace is not None:
            if not isinstance(self.trace, str) or not self.trace:
                raise ConfigError(f"trace={shown(self.trace)} must be the path of a file")
            if not os.path.isdir(os.path.dirname(self.trace) or "."):
                raise ConfigError(f"trace={shown(self.trace)}: there is no such folder")
        given = {
            "metrics": ("register", "a prometheus_client.CollectorRegistry"),
            "tracer_provider": ("get_tracer", "an OpenTelemetry TracerProvider"),
        }
        for name, (method, wanted) in given.items():
            value = getattr(self, name)
            off = value is None or value is False
            if not off and (isinstance(value, type) or not callable(getattr(value, method, None))):
                raise ConfigError(f"{name}={shown(value)} must be {wanted}, None or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={shown(self.seed)} must be an integer")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format={shown(self.load_format)} must be 'auto' or 'dummy'")

    @classmethod
    def from_options(
        cls, model: str | os.PathLike[str], options: Mapping[str, Any]
    ) -> EngineConfig:
        """Sort flat keyword arguments into the parts.

        Raises:
            ConfigError: an unknown name (the message names the nearest known one) or a bad value.
        """
        routes = {f.name: ("scheduler", f.name) for f in fields(SchedulerConfig)}
        routes |= {f"kv_cache_{f.name}": ("kv_cache", f.name) for f in fields(KVCacheConfig)}
        routes |= {f"grammar_{f.name}": ("grammar", f.name) for f in fields(GrammarLimits)}
        own = {f.name for f in fields(cls)} - {"model", "scheduler", "kv_cache", "grammar"}
        parts: dict[str, dict[str, Any]] = {"scheduler": {}, "kv_cache": {}, "grammar": {}, "": {}}
        for name, value in options.items():
            if name in own:
                as_path = name == "trace" and isinstance(value, os.PathLike)
                parts[""][name] = os.fspath(value) if as_path else value
            elif name in routes:
                part, key = routes[name]
                parts[part][key] = value
            else:
                near = difflib.get_close_matches(name, [*own, *routes], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown engine option {name!r}{hint}")
        return cls(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            scheduler=SchedulerConfig(**parts["scheduler"]),
            kv_cache=KVCacheConfig(**parts["kv_cache"]),
            grammar=GrammarLimits(**parts["grammar"]),
            **parts[""],
        )


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)} must be True or False")


def check_seconds(name: str, value: Any) -> None:
    """Refuse what is no duration.

    Raises:
        ConfigError: `value` is not a finite number of seconds from 0 on.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise ConfigError(f"{name}={shown(value)} must be a finite number of seconds, at least 0")


def _at_least(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={shown(value)} must be an integer")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name}={value} must be {span}")


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={shown(value)} must be a finite number")
    if value <= 0:
        raise ConfigError(f"{name}={value} must be above 0")
