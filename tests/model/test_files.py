"""Opening model files: a Hugging Face folder, a GGUF file, and everything that can be wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aengine import Engine, InvalidRequestError, SamplingParams
from aengine.errors import ModelLoadError
from aengine.model.causal_lm import CausalLM
from aengine.model.files import open_model
from aengine.model.registry import decoder_spec

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = ["the quick brown fox jumps over the lazy dog", "一二三 numbers 123", "def f(x): return x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as transformers saves it, with a byte-level BPE."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    fast.save_pretrained(path)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
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


def test_a_folder_gives_the_tokens_and_the_chat_text_of_transformers(folder: Path) -> None:
    files = open_model(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*CORPUS, "", "  spaces\t\n", "émoji 🙂"]:
        ids = files.tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert files.tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "hello"}]
    wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert files.chat.render(messages) == wanted
    assert files.end_token_ids == {1}
    assert not files.quantised


def test_an_engine_on_a_folder_generates_what_transformers_does(folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    ids = open_model(folder).tokenizer.encode("the lazy dog", add_special_tokens=False)
    wanted = model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )

    async def ask() -> Any:
        async with Engine(str(folder), device="cpu") as engine:
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            return await engine.generate(ids, params)

    assert list(asyncio.run(ask()).token_ids) == wanted[0, len(ids) :].tolist()


def write_gguf(path: Path, **changes: Any) -> Path:
    """A tiny Llama in a GGUF file."""
    options: dict[str, Any] = {"arch": "llama", "pre": "smollm", "template": None, "drop": ()}
    options |= changes
    writer = gguf.GGUFWriter(path, options["arch"])
    values = {
        "add_context_length": 128,
        "add_embedding_length": 64,
        "add_feed_forward_length": 96,
        "add_block_count": 1,
        "add_head_count": 4,
        "add_head_count_kv": 2,
        "add_layer_norm_rms_eps": 1e-5,
        "add_rope_freq_base": 1e4,
        "add_rope_dimension_count": 16,
        "add_vocab_size": 258,
    }
    for method, value in values.items():
        if method not in options["drop"]:
            getattr(writer, method)(value)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(options["pre"])
    writer.add_token_list([*alphabet, alphabet[0] + alphabet[1], "</s>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(257)
    if options["template"] is not None:
        writer.add_chat_template(options["template"])
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (258, 64),
        "output_norm": (64,),
        "blk.0.attn_norm": (64,),
        "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    for name, shape in shapes.items():
        if name in options["drop"]:
            continue
        data = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> CausalLM:
    files = open_model(path)
    return CausalLM(
        decoder_spec(files.config, 64),
        files.weights,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
    )


def test_a_gguf_file_loads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    files = open_model(path)
    assert files.quantised
    assert files.config.architecture == "LlamaForCausalLM"
    assert load(path).num_layers == 1


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.3, 0.6, 0.95, 0.9999])
def test_a_cut_file_is_refused(share: float, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError) as caught:
        load(cut)
    assert "cut.gguf" in str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_header_never_crashes(seed: int, tmp_path: Path) -> None:
    """Either it loads (the bytes did not matter) or it is refused by name."""
    data = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    random = np.random.default_rng(seed)
    for position in random.integers(4, 6000, 3):
        data[position] = int(random.integers(256))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(bytes(data))
    outcome = "loaded"
    try:
        load(damaged)
    except ModelLoadError as error:
        outcome = str(error)
    assert outcome


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "mamba"}, "mamba"),
        ({"pre": "unheard-of"}, "unheard-of"),
        ({"drop": ("add_block_count",)}, "block_count"),
        ({"drop": ("blk.0.attn_v",)}, "model.layers.0.self_attn.v_proj.weight"),
    ],
)
def test_what_is_missing_or_unsupported_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert said in str(caught.value)


def test_messages_without_a_chat_template_are_refused_and_the_engine_goes_on(
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "m.gguf")

    async def ask() -> Any:
        async with Engine(str(path), device="cpu") as engine:
            with pytest.raises(InvalidRequestError, match="no chat template"):
                await engine.generate([{"role": "user", "content": "hi"}])
            return await engine.generate("hi", SamplingParams(max_tokens=3, ignore_eos=True))

    assert len(asyncio.run(ask()).token_ids) == 3


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{broken", "not valid JSON"),
        ("config.json", '{"architectures": ["WhisperModel"]}', "WhisperModel"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", "short", "model.safetensors"),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", "{}", "not a tokenizer"),
    ],
)
def test_a_broken_folder_is_refused_by_name(
    file: str, content: str | None, said: str, folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / file).unlink()
    if content is not None:
        if file == "config.json" and content.startswith('{"arch'):
            raw = json.loads((folder / file).read_text()) | json.loads(content)
            content = json.dumps(raw)
        (broken / file).write_text(content)
    with pytest.raises(ModelLoadError) as caught:
        load(broken)
    assert said in str(caught.value)


def test_a_path_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        open_model(tmp_path / "nothing")
