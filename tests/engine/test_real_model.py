"""The real small model from the front door: tokens equal transformers' on the same weights."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from aengine import Engine, FinishReason, SamplingParams
from aengine.model.causal_lm import CausalLM
from aengine.model.files import LoadedFiles, open_model
from aengine.model.registry import decoder_spec
from tests.model.paged import run

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [
    "Why is the sky blue?",
    "Write a haiku about rivers.",
    "def fibonacci(n):",
    "The capital of France is",
    "数字一二三四五",
    "List three uses of a paperclip:",
    "Once upon a time, in a land of 1,024 lakes,",
    "Translate to Spanish: good morning, my friend",
    "🙂 emoji and  double  spaces",
    "SELECT name FROM users WHERE",
]


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> LoadedFiles:
    return open_model(smollm2_gguf)


@pytest.fixture(scope="module")
def oracle(files: LoadedFiles) -> Any:
    """transformers' Llama with the file's weights, dequantised."""
    config = files.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    state = {name: torch.as_tensor(files.weights[name].dequantize()) for name in files.weights}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model


@pytest.mark.parametrize("chunks", [[256], [7], [10, 1]], ids=["whole", "chunks", "then-one"])
def test_logits_equal_transformers(files: LoadedFiles, oracle: Any, chunks: list[int]) -> None:
    model = CausalLM(
        decoder_spec(files.config, 512),
        files.weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=512,
    )
    sequences = [files.tokenizer.encode(prompt) for prompt in PROMPTS[:5]]
    for ids, found in zip(sequences, run(model, sequences, chunks), strict=True):
        with torch.inference_mode():
            wanted = oracle(torch.tensor([ids])).logits[0]
        assert (found - wanted).abs().max() < 1e-3


def test_greedy_text_equals_transformers_alone_and_in_a_batch(
    files: LoadedFiles, oracle: Any
) -> None:
    params = SamplingParams(max_tokens=64, temperature=0)

    async def both() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512}
        async with Engine("smollm2-135m", enable_prefix_cache=False, **options) as engine:
            alone = [(await engine.generate(p, params)).token_ids for p in PROMPTS]
            batch = await asyncio.gather(*[engine.generate(p, params) for p in PROMPTS])
        return alone, [result.token_ids for result in batch]

    alone, batch = asyncio.run(both())
    assert alone == batch
    for prompt, output in zip(PROMPTS, alone, strict=True):
        ids = files.tokenizer.encode(prompt)
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*ids, *output]])).logits[0]
        greedy = logits[len(ids) - 1 : -1].argmax(-1)
        assert tuple(greedy.tolist()) == output


def test_a_chat_ends_by_itself_and_an_engine_serves_every_kind_of_prompt(
    files: LoadedFiles,
) -> None:
    chat = [{"role": "user", "content": "Say hello."}]
    ids = files.tokenizer.encode(files.chat.render(chat), add_special_tokens=False)
    params = SamplingParams(max_tokens=100, temperature=0)

    async def ask() -> list[Any]:
        async with Engine("smollm2-135m", device="cpu", max_model_len=512) as engine:
            return [await engine.generate(prompt, params) for prompt in (chat, ids)]

    by_messages, by_ids = asyncio.run(ask())
    assert by_messages.finish_reason is FinishReason.STOP
    assert by_messages.text == by_ids.text
    assert by_messages.usage.prompt_tokens == len(ids)
    assert by_ids.usage.cached_tokens > 0


def test_seeded_sampling_is_the_same_alone_and_in_a_batch() -> None:
    """known-faults: V#51187."""
    params = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, top_k=50, seed=11)

    async def sample() -> tuple[Any, list[Any]]:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
        async with Engine("smollm2-135m", **options) as engine:
            alone = await engine.generate(PROMPTS[0], params)
            free = SamplingParams(max_tokens=20, temperature=1.0)
            others = [engine.generate(p, free) for p in PROMPTS[1:5]]
            again = await asyncio.gather(engine.generate(PROMPTS[0], params), *others)
        return alone, again

    alone, again = asyncio.run(sample())
    assert again[0].token_ids == alone.token_ids


def test_logprobs_of_the_stream_equal_those_of_the_result(files: LoadedFiles, oracle: Any) -> None:
    """known-faults: S#30188."""
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=1)

    async def ask() -> tuple[list[Any], Any]:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
        async with Engine("smollm2-135m", **options) as engine:
            stream = engine.generate(PROMPTS[3], params)
            chunks = [chunk async for chunk in stream]
            return chunks, await stream

    chunks, result = asyncio.run(ask())
    streamed = tuple(itertools.chain.from_iterable(c.logprobs or () for c in chunks))
    assert streamed == result.logprobs
    assert tuple(entry.token_id for entry in streamed) == result.token_ids
    ids = files.tokenizer.encode(PROMPTS[3])
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *result.token_ids]])).logits[0]
    wanted = logits.log_softmax(-1)
    for i, entry in enumerate(streamed):
        assert entry.rank == 1
        assert len(entry.top) == 3
        assert entry.logprob == pytest.approx(wanted[len(ids) - 1 + i].max().item(), abs=1e-3)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for position, prompt_entry in enumerate(result.prompt_logprobs[1:], start=1):
        assert prompt_entry is not None
        assert prompt_entry.token_id == ids[position]
        expected = wanted[position - 1, ids[position]].item()
        assert prompt_entry.logprob == pytest.approx(expected, abs=1e-3)


@pytest.fixture(autouse=True, scope="module")
def _threads() -> None:
    """transformers' forwards run in this thread: no more threads than cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
