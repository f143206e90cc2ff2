"""From a model's files to a `ModelRunner`: dtype, weights, KV cache, sampler.

Runs on the forward stream's worker: all torch work of an engine does, loading included, because an
OpenMP pool belongs to the thread that first used it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aengine.errors import ConfigError
from aengine.execute.forward import TorchForward
from aengine.execute.inputs import InputBuilder
from aengine.execute.kv_cache import KVCacheSpec, fit_context, size_cache
from aengine.execute.memory import available_memory
from aengine.execute.runner import ModelRunner
from aengine.execute.sampler import Sampler
from aengine.model.attention import TorchBackend
from aengine.model.causal_lm import CausalLM
from aengine.model.registry import decoder_spec

if TYPE_CHECKING:
    from aengine.config import EngineConfig
    from aengine.execute.runner import Forward
    from aengine.model.files import LoadedFiles

logger = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to launch, and what the scheduler must know of it."""

    runner: ModelRunner
    num_blocks: int
    max_model_len: int
    compute: str
    """How it computes, for logs and `stats()`."""


def load_model(config: EngineConfig, files: LoadedFiles, device: torch.device) -> LoadedModel:
    """Load a model.

    Args:
        config: the engine's settings.
        files: the opened files.
        device: where it goes.

    Raises:
        ConfigError: a setting that this model or device cannot have.
        ModelLoadError: the weights do not fit the architecture, or it is unknown.
        OutOfMemoryError: the KV cache does not fit; the message has a value that would.
    """
    longest = files.config.max_position_embeddings
    wanted = config.max_model_len
    if wanted is not None and wanted > longest:
        raise ConfigError(f"max_model_len={wanted}: this model was made for at most {longest}")
    dtype = _dtype(config, files, device)
    model = CausalLM(
        decoder_spec(files.config, wanted or longest),
        None if config.load_format == "dummy" else files.weights,
        dtype=dtype,
        device=device,
        max_model_len=wanted or longest,
        seed=config.seed,
    )
    spec = KVCacheSpec.of(files.config, block_size=config.scheduler.block_size, dtype=dtype)
    free = _free(device)
    max_model_len = wanted or fit_context(spec, config.kv_cache, free_bytes=free, longest=longest)
    num_blocks = size_cache(
        spec,
        config.kv_cache,
        free_bytes=free,
        weight_bytes=0,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
    )
    forward: Forward = TorchForward(model, spec.allocate(num_blocks, device), TorchBackend())
    sampler = Sampler(
        max_num_seqs=config.scheduler.max_num_seqs, vocab_size=model.vocab_size, device=device
    )
    builder = InputBuilder(block_size=config.scheduler.block_size, device=device)
    return LoadedModel(
        runner=ModelRunner(forward, sampler, builder),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        compute=f"torch {dtype}",
    )


def _dtype(config: EngineConfig, files: LoadedFiles, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = files.config.dtype if device.type == "cuda" else "float32"
    if name == "int8":
        raise ConfigError("dtype='int8' needs the CPU kernels, which are not built here")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory()
