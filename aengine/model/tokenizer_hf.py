"""The tokenizer of a Hugging Face folder: `tokenizer.json`, with what its config adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE

from aengine.errors import ModelLoadError
from aengine.model.byte_table import byte_level_table, metaspace_table
from aengine.model.tokenizer import FastTokenizer, may_split

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def tokenizer_from_folder(
    folder: Path, config: Mapping[str, Any], eos_token_ids: frozenset[int]
) -> FastTokenizer:
    """Build the tokenizer.

    Args:
        folder: has `tokenizer.json`.
        config: the content of `tokenizer_config.json`, or nothing.
        eos_token_ids: the model's own end tokens.

    Raises:
        ModelLoadError: the file is missing, damaged, or not a BPE tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} has no tokenizer.json")
    try:
        library = LibraryTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{path} is not a tokenizer: {error}") from error
    if not isinstance(library.model, BPE):
        kind = type(library.model).__name__
        raise ModelLoadError(f"{path} holds a {kind} tokenizer: BPE is supported")
    added = library.get_added_tokens_decoder()
    literal = {token: entry.content for token, entry in added.items()}
    count = library.get_vocab_size(with_added_tokens=True)
    tokens = [library.id_to_token(token) or "" for token in range(count)]
    metaspace = any(token.startswith("\u2581") for token in tokens)
    table = (metaspace_table if metaspace else byte_level_table)(tokens, literal)
    special = frozenset(token for token, entry in added.items() if entry.special)
    bos = _id(library, config.get("bos_token"))
    eos = _id(library, config.get("eos_token"))
    around = library.encode("").ids  # what the post-processor puts around an empty text
    prefix = around[:1] if bos is not None and around[:1] == [bos] else []
    return FastTokenizer(
        library,
        table,
        special_ids=special,
        bos_token_id=bos,
        eos_token_ids=eos_token_ids | ({eos} if eos is not None else set()),
        prefix=prefix,
        suffix=around[len(prefix) :],
        splittable=may_split(library) and not metaspace,
    )


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens that chat templates use."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {name: text for name in names if (text := _content(config.get(name))) is not None}


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id(library: LibraryTokenizer, token: Any) -> int | None:
    text = _content(token)
    found: int | None = None if text is None else library.token_to_id(text)
    return found
