"""A tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

llama.cpp is the authority on what these files mean; the ids are equal to its ids (see
`tests/model/data`). A pre-tokenizer that is not in the table is refused: a wrong one gives text
that looks right and a model that answers worse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from aengine.errors import ModelLoadError
from aengine.model.byte_table import byte_level_table, metaspace_table
from aengine.model.tokenizer import FastTokenizer, may_split, special

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTION = r"'(?i:[sdmt]|ll|ve|re)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+|{_LEAD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+(?:{_CONTRACTION})?"
    rf"|{_LEAD}[{_UPPER}]+[{_LOWER}]*(?:{_CONTRACTION})?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

_GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    (("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
    (("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    (("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"), (_QWEN2,)),
    (("tekken",), (_TEKKEN,)),
    (("gpt-4o", "llama4"), (_GPT4O,)),
    (("deepseek-v3",), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
)
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    name: patterns for names, patterns in _GROUPS for name in names
}
"""Name (`tokenizer.ggml.pre`) -> the expressions that split a text, applied one after another."""

_WHOLE_WORDS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
)
"""Pre-tokenizers whose models take a word that is in the vocabulary whole, without merging."""
_ADDS_BOS = _WHOLE_WORDS
"""Those whose models begin a text with the bos token where the file does not say."""


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> FastTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ModelLoadError: a key is missing, or the kind of tokenizer or pre-tokenizer is unsupported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    raise ModelLoadError(
        f"the GGUF file has tokenizer.ggml.model={kind!r}: supported are 'gpt2' (byte-level BPE) "
        "and 'llama' (SentencePiece BPE)"
    )


def _byte_level(metadata: Mapping[str, Any]) -> FastTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"the GGUF file has tokenizer.ggml.pre={name!r}: supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    tokens = _strings(metadata, "tokens")
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "merges")]
    bad = next((merge for merge in merges if len(merge) != 2), None)
    if bad is not None:
        raise ModelLoadError(
            f"the GGUF file has the merge {' '.join(bad)!r}: two tokens are needed"
        )
    library = LibraryTokenizer(
        _bpe(tokens, merges, ignore_merges=name in _WHOLE_WORDS)  # type: ignore[arg-type]
    )
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name]]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    added, control = _add_tokens(library, tokens, metadata)
    return FastTokenizer(
        library,
        byte_level_table(tokens, added),
        special_ids=control,
        splittable=may_split(library),
        **_ends(metadata, len(tokens), adds_bos=name in _ADDS_BOS),
    )


def _sentencepiece(metadata: Mapping[str, Any]) -> FastTokenizer:
    tokens = _strings(metadata, "tokens")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError("the GGUF file has no tokenizer.ggml.scores, one for each token")
    types = _types(metadata, len(tokens))
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    library = LibraryTokenizer(
        _bpe(
            tokens,
            _merges_from_scores(tokens, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    library.normalizer = normalizers.Sequence(steps)
    added, control = _add_tokens(library, tokens, metadata)
    return FastTokenizer(
        library,
        metaspace_table(tokens, added),
        special_ids=control,
        **_ends(metadata, len(tokens), adds_bos=True),
    )


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to make a token from two others.

    The best score merges first; for one token the split with the longer left part comes first.
    """
    vocabulary = set(tokens)
    ranked = sorted(range(len(tokens)), key=lambda token: -scores[token])
    return [
        (tokens[token][:cut], tokens[token][cut:])
        for token in ranked
        for cut in range(len(tokens[token]) - 1, 0, -1)
        if tokens[token][:cut] in vocabulary and tokens[token][cut:] in vocabulary
    ]


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError("the GGUF file has a token twice in tokenizer.ggml.tokens")
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"the GGUF file's vocabulary cannot be used: {error}") from error


def _add_tokens(
    library: LibraryTokenizer, tokens: Sequence[str], metadata: Mapping[str, Any]
) -> tuple[dict[int, str], frozenset[int]]:
    """Register control and user-defined tokens. Returns both as id -> text, and the control ids."""
    types = _types(metadata, len(tokens))
    control = [i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
    literal = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
    library.add_special_tokens([special(tokens[i]) for i in control])
    library.add_tokens([AddedToken(tokens[i], normalized=False) for i in literal])
    return {i: tokens[i] for i in (*control, *literal)}, frozenset(control)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelLoadError(f"the GGUF file has no tokenizer.ggml.{name}: a list of strings")
    return value


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    value = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(value, list) or len(value) != count:
        raise ModelLoadError("the GGUF file has no tokenizer.ggml.token_type, one for each token")
    return value


def _ends(metadata: Mapping[str, Any], count: int, *, adds_bos: bool) -> dict[str, Any]:
    """The begin and end tokens, and which of them go around a text."""
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and not (isinstance(token, int) and 0 <= token < count):
            raise ModelLoadError(
                f"the GGUF file has tokenizer.ggml.{name}_token_id={token!r}: "
                f"the vocabulary has {count} tokens"
            )
        ids[name] = token
    bos, eos = ids["bos"], ids["eos"]
    begin = metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None
    end = metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    return {
        "bos_token_id": bos,
        "eos_token_ids": frozenset(t for t in (eos, ids["eot"], ids["eom"]) if t is not None),
        "prefix": (bos,) if begin else (),
        "suffix": (eos,) if end else (),
    }
