"""What keys and values are kept as: `kv_cache_dtype`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.execute import loader
from aengine.execute.loader import load_model
from aengine.execute.memory_profile import computed_activations
from aengine.kernels import native
from aengine.model.files import open_model
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.execute.loader import LoadedModel


def load(path: Path, **options: Any) -> LoadedModel:
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64} | options
    config = EngineConfig.from_options(str(path), options)
    return load_model(config, open_model(path), torch.device("cpu"))


def dtypes(model: LoadedModel) -> set[torch.dtype]:
    return {each.dtype for layer in model.kv_cache for each in (layer.k, layer.v)}


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    ("dtype", "wanted", "found"),
    [
        ("auto", "auto", torch.float16),
        ("int8", "auto", torch.float16),
        ("int8", "float32", torch.float32),
        ("float32", "auto", torch.float32),
        ("float32", "float16", torch.float16),
    ],
)
def test_the_cpu_kernels_keep_what_is_asked_for(
    dtype: str, wanted: str, found: torch.dtype, smollm2_gguf: Path
) -> None:
    model = load(smollm2_gguf, dtype=dtype, kv_cache_dtype=wanted)
    assert "CPU kernels" in model.compute
    assert dtypes(model) == {found}
    values = 30 * 2 * 16 * 3 * 64
    assert model.weights.spec.bytes_per_block == values * found.itemsize
    shape = open_model(smollm2_gguf).config
    config = EngineConfig.from_options("m", {"max_num_seqs": 4, "max_num_batched_tokens": 64})
    assert model.profile.activations == computed_activations(config.scheduler, shape, itemsize=4)


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not built")
def test_what_the_cpu_kernels_cannot_read_is_refused(smollm2_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r'"bfloat16".*"float16" or "float32" here'):
        load(smollm2_gguf, kv_cache_dtype="bfloat16")


def test_torch_keeps_what_it_computes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_native_mode", lambda *args: None)
    path = write_gguf(tmp_path / "m.gguf")
    assert dtypes(load(path)) == {torch.float32}
    assert dtypes(load(path, kv_cache_dtype="float32")) == {torch.float32}
    assert dtypes(load(path, dtype="bfloat16", kv_cache_dtype="bfloat16")) == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r'kv_cache_dtype="float16".*"float32" here'):
        load(path, kv_cache_dtype="float16")
