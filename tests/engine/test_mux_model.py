"""A real (tiny, random) model with prefill and decode side by side on a CPU: the same tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aengine import Engine, SamplingParams
from aengine.policy.mux import MuxLoad, PriorityStreams
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.batch import SmPartition

PROMPTS = [[5 + i, 9, 200] * (1 + 4 * i) for i in range(8)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "logit_bias": {7: 2.0}},
]


class InTurn:
    """Each partition of the device in turn."""

    calls = 0

    def select(self, load: MuxLoad) -> SmPartition:
        self.calls += 1
        return load.lanes.all[self.calls % len(load.lanes.all)]


def answers(path: Path, **options: Any) -> list[Any]:
    async def ask() -> list[Any]:
        settings: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "cpu_threads": 4}
        settings |= {"max_num_batched_tokens": 32, "max_num_seqs": 8}
        async with Engine(str(path), **settings | options) as engine:
            asked = [
                engine.generate(
                    prompt,
                    SamplingParams(max_tokens=24, ignore_eos=True, **KINDS[i % len(KINDS)]),
                )
                for i, prompt in enumerate(PROMPTS)
            ]
            return list(await asyncio.gather(*asked))

    return asyncio.run(ask())


@pytest.mark.parametrize("policy", [InTurn, PriorityStreams])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["kernels", "torch"])
def test_two_lanes_give_the_tokens_of_one_loop(policy: Any, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    one = answers(path, dtype=dtype)
    both = answers(path, dtype=dtype, mux=policy())
    for expected, got in zip(one, both, strict=True):
        assert got.token_ids == expected.token_ids
        if expected.logprobs is not None:
            assert [each.token_id for each in got.logprobs] == list(expected.token_ids)
