"""The step that is run to measure memory can be run with Triton's kernels, on padding alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from aengine.execute.forward import TorchForward
from aengine.execute.kv_cache import KVCacheSpec
from aengine.execute.memory_profile import run_largest_step
from aengine.execute.sampler import Sampler
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.registry import decoder_spec
from tests.model.checkpoints import random_checkpoint

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LONGEST, BLOCK = 24, 16
NETWORK = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=LONGEST,
)
SIZES = [(1, 1), (7, 3), (40, 3)]
"""Tokens and rows; the last has prompts longer than the context."""


def run_all() -> None:
    from aengine.kernels import triton_sampling
    from aengine.model.triton_backend import TritonBackend, triton_ops

    spec = decoder_spec(NETWORK, LONGEST)
    model = CausalLM(
        spec,
        random_checkpoint(spec),
        dtype=torch.float32,
        device=DEVICE,
        max_model_len=LONGEST,
        ops=triton_ops(),
    )
    kv = KVCacheSpec.of(NETWORK, block_size=BLOCK, dtype=torch.float32)
    for tokens, rows in SIZES:
        cache = kv.allocate(0, DEVICE)
        backend = TritonBackend(model, max_rows=rows, context_hint=LONGEST, device=DEVICE)
        forward = TorchForward(model, cache, backend)
        sampler = Sampler(max_num_seqs=rows, vocab_size=50, device=DEVICE, kernels=triton_sampling)
        run_largest_step(
            forward,
            sampler,
            tokens=tokens,
            rows=rows,
            longest=LONGEST,
            block_size=BLOCK,
            device=DEVICE,
        )
        assert all(bool(layer.k.isfinite().all()) for layer in cache)
        assert int(sampler.table.seen.sum()) == rows * (1 + 2), "each prompt's token, and a sample"


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="for a GPU")
def test_the_largest_step_runs_on_a_gpu() -> None:
    run_all()


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test below starts")
def test_the_largest_step_runs_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.execute.test_triton_profile"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ran" in done.stdout


if __name__ == "__main__":
    run_all()
    sys.stdout.write("ran\n")
