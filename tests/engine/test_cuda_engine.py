"""The engine on a GPU gives the tokens that it gives on the CPU (float32, a tiny random model)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aengine import Engine, SamplingParams
from tests.model.test_files import write_gguf

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 9, 200], list(range(40)), [7] * 17, [1, 2]]


def answers(path: Path, device: str, params: SamplingParams) -> list[tuple[int, ...]]:
    async def ask() -> list[tuple[int, ...]]:
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
        async with Engine(str(path), device=device, **options) as engine:
            alone = [(await engine.generate(p, params)).token_ids for p in PROMPTS]
            together = await asyncio.gather(*[engine.generate(p, params) for p in PROMPTS])
        assert [r.token_ids for r in together] == alone
        return alone

    return asyncio.run(ask())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
        {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0, "logprobs": 2},
    ],
    ids=["greedy", "seeded", "penalties", "logprobs"],
)
def test_the_gpu_gives_the_cpus_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
    assert answers(path, "cuda", params) == answers(path, "cpu", params)
