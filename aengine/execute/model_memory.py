"""`LoadedMemory`: a running model's KV cache and weights, for `sleep` and `update_weights`.

All but `read` run on the forward stream while no step is in flight.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from aengine.errors import ConfigError, ModelLoadError
from aengine.execute.loader import load_weights
from aengine.model.files import open_model
from aengine.model.hub import resolve

if TYPE_CHECKING:
    from aengine.config import EngineConfig
    from aengine.execute.loader import LoadedModel, LoadedWeights
    from aengine.kernels.attention import KVLayer
    from aengine.model.batch import ForwardBatch
    from aengine.model.files import LoadedFiles


class LoadedMemory:
    """What can be given back, made again and exchanged of a loaded model.

    Args:
        config: the engine's settings.
        files: what the model was loaded from.
        model: the model; its runner is the one that launches steps.
        device: where it is.
    """

    def __init__(
        self, config: EngineConfig, files: LoadedFiles, model: LoadedModel, device: torch.device
    ) -> None:
        self._config = config
        self._shape = files.config
        self._runner = model.runner
        self._weights = model.weights
        self._kv_cache: list[KVLayer] = model.kv_cache
        self._num_blocks = model.num_blocks
        self._device = device

    def free_kv(self) -> None:
        """Give the KV cache's memory back.

        Raises:
            ConfigError: captured graphs hold its addresses.
        """
        self._refuse_graphs("sleep")
        self._runner.rebind(lambda: _NoCache(self._runner.vocab_size))
        self._kv_cache.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def make_kv(self) -> None:
        """Make the KV cache again, as large as it was."""
        self._kv_cache += self._weights.spec.allocate(self._num_blocks, self._device)
        self._runner.rebind(lambda: self._weights.bind(self._kv_cache))

    def read(self, model: str) -> LoadedFiles:
        """Open other weights of the same network; changes nothing.

        Raises:
            ModelLoadError: they cannot be had, or the network differs; the message says where.
        """
        files = open_model(resolve(model), weights=self._config.load_format != "dummy")
        # In which type a file keeps its weights is its own affair.
        names = [f.name for f in fields(self._shape) if f.name != "dtype"]
        other = [n for n in names if getattr(files.config, n) != getattr(self._shape, n)]
        if other:
            told = ", ".join(
                f"{name}={getattr(files.config, name)!r} (here {getattr(self._shape, name)!r})"
                for name in other
            )
            raise ModelLoadError(f"{model} holds another network than the one that runs: {told}")
        return files

    def load(self, files: LoadedFiles) -> LoadedWeights:
        """Load weights beside those in use; changes nothing.

        Raises:
            ConfigError: captured graphs hold the addresses of the weights in use.
            ModelLoadError: they do not fit.
        """
        self._refuse_graphs("other weights")
        weights = load_weights(self._config, files, self._device)
        if weights.spec != self._weights.spec:
            raise ModelLoadError(
                f"the new weights want a KV cache of {weights.spec}; it is {self._weights.spec}"
            )
        return weights

    def use(self, weights: LoadedWeights) -> None:
        """Compute with these weights from the next step on."""
        self._runner.rebind(lambda: weights.bind(self._kv_cache))
        self._weights = weights

    def _refuse_graphs(self, wish: str) -> None:
        if self._runner.has_graphs:
            raise ConfigError(
                f"{wish}: this engine's steps are captured graphs, which hold the addresses of its "
                "memory; make the engine with cuda_graphs=False for that"
            )


class _NoCache:
    """Stands where the model was while there is no KV cache."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        raise RuntimeError("a step was launched while the engine sleeps")
