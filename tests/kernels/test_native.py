"""The CPU kernels against torch float32 on the same stored weights, for every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from aengine.errors import ConfigError, ModelLoadError
from aengine.execute.forward import NativeForward
from aengine.execute.loader import native_spec
from aengine.kernels import native
from aengine.model.causal_lm import CausalLM
from aengine.model.files import LoadedFiles, open_model
from aengine.model.registry import decoder_spec
from tests.model.paged import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not built")

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome. " * 3,
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "数字",
]


def sets() -> list[str]:
    if not native.available():
        return []
    from aengine_ext import _cpu

    return _cpu.isas()


class Bound:
    """A `NativeModel` with the face of a `CausalLM`, for `paged.run`."""

    def __init__(self, model: native.NativeModel, like: CausalLM) -> None:
        self.config = like.config
        self.num_heads, self.num_kv_heads = like.num_heads, like.num_kv_heads
        self._model = model

    def forward(self, batch: Any, kv_cache: Any, _: Any) -> torch.Tensor:
        return NativeForward(self._model, kv_cache)(batch)


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> LoadedFiles:
    return open_model(smollm2_gguf)


@pytest.fixture(scope="module")
def reference(files: LoadedFiles) -> CausalLM:
    return CausalLM(
        decoder_spec(files.config, 256),
        files.weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=256,
    )


@pytest.fixture(scope="module")
def sequences(files: LoadedFiles) -> list[list[int]]:
    return [files.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def wanted(reference: CausalLM, sequences: list[list[int]]) -> list[torch.Tensor]:
    return run(reference, sequences, [256])


def bound(
    files: LoadedFiles, reference: CausalLM, mode: Literal["float32", "int8"], threads: int = 2
) -> Any:
    spec = native_spec(decoder_spec(files.config, 256), mode, threads)
    return Bound(native.NativeModel(spec, files.weights), reference)


@pytest.mark.parametrize("isa", sets())
def test_float32_mode_equals_torch(
    isa: str,
    files: LoadedFiles,
    reference: CausalLM,
    sequences: list[list[int]],
    wanted: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    model = bound(files, reference, "float32")
    assert model._model.isa == isa
    for found, right in zip(run(model, sequences, [40, 3, 1]), wanted, strict=True):
        assert (found - right).abs().max() < 1e-3


@pytest.mark.parametrize("isa", sets())
def test_int8_mode_agrees_on_nearly_every_token(
    isa: str,
    files: LoadedFiles,
    reference: CausalLM,
    sequences: list[list[int]],
    wanted: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    found = torch.cat(run(bound(files, reference, "int8"), sequences, [256], torch.float16))
    right = torch.cat(wanted)
    assert (found.argmax(-1) == right.argmax(-1)).float().mean() > 0.9
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), right.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.03


@pytest.mark.parametrize(
    ("mode", "kv_dtype"), [("float32", torch.float32), ("int8", torch.float16)]
)
def test_a_rows_result_is_the_same_bits_in_any_batch_and_chunking(
    mode: Literal["float32", "int8"],
    kv_dtype: torch.dtype,
    files: LoadedFiles,
    reference: CausalLM,
    sequences: list[list[int]],
) -> None:
    together = run(bound(files, reference, mode), sequences, [17, 1], kv_dtype)
    for sequence, found in zip(sequences, together, strict=True):
        (alone,) = run(bound(files, reference, mode, threads=1), [sequence], [256], kv_dtype)
        assert torch.equal(found, alone)


@pytest.mark.parametrize("size", [8, 16, 48])
def test_sizes_that_the_kernels_cannot_compute_are_refused(size: int, files: LoadedFiles) -> None:
    spec = native_spec(decoder_spec(files.config, 256), "float32", 1)
    odd = replace(spec, head_dim=size, inv_freq=[1.0] * (size // 2))
    with pytest.raises(ConfigError, match="head_dim"):
        native.NativeModel(odd, files.weights)


class Changed:
    """The file's tensors, with some hidden and some more."""

    def __init__(self, files: LoadedFiles, hidden: str = "", more: str = "") -> None:
        self._weights, self._hidden, self._more = files.weights, hidden, more

    def __getitem__(self, name: str) -> Any:
        return self._weights["model.norm.weight" if name == self._more else name]

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Any:
        names = [name for name in self._weights if name != self._hidden]
        return iter([*names, self._more] if self._more else names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": "model.layers.3.mlp.up_proj.weight"}, "missing: model.layers.3.mlp.up_proj"),
        ({"more": "model.layers.0.self_attn.q_proj.bias"}, "unexpected: model.layers.0.self_attn"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: dict[str, str], said: str, files: LoadedFiles
) -> None:
    spec = native_spec(decoder_spec(files.config, 256), "float32", 1)
    with pytest.raises(ModelLoadError, match=said):
        native.NativeModel(spec, Changed(files, **change))
