"""Whole models on the Triton kernels equal the plain-torch forward: prefill, chunks, decode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aengine.model.attention import TorchBackend
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.registry import decoder_spec
from tests.model.checkpoints import random_checkpoint
from tests.model.steps import make_batch, make_cache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 4.0},
    "Gemma3": {"sliding_window": 6, "sliding_window_pattern": 2},
    "Olmo2": {},
    "Phi3": {"partial_rotary_factor": 0.75},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_torch(family: str) -> None:
    compare(family)


def compare(family: str) -> None:
    from aengine.model.triton_backend import TritonBackend, triton_ops

    raw = {**SIZES, "architectures": [f"{family}ForCausalLM"], **FAMILIES[family]}
    spec = decoder_spec(ModelConfig.from_hf(raw), 64)
    weights = random_checkpoint(spec)

    def model(device: str, **options: Any) -> CausalLM:
        return CausalLM(
            spec,
            weights,
            dtype=torch.float32,
            device=torch.device(device),
            max_model_len=64,
            **options,
        )

    plain, fast = model("cpu"), model(DEVICE, ops=triton_ops())
    plain_cache, fast_cache = make_cache(2, 2, 16), make_cache(2, 2, 16, device=DEVICE)
    backend = TritonBackend(fast, max_rows=4, context_hint=64, device=torch.device(DEVICE))
    tables = [[1, 2, 3, 12], [4, 5, 6, 7], [8, 9, 10, 11]]
    steps = [
        ([(0, 12), (0, 6)], 0, tables[:2]),
        ([(12, 1), (6, 7), (0, 13)], 1, tables),
        ([(13, 1), (13, 1), (13, 1)], 3, tables),
    ]
    for step in steps:
        wanted = plain.forward(make_batch(*step), plain_cache, TorchBackend())
        found = fast.forward(make_batch(*step, device=DEVICE), fast_cache, backend).cpu()
        assert wanted.std() > 0.1  # not trivially equal
        assert (found - wanted).abs().max() < 1e-3 * max(1.0, float(wanted.abs().max()))


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test below starts")
def test_interpreted() -> None:
    """Without a GPU: in a process where Triton interprets its kernels."""
    command = [sys.executable, "-m", "tests.model.test_triton_model"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    # Interpreting is slow: the families that between them use every kernel's every branch.
    for name in ("Gemma2", "Gemma3", "Phi3", "SmolLM3", "Qwen3Moe"):
        compare(name)
