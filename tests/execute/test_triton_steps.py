"""The program that graphs capture computes what the eager way computes, step by step.

On a GPU, or where Triton interprets its kernels: there "capturing" a step means to run it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from aengine.config import SchedulerConfig
from aengine.device.future import DeviceFuture
from aengine.execute.forward import TorchForward
from aengine.execute.graph_shapes import (
    GraphSizes,
    LaneWork,
    ResultLayout,
    SampleShape,
    largest_shape,
)
from aengine.execute.inputs import InputBuilder
from aengine.execute.runner import ModelRunner
from aengine.execute.sampler import Sampler
from aengine.execute.step_graphs import StepGraphs
from aengine.model.attention import TorchBackend
from aengine.model.causal_lm import CausalLM
from aengine.model.config import ModelConfig
from aengine.model.registry import decoder_spec
from aengine.policy.planning import Work
from aengine.policy.scheduler import Scheduler
from aengine.request import Request, SamplingParams, StructuredOutput
from tests.model.checkpoints import random_checkpoint
from tests.model.steps import BLOCK as PAGE
from tests.model.steps import make_cache
from tests.model.test_triton_model import SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.batch import StepPlan, StepResult
    from aengine.execute.step_program import StepProgram

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
VOCABULARY, LENGTH, ROWS, TOKENS, BLOCKS = 50, 64, 4, 24, 64
SETTINGS = SchedulerConfig(
    max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, block_size=PAGE, max_steps_in_flight=1
)
WORD = StructuredOutput.regex("a*")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "top_k": 9, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.2, "seed": 5, "frequency_penalty": 0.7, "min_p": 0.02, "logprobs": 1},
    {"temperature": 0, "structured": WORD},
    {"temperature": 0.8, "seed": 7, "structured": WORD, "logprobs": 3},
]


class Memory:
    """What stands for pinned memory."""

    def __init__(self, program: StepProgram) -> None:
        self.packed = np.full(program.packed.numel(), -99, dtype=np.int32)
        self.result = np.full(program.result.numel(), -99, dtype=np.int32)
        self.packed_address = self.packed.ctypes.data
        self.result_address = self.result.ctypes.data


@dataclass
class Launch:
    """Copy in, the program, copy out: at once, on this thread."""

    program: StepProgram
    shape: Any
    runs: Counter[str]

    def launch(self, *holds: object, values: Sequence[int]) -> Any:
        del holds
        words = self.program.input_words(self.shape)
        packed = np.empty(words, dtype=np.int32)
        ctypes.memmove(packed.ctypes.data, values[0], packed.nbytes)
        with torch.inference_mode():
            self.program.packed[:words] = torch.from_numpy(packed).to(DEVICE)
            self.program(self.shape)
        size = ResultLayout.of(self.shape).words
        result = self.program.result[:size].cpu().numpy()
        ctypes.memmove(values[1], result.ctypes.data, result.nbytes)
        kind = "sample" if isinstance(self.shape, SampleShape) else "decode"
        self.runs["mixed" if getattr(self.shape, "tokens", 0) else kind] += 1


def eager_runner() -> ModelRunner:
    spec = decoder_spec(network(), LENGTH)
    model = CausalLM(
        spec,
        random_checkpoint(spec),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=LENGTH,
    )
    forward = TorchForward(model, make_cache(2, 2, 16, blocks=BLOCKS + 1), TorchBackend())
    sampler = Sampler(max_num_seqs=ROWS, vocab_size=VOCABULARY, device="cpu")
    return ModelRunner(forward, sampler, InputBuilder(block_size=PAGE, device=torch.device("cpu")))


def network() -> ModelConfig:
    return ModelConfig.from_hf({**SIZES, "architectures": ["LlamaForCausalLM"]})


def graph_runners(runs: Counter[str], *, lanes: bool) -> dict[Work, ModelRunner]:
    from aengine.execute.step_program import StepProgram
    from aengine.kernels import triton_sampling
    from aengine.model.triton_backend import TritonBackend, triton_ops

    spec = decoder_spec(network(), LENGTH)
    model = CausalLM(
        spec,
        random_checkpoint(spec),
        dtype=torch.float32,
        device=DEVICE,
        max_model_len=LENGTH,
        ops=triton_ops(),
    )
    cache = make_cache(2, 2, 16, device=str(DEVICE), blocks=BLOCKS + 1)
    sampler = Sampler(
        max_num_seqs=ROWS, vocab_size=VOCABULARY, device=DEVICE, kernels=triton_sampling
    )
    limits = {"max_rows": ROWS, "max_tokens": TOKENS, "max_blocks": LENGTH // PAGE}

    def lane(runner: ModelRunner, forward: TorchForward, work: LaneWork) -> ModelRunner:
        program = StepProgram(
            forward,
            sampler,
            block_size=PAGE,
            largest=largest_shape(**limits),
            max_context_len=LENGTH,
        )
        graphs = StepGraphs(
            lambda shape: Launch(program, shape, runs),
            sampler,
            lambda: Memory(program),
            GraphSizes.of(work, **limits),
            in_flight=1,
            block_size=PAGE,
        )
        runner.use_graphs(graphs)
        return runner

    def forward() -> TorchForward:
        backend = TritonBackend(model, max_rows=ROWS, context_hint=LENGTH, device=DEVICE)
        return TorchForward(model, cache, backend)

    mine = forward()
    runner = ModelRunner(mine, sampler, InputBuilder(block_size=PAGE, device=DEVICE))
    if not lanes:
        return {Work.ALL: lane(runner, mine, LaneWork())}
    other = forward()
    return {
        Work.DECODE: lane(runner, mine, LaneWork(prefill=False)),
        Work.PREFILL: lane(runner.beside(other), other, LaneWork(decode=False, few=True)),
    }


def mask(seq_id: int, position: int) -> Any:
    """Allowed tokens of a place: a third of them."""
    allowed = np.arange(64) % 3 == (seq_id + position) % 3
    return np.packbits(allowed, bitorder="little").view(np.int32)


def run_step(runner: ModelRunner, plan: StepPlan) -> StepResult:
    if not plan.constrained:
        replayed = runner.replay(plan)
        return (replayed.handle() if replayed else runner.run(plan)).to_host()
    begun = runner.replay_begin(plan)
    if begun is None:
        begun = DeviceFuture(None, runner.begin(plan))  # type: ignore[arg-type]
    at = {row: int(plan.starts[row] + plan.lengths[row]) for row in plan.constrained}
    # Every so often a mask is late once, and its row is computed again.
    rows = [row for row in plan.constrained if at[row] % 7 or plan.step_id % 2]
    masks = [mask(plan.seq_ids[row], at[row]) for row in rows]
    bitmask = np.stack(masks) if masks else np.zeros((0, 2), dtype=np.int32)
    replayed = runner.replay_finish(begun, rows, bitmask)
    return (
        replayed.handle() if replayed else runner.finish(begun.handle(), rows, bitmask)
    ).to_host()


def answers(
    runners: dict[Work, ModelRunner], kinds: Sequence[dict[str, Any]]
) -> dict[int, list[Any]]:
    scheduler = Scheduler(SETTINGS, num_blocks=BLOCKS, max_model_len=LENGTH)
    found: dict[int, list[Any]] = {}
    for index, params in enumerate(kinds):
        request = Request(
            seq_id=index + 1,
            request_id=str(index),
            prompt_token_ids=tuple((index * 5 + i * 3) % VOCABULARY for i in range(3 + index * 2)),
            params=SamplingParams(ignore_eos=True, **params),
            max_tokens=14,
        )
        scheduler.add(request, 0.0)
    for now in range(400):
        plans = [(each, scheduler.schedule(float(now), work)) for work, each in runners.items()]
        for runner, plan in plans:
            if plan is None:
                continue
            for update in scheduler.update(run_step(runner, plan), float(now)):
                assert update.error is None
                rows = found.setdefault(update.seq_id, [])
                logprobs = update.logprobs or [None] * len(update.token_ids)
                rows.extend(zip(update.token_ids, logprobs, strict=True))
            while (chore := runner.chore()) is not None:
                chore()
        if not any(plan for _, plan in plans):
            break
    assert not scheduler.num_running
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [False, True], ids=["one loop", "two lanes"])
def test_steps(lanes: bool) -> None:
    compare(lanes=lanes)


def compare(*, lanes: bool) -> None:
    runs: Counter[str] = Counter()
    kinds = KINDS[2:5] if lanes else KINDS * 2
    mine = answers(graph_runners(runs, lanes=lanes), kinds)
    theirs = answers({Work.ALL: eager_runner()}, kinds)
    assert set(runs) == {"decode", "mixed", "sample"}, runs
    assert mine.keys() == theirs.keys()
    for seq_id, rows in theirs.items():
        assert [token for token, _ in mine[seq_id]] == [token for token, _ in rows], seq_id
        assert len(rows) == 14
        for (_, got), (_, want) in zip(mine[seq_id], rows, strict=True):
            if want is None:
                assert got is None
                continue
            assert (got.token_id, got.rank) == (want.token_id, want.rank)
            assert abs(got.logprob - want.logprob) < 1e-3
            assert [token for token, _ in got.top] == [token for token, _ in want.top]


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test below starts")
def test_interpreted() -> None:
    """Without a GPU: in a process where Triton interprets its kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.execute.test_triton_steps"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


if __name__ == "__main__":
    compare(lanes=False)
    compare(lanes=True)
    sys.stdout.write("equal\n")
