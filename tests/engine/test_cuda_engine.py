"""The engine on a GPU gives the tokens that it gives on the CPU (float32, a tiny random model)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aengine import Engine, SamplingParams, StructuredOutput
from aengine.batch import LaneKind
from aengine.engine import delayed
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.batch import SmPartition
    from aengine.policy.mux import MuxLoad

PROMPTS = [[5, 9, 200], list(range(40)), [7] * 17, [1, 2]]
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "seeded": [{"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9}],
    "penalties": [{"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.2}],
    "logprobs": [{"temperature": 0, "logprobs": 2}],
    "everything": [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "logprobs": 4},
        {"temperature": 1.1, "seed": 5, "frequency_penalty": 0.7, "min_p": 0.01},
        {"temperature": 0, "logit_bias": {7: 2.0}},
    ],
}


def answers(path: Path, kinds: list[dict[str, Any]], **options: Any) -> list[Any]:
    async def ask() -> list[Any]:
        asked = [
            (p, SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % len(kinds)]))
            for i, p in enumerate(PROMPTS)
        ]
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
        async with Engine(str(path), **settings | options) as engine:
            alone = [await engine.generate(*each) for each in asked]
            together = await asyncio.gather(*[engine.generate(*each) for each in asked])
            again = await asyncio.gather(*[engine.generate(*each) for each in asked])
        for one, other in zip(alone * 2, together + again, strict=True):
            assert one.token_ids == other.token_ids
        return alone

    return asyncio.run(ask())


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_gives_the_cpus_tokens(kind: str, graphs: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    mine = answers(path, KINDS[kind], device="cuda", cuda_graphs=graphs)
    theirs = answers(path, KINDS[kind], device="cpu")
    for one, other in zip(mine, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert a.rank == b.rank
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 1.0, "seed": 4, "logprobs": 1, "presence_penalty": 0.5}],
    ids=["greedy", "seeded"],
)
def test_masked_rows_are_graphs_too(options: dict[str, Any], tmp_path: Path) -> None:
    """Forward and sample are two graphs once captured; the tokens are the CPU's all along."""
    path = write_gguf(tmp_path / "m.gguf")
    word = StructuredOutput.regex("[a-z]{24}")
    masked = SamplingParams(max_tokens=40, structured=word, **options)
    free = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

    async def ask(device: str, rounds: int) -> list[list[tuple[int, ...]]]:
        settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "device": device}
        found = []
        async with Engine(str(path), **settings) as engine:
            for _ in range(rounds):
                asked = [engine.generate(p, q) for p in PROMPTS for q in (masked, free)]
                found.append([(await each).token_ids for each in asked])
                if rounds > 1:
                    await asyncio.sleep(0.55)
            if rounds > 1:
                runner: Any = engine.parts.launcher
                kinds = {type(shape).__name__ for shape in runner._graphs._graphs}
                assert kinds == {"StepShape", "SampleShape"}
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delayed, "SHORTEST_JUMP", 10**6)  # another way of sampling, tested elsewhere
        want = asyncio.run(ask("cpu", 1))
        assert asyncio.run(ask("cuda", 8)) == want * 8


class EachInTurn:
    """Another partition at each call, all of the device's in turn, contended or not."""

    def __init__(self) -> None:
        self.used: set[LaneKind] = set()
        self._calls = 0

    def select(self, load: MuxLoad) -> SmPartition:
        self._calls += 1
        chosen = load.lanes.all[self._calls % len(load.lanes.all)]
        self.used.add(chosen.kind)
        return chosen


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", ["greedy", "everything"])
def test_two_lanes_on_the_gpu_give_the_cpus_tokens(kind: str, graphs: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    policy = EachInTurn()
    mine = answers(
        path,
        KINDS[kind],
        device="cuda",
        cuda_graphs=graphs,
        mux=policy,
        max_num_batched_tokens=32,
        max_num_seqs=8,
    )
    theirs = answers(path, KINDS[kind], device="cpu")
    assert [each.token_ids for each in mine] == [each.token_ids for each in theirs]
    assert policy.used == {LaneKind.PLAIN, LaneKind.PRIORITY, LaneKind.GREEN}


@pytest.mark.gpu
def test_a_steady_step_makes_no_torch_op(tmp_path: Path) -> None:
    """Law 11: what `replay` does is numpy and driver calls."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from aengine.execute.runner import ModelRunner

    ops: list[str] = []
    steps = {"replayed": 0, "eager": 0}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    replay = ModelRunner.replay

    def counted(self: ModelRunner, plan: Any) -> Any:
        with Counting():
            output = replay(self, plan)
        steps["eager" if output is None else "replayed"] += 1
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "replay", counted)
        answers(write_gguf(tmp_path / "m.gguf"), KINDS["greedy"], device="cuda")
    assert not ops
    assert steps["replayed"] > 5 * steps["eager"], steps
