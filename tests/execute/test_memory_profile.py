"""Memory is measured at the start: the largest step is run, and KV blocks get what it leaves."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aengine import Engine, SamplingParams
from aengine.config import EngineConfig
from aengine.errors import OutOfMemoryError
from aengine.execute import loader
from aengine.execute.loader import load_model
from aengine.execute.memory import CudaMemory, HostMemory
from aengine.execute.memory_profile import computed_activations, graph_reserve, padding_batch
from aengine.model.files import open_model
from aengine.policy.planning import MOST_LOGPROB_POSITIONS
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aengine.execute.loader import LoadedModel
    from aengine.model.batch import ForwardBatch

CPU = torch.device("cpu")


class SimulatedMemory:
    """A device whose largest step takes what the test says, if it is not larger than `most`."""

    default_fraction = 0.9

    def __init__(self, free: int, *, most: int = 1 << 30) -> None:
        self.left = free
        self.most = most
        self.steps: list[ForwardBatch] = []
        self.watching = False

    def free(self) -> int:
        return self.left

    def peak_of(self, work: Callable[[], object]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            self.watch(patch)
            work()
        tokens = len(self.steps[-1].token_ids)
        if tokens > self.most:
            raise torch.OutOfMemoryError(f"{tokens} tokens")
        return tokens * 1000

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        from aengine.execute.forward import TorchForward

        call = TorchForward.__call__

        def noted(forward: TorchForward, batch: ForwardBatch) -> torch.Tensor:
            self.steps.append(batch)
            return call(forward, batch)

        patch.setattr(TorchForward, "__call__", noted)


def load(path: Path, memory: Any, **options: Any) -> LoadedModel:
    settings = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "block_size": 16}
    config = EngineConfig.from_options(str(path), settings | options)
    return load_model(config, open_model(path), CPU, memory)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loader, "_native_mode", lambda *args: None)
    return write_gguf(tmp_path / "m.gguf")


def test_blocks_get_what_the_largest_step_leaves(path: Path) -> None:
    memory = SimulatedMemory(3 << 20)
    model = load(path, memory, max_num_seqs=200, max_num_batched_tokens=600)
    (step,) = memory.steps
    assert len(step.token_ids) == 600
    assert step.num_decode == 199
    assert step.logit_index is not None
    assert len(step.logit_index) == 200 + min(400, MOST_LOGPROB_POSITIONS)
    assert model.profile.activations == 600_000
    assert model.profile.weights == model.weights.nbytes
    left = (3 << 20) - 600_000
    assert model.num_blocks == int(left * 0.9) // model.weights.spec.bytes_per_block


def test_the_profile_leaves_nothing_behind(path: Path) -> None:
    """Its slots, tokens and blocks are those of throw-away objects."""
    model = load(path, SimulatedMemory(1 << 30), max_num_seqs=8)
    assert not model.sampler.table.flags.any()
    assert not model.sampler.future_map.any()
    assert not any(layer.k.any() or layer.v.any() for layer in model.kv_cache)


def test_a_step_that_does_not_fit_is_refused_with_one_that_does(path: Path) -> None:
    memory = SimulatedMemory(1 << 30, most=100)
    with pytest.raises(OutOfMemoryError, match="max_num_batched_tokens=512") as caught:
        load(path, memory, max_num_seqs=16)
    hint = re.fullmatch(r"max_num_batched_tokens=(\d+)", caught.value.hint)
    assert hint
    assert caught.value.breakdown["weights"] > 0
    load(path, memory, max_num_seqs=16, max_num_batched_tokens=int(hint[1]))


def test_no_step_fits(path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="max_num_seqs") as caught:
        load(path, SimulatedMemory(1 << 30, most=10), max_num_seqs=16)
    assert not caught.value.hint


def test_v2248_a_refusal_shows_the_breakdown_and_a_value_that_loads(path: Path) -> None:
    memory = SimulatedMemory(700_000)
    with pytest.raises(OutOfMemoryError, match="activations") as caught:
        load(path, memory, kv_cache_fraction=0.1)
    assert caught.value.breakdown["activations"] == 512_000
    name, value = caught.value.hint.split("=")
    assert name == "max_model_len"
    model = load(path, memory, kv_cache_fraction=0.1, max_model_len=int(value))
    assert model.num_blocks * model.weights.spec.bytes_per_block <= 188_000


def test_weights_that_do_not_fit_are_an_error_of_this_package(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(loader, "load_weights", full)
    with pytest.raises(OutOfMemoryError, match="weights do not fit into the 1 MiB") as caught:
        load(path, SimulatedMemory(1 << 20))
    assert caught.value.breakdown == {"free": 1 << 20}


def test_on_a_cpu_the_activations_are_computed(path: Path) -> None:
    model = load(path, None, max_num_seqs=4, max_num_batched_tokens=64)
    shape, config = open_model(path).config, EngineConfig.from_options("m", {"max_num_seqs": 4})
    assert model.profile.default_fraction == HostMemory.default_fraction
    logits = (3 * 4 + 64) * 258 * 4
    assert model.profile.activations == max(
        64 * (4 * 64 + (2 * 4 + 2 * 2) * 16 + 3 * 96) * 4, 64 * 64 * 4 + logits
    )
    more = computed_activations(config.scheduler, shape, itemsize=4)
    assert more > model.profile.activations


def test_a_padding_batch_holds_prompts_longer_than_the_context_in_rows() -> None:
    batch = padding_batch(tokens=100, rows=3, longest=40, block_size=16, device=CPU)
    assert batch.query_start.tolist() == [0, 1, 2, 42, 82, 100]
    assert batch.context_lens.tolist() == [1, 1, 40, 40, 18]
    assert batch.block_tables.shape == (5, 3)
    one = padding_batch(tokens=1, rows=1, longest=40, block_size=16, device=CPU)
    assert one.query_start.tolist() == [0, 1]
    assert one.num_decode == 0


def test_graphs_hold_the_largest_step_once_more() -> None:
    config = EngineConfig.from_options("m", {"max_num_seqs": 4}).scheduler
    some, more = graph_reserve(config, 10**6), graph_reserve(config, 3 * 10**6)
    assert more - some == 2 * 10**6
    assert some > 10**6


@pytest.mark.gpu
def test_the_allocator_tells_what_work_takes() -> None:
    device = torch.device("cuda", 0)
    memory = CudaMemory(device)

    def take(size: int) -> None:
        torch.zeros(size, dtype=torch.uint8, device=device)

    take(1 << 20)  # the first work in a process loads the device's code
    before = memory.free()
    assert 64 << 20 <= memory.peak_of(lambda: take(64 << 20)) < 80 << 20
    assert 8 << 20 <= memory.peak_of(lambda: take(8 << 20)) < 16 << 20
    assert before - memory.free() < 32 << 20


@pytest.mark.gpu
def test_a_gpu_engine_tells_what_takes_its_memory(tmp_path: Path) -> None:
    """Activations are measured, graphs reserved, and the value of the refusal works."""
    path = write_gguf(tmp_path / "m.gguf")
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 128}

    async def ask(**more: Any) -> int:
        async with Engine(str(path), **options | more) as engine:
            answer = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(answer.token_ids) == 4
            return (await engine.stats()).kv_blocks_total

    with pytest.raises(OutOfMemoryError, match="activations") as caught:
        asyncio.run(ask(kv_cache_memory=1, max_num_seqs=1024, max_num_batched_tokens=4096))
    breakdown = caught.value.breakdown
    assert breakdown["activations"] > 1024 * 258 * 4
    assert breakdown["graphs"] > breakdown["activations"]
    assert asyncio.run(ask(max_num_seqs=16)) == 16 * 2  # all that 16 sequences of 128 can fill
