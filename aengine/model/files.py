"""`open_model`: from a path to everything a model's files hold, read as little as possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aengine.errors import ModelLoadError
from aengine.model.chat import ChatTemplate
from aengine.model.config import ModelConfig
from aengine.model.gguf import read_gguf
from aengine.model.gguf_weights import gguf_weights, rope_factors
from aengine.model.safetensors_weights import read_json, safetensors_weights
from aengine.model.tokenizer_gguf import tokenizer_from_gguf
from aengine.model.tokenizer_hf import special_tokens, tokenizer_from_folder

if TYPE_CHECKING:
    from pathlib import Path

    from aengine.model.gguf import GGUFFile
    from aengine.model.tensors import WeightSource
    from aengine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFiles:
    """A model's files: its shape, its stored weights (mapped, not read), its text side."""

    path: Path
    config: ModelConfig
    weights: WeightSource | None
    """None: none are wanted (`load_format="dummy"`)."""
    tokenizer: Tokenizer
    chat: ChatTemplate
    quantised: bool
    """Whether weights are stored in blocks (GGUF's quantised types)."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, as the model or its tokenizer says."""
        return self.config.eos_token_ids | self.tokenizer.eos_token_ids


def open_model(path: Path, *, weights: bool = True) -> LoadedFiles:
    """Read a `.gguf` file or a Hugging Face folder.

    Args:
        path: the file or folder.
        weights: False: leave the weights alone; a folder may be without them.

    Raises:
        ModelLoadError: neither of the two, damaged, or not supported; the message says what.
    """
    if path.is_dir():
        return _open_folder(path, weights)
    if path.is_file():
        return _open_gguf(path, weights)
    raise ModelLoadError(f"{path} does not exist: give a .gguf file or a Hugging Face folder")


def _open_gguf(path: Path, weights: bool) -> LoadedFiles:
    file = read_gguf(path)
    types = {name: tensor.type_name for name, tensor in file.tensors.items()}
    config = ModelConfig.from_gguf(file.metadata, types, rope_factors=_factors(file))
    tokenizer = tokenizer_from_gguf(file.metadata)
    plain = ("F32", "F16", "BF16", "F64")
    return LoadedFiles(
        path=path,
        config=config,
        weights=gguf_weights(file, config) if weights else None,
        tokenizer=tokenizer,
        chat=ChatTemplate(
            _text(file.metadata.get("tokenizer.chat_template")), _gguf_tokens(file.metadata)
        ),
        quantised=weights and any(kind not in plain for kind in types.values()),
    )


def _factors(file: GGUFFile) -> list[float] | None:
    factors = rope_factors(file)
    return None if factors is None else factors.tolist()


def _gguf_tokens(metadata: Any) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    found = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            found[name] = tokens[token]
    return found


def _open_folder(folder: Path, weights: bool) -> LoadedFiles:
    raw = read_json(folder / "config.json")
    config = ModelConfig.from_hf(raw, _optional(folder / "generation_config.json"))
    texts = _optional(folder / "tokenizer_config.json") or {}
    template = _text(texts.get("chat_template"))
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        template = separate.read_text(encoding="utf-8")
    return LoadedFiles(
        path=folder,
        config=config,
        weights=safetensors_weights(folder) if weights else None,
        tokenizer=tokenizer_from_folder(folder, texts, config.eos_token_ids),
        chat=ChatTemplate(template, special_tokens(texts)),
        quantised=False,
    )


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
