"""From a model's files to a `ModelRunner`: dtype, weights, KV cache, sampler.

Runs on the forward stream's worker: all torch work of an engine does, loading included, because an
OpenMP pool belongs to the thread that first used it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from aengine.errors import ConfigError, OutOfMemoryError
from aengine.execute.forward import NativeForward, TorchForward
from aengine.execute.host_blocks import HostBlocks, count_host_blocks
from aengine.execute.inputs import InputBuilder
from aengine.execute.kv_cache import KVCacheSpec, fit_context, size_cache
from aengine.execute.memory import memory_of
from aengine.execute.memory_profile import measure
from aengine.execute.runner import ModelRunner
from aengine.execute.sampler import Sampler
from aengine.kernels.native import NativeModel, NativeSpec, obstacle
from aengine.model.attention import TorchBackend
from aengine.model.causal_lm import CausalLM
from aengine.model.native_fit import native_obstacle
from aengine.model.registry import decoder_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.config import EngineConfig
    from aengine.execute.memory import MemorySource
    from aengine.execute.memory_profile import MemoryProfile
    from aengine.execute.runner import Forward
    from aengine.kernels.attention import KVLayer
    from aengine.kernels.sampling import SamplingKernels
    from aengine.model.attention import AttentionBackend
    from aengine.model.decoder import DecoderSpec
    from aengine.model.files import LoadedFiles

logger = logging.getLogger("aengine")

_LONGEST_HINT = 16_384
"""Decode attention cut for longer contexts is finer; what that wins does not pay for short ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to launch, and what the scheduler must know of it."""

    runner: ModelRunner
    forward: Forward
    sampler: Sampler
    num_blocks: int
    max_model_len: int
    compute: str
    """How it computes, for logs and `stats()`."""
    weights: LoadedWeights
    kv_cache: list[KVLayer]
    profile: MemoryProfile
    host_blocks: HostBlocks | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedWeights:
    """A network with its weights, which computes when it is bound to a KV cache."""

    dtype: torch.dtype
    """What it computes in: that of its activations."""
    spec: KVCacheSpec
    """The KV cache that it wants."""
    bind: Callable[[list[KVLayer]], Forward]
    nbytes: int
    compute: str


def load_model(
    config: EngineConfig,
    files: LoadedFiles,
    device: torch.device,
    memory: MemorySource | None = None,
    *,
    pairs: int = 1,
) -> LoadedModel:
    """Load a model.

    Args:
        config: the engine's settings.
        files: the opened files.
        device: where it goes.
        memory: what says how much memory there is; by default the device's own.
        pairs: of lanes that have graphs of their own.

    Raises:
        ConfigError: a setting that this model or device cannot have.
        ModelLoadError: the weights do not fit the architecture, or it is unknown.
        OutOfMemoryError: the weights, the largest step or the KV cache do not fit; the message has
            a value that would.
    """
    longest = files.config.max_position_embeddings
    wanted = config.max_model_len
    memory = memory or memory_of(device)
    weights = _load_weights_or_say(config, files, device, memory)
    spec = weights.spec

    kv_cache: list[KVLayer] = []
    host_blocks = None
    if num_host_blocks := count_host_blocks(spec, config.scheduler.swap_space):
        host_blocks = HostBlocks(spec, kv_cache, num_blocks=num_host_blocks, device=device)

    def make_sampler(vocab_size: int) -> Sampler:
        return Sampler(
            max_num_seqs=config.scheduler.max_num_seqs,
            vocab_size=vocab_size,
            device=device,
            kernels=_sampling_kernels(device),
        )

    def make_for_profile() -> tuple[Forward, Sampler]:
        forward = weights.bind(spec.allocate(0, device))
        return forward, make_sampler(forward.vocab_size)

    profile = measure(
        config.scheduler,
        files.config,
        weights.nbytes,
        memory,
        make_for_profile,
        graphs=pairs if config.cuda_graphs and device.type == "cuda" else 0,
        longest=wanted or longest,
        itemsize=weights.dtype.itemsize,
        device=device,
    )
    max_model_len = wanted or fit_context(spec, config.kv_cache, profile, longest=longest)
    num_blocks = size_cache(
        spec,
        config.kv_cache,
        profile,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
    )
    kv_cache += spec.allocate(num_blocks, device)
    forward = weights.bind(kv_cache)
    logger.info(
        "%s: %s, %d KV blocks; weights %d MiB, activations %d MiB, graphs %d MiB, KV %d MiB",
        files.path.name,
        weights.compute,
        num_blocks,
        *(
            size >> 20
            for size in (
                profile.weights,
                profile.activations,
                profile.graphs,
                num_blocks * spec.bytes_per_block,
            )
        ),
    )
    sampler = make_sampler(forward.vocab_size)
    builder = InputBuilder(
        block_size=config.scheduler.tokens_per_block, device=device, poison=config.debug
    )
    return LoadedModel(
        runner=ModelRunner(forward, sampler, builder),
        forward=forward,
        sampler=sampler,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        compute=weights.compute,
        weights=weights,
        kv_cache=kv_cache,
        profile=profile,
        host_blocks=host_blocks,
    )


def _load_weights_or_say(
    config: EngineConfig, files: LoadedFiles, device: torch.device, memory: MemorySource
) -> LoadedWeights:
    """`load_weights`; a lack of memory is told in this package's own words."""
    free = memory.free()
    try:
        return load_weights(config, files, device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights do not fit into the {free / 2**20:.0f} MiB that are free on {device}: "
            "free some memory, or use a smaller or a quantised model",
            breakdown={"free": free},
        ) from error


def load_weights(config: EngineConfig, files: LoadedFiles, device: torch.device) -> LoadedWeights:
    """Load a model's weights, all of them or none.

    Raises:
        ConfigError: a setting that this model or device cannot have.
        ModelLoadError: the weights do not fit the architecture, or it is unknown.
    """
    longest = files.config.max_position_embeddings
    wanted = config.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(f"max_model_len={wanted}: this model was made for at most {longest}")
    network = decoder_spec(files.config, wanted or longest)
    mode = _native_mode(config, files, network, device, wanted or longest)
    dtype = torch.float32 if mode is not None else _dtype(config, files, device)
    spec = KVCacheSpec.of(
        files.config,
        block_size=config.scheduler.tokens_per_block,
        dtype=_kv_dtype(config, mode, dtype),
    )
    bind: Callable[[list[KVLayer]], Forward]
    if mode is not None and files.weights is not None:
        native = NativeModel(native_spec(network, mode, _threads(config)), files.weights)
        weight_bytes, compute = native.nbytes, f"CPU kernels, {mode}, {native.isa}"
        bind = partial(NativeForward, native)
    else:
        model = _torch_model(config, files, network, dtype, device, wanted or longest)
        weight_bytes, compute = model.weight_bytes, f"torch, {dtype}, {device.type}"
        bind = partial(_bind_torch, model, config.scheduler.max_num_seqs, wanted or longest, device)
    return LoadedWeights(dtype=dtype, spec=spec, bind=bind, nbytes=weight_bytes, compute=compute)


def _native_mode(
    config: EngineConfig,
    files: LoadedFiles,
    network: DecoderSpec,
    device: torch.device,
    max_model_len: int,
) -> Literal["float32", "int8"] | None:
    """Whether the CPU kernels compute this model, and how; None: torch does.

    Raises:
        ConfigError: int8 is asked for, and the message says why it cannot be had.
    """
    reason = native_obstacle(network, max_model_len)
    if reason is None:
        reason = obstacle(native_spec(network, "float32", 1))
    if device.type != "cpu":
        reason = "they compute on a CPU"
    elif config.load_format == "dummy" or not files.quantised:
        reason = reason or "the weights are not quantised"
    if config.dtype == "int8" and reason is not None:
        raise ConfigError(
            f"dtype='int8' needs the CPU kernels, which cannot be used here: {reason}"
        )
    if reason is not None or config.dtype not in ("auto", "float32", "int8"):
        return None
    return "float32" if config.dtype == "float32" else "int8"


def _kv_dtype(
    config: EngineConfig, mode: Literal["float32", "int8"] | None, dtype: torch.dtype
) -> torch.dtype:
    """What keys and values are kept as.

    Raises:
        ConfigError: the kernels cannot read what is asked for.
    """
    wanted = config.kv_cache.dtype
    if wanted == "auto":
        return torch.float16 if mode == "int8" else dtype
    there = (torch.float16, torch.float32) if mode is not None else (dtype,)
    found: torch.dtype = getattr(torch, wanted)
    if found not in there:
        names = " or ".join(f'"{str(each).removeprefix("torch.")}"' for each in there)
        raise ConfigError(
            f'kv_cache_dtype="{wanted}": this model\'s keys and values can be {names} here '
            '("auto" chooses)'
        )
    return found


def native_spec(network: DecoderSpec, mode: Literal["float32", "int8"], threads: int) -> NativeSpec:
    """A plain network (see `native_obstacle`) as the CPU kernels want it."""
    config = network.config
    return NativeSpec(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rms_eps=config.rms_norm_eps,
        inv_freq=network.ropes["global"].inv_freq.tolist() if "global" in network.ropes else (),
        tied=config.tie_word_embeddings,
        qkv_bias=network.qkv_bias,
        mode=mode,
        threads=threads,
    )


def _threads(config: EngineConfig) -> int:
    if config.cpu_threads is not None:
        return config.cpu_threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _torch_model(
    config: EngineConfig,
    files: LoadedFiles,
    network: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> CausalLM:
    ops = None
    if device.type == "cuda":
        from aengine.model.triton_backend import triton_ops

        ops = triton_ops()
    return CausalLM(
        network,
        files.weights,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        ops=ops,
        seed=config.seed,
    )


def _sampling_kernels(device: torch.device) -> SamplingKernels | None:
    """Triton's on a GPU: those of the captured steps, so that both ways draw the same tokens."""
    if device.type != "cuda":
        return None
    from aengine.kernels import triton_sampling

    return triton_sampling


def _bind_torch(
    model: CausalLM,
    max_rows: int,
    max_model_len: int,
    device: torch.device,
    kv_cache: list[KVLayer],
) -> Forward:
    backend: AttentionBackend = TorchBackend()
    if device.type == "cuda":
        from aengine.model.triton_backend import TritonBackend

        backend = TritonBackend(
            model,
            max_rows=max_rows,
            context_hint=min(max_model_len, _LONGEST_HINT),
            device=device,
        )
    return TorchForward(model, kv_cache, backend)


def _dtype(config: EngineConfig, files: LoadedFiles, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = files.config.dtype if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
