"""Sleep and other weights on a real network: memory comes back, tokens are those of the weights."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aengine import Engine, GenerationError, ModelLoadError, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(range(5, 45))
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def write_model(path: Path, seed: int) -> Path:
    """A tiny random Llama; the same network for every seed."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("first"), 1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("second"), 2)


async def answer(engine: Engine) -> tuple[int, ...]:
    return (await engine.generate(PROMPT, PARAMS)).token_ids


VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="nobody's")


async def test_callbacks_run_in_the_context_of_the_call(first: Path) -> None:
    seen: dict[str, set[str]] = {"a": set(), "b": set()}
    progress: list[str] = []

    def note(*_: object) -> None:
        progress.append(VARIABLE.get())

    VARIABLE.set("starter's")
    async with Engine(str(first), device="cpu", on_progress=note) as engine:

        async def ask(name: str) -> None:
            VARIABLE.set(f"{name}'s")

            def processor(_: object, logits: object) -> object:
                seen[name].add(VARIABLE.get())
                VARIABLE.set("changed")
                return logits

            params = SamplingParams(max_tokens=4, n=2, logits_processors=[processor])
            await engine.generate(PROMPT, params)

        await asyncio.gather(asyncio.create_task(ask("a")), asyncio.create_task(ask("b")))
    assert seen == {"a": {"a's"}, "b": {"b's"}}
    assert set(progress) == {"starter's"}
    assert VARIABLE.get() == "starter's"


async def test_the_cache_is_gone_while_it_sleeps_and_the_tokens_are_the_same(first: Path) -> None:
    async with Engine(str(first), device="cpu") as engine:
        before = await answer(engine)
        memory = engine.parts.memory
        layers = [weakref.ref(layer.k) for layer in memory._kv_cache]  # type: ignore[union-attr]
        assert all(layer() is not None for layer in layers)
        await engine.sleep()
        gc.collect()
        assert [layer() for layer in layers] == [None, None]
        await engine.wake()
        assert await answer(engine) == before


async def test_new_weights_give_their_own_tokens(first: Path, second: Path) -> None:
    async with Engine(str(second), device="cpu") as engine:
        wanted = await answer(engine)
    async with Engine(str(first), device="cpu") as engine:
        old = await answer(engine)
        assert old != wanted
        await engine.update_weights(str(second))
        assert await answer(engine) == wanted
        await engine.sleep()
        await engine.wake()
        assert await answer(engine) == wanted
        await engine.update_weights(str(first))
        assert await answer(engine) == old


async def test_weights_that_do_not_fit_change_nothing(
    first: Path, second: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    shutil.copytree(second, missing)
    tensors = load_file(missing / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, missing / "model.safetensors", metadata={"format": "pt"})
    wider = tmp_path / "wider"
    shutil.copytree(second, wider)
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    async with Engine(str(first), device="cpu") as engine:
        before = await answer(engine)
        for path, message in (
            (missing, "down_proj"),
            (wider, "intermediate_size=128"),
            (tmp_path / "nothing", "nothing"),
        ):
            with pytest.raises(ModelLoadError, match=message):
                await engine.update_weights(str(path))
            assert await answer(engine) == before
            result = await engine.generate(PROMPT, PARAMS)
            assert result.usage.cached_tokens > 0  # not even the cache was touched


async def test_a_processor_that_fails_is_named(first: Path) -> None:
    def shouting(_: object, logits: object) -> object:
        raise ValueError("no")

    async with Engine(str(first), device="cpu") as engine:
        with pytest.raises(GenerationError, match="shouting"):
            await engine.generate(
                PROMPT, SamplingParams(max_tokens=2, logits_processors=[shouting])
            )
