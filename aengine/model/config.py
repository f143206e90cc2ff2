"""`ModelConfig`: what a model family needs to know, whichever file it was read from.

Two readers: Hugging Face's `config.json` and GGUF metadata. Both refuse what they do not
understand; the family itself (see `registry`) refuses what it does not compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aengine.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

GGUF_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""GGUF's `general.architecture` -> the Hugging Face name that the registry knows."""

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model.

    `architecture` is the Hugging Face class name, whatever the file format. `rope_scaling` has the
    keys of Hugging Face (`rope_type`, `factor`, ...), or is None for plain rotary embeddings;
    `rope_type="factors"` (GGUF only) lists one divisor per frequency under `factors`.
    `dtype` is that of the stored weights; float32 for quantised ones. `sliding_window` is in
    tokens. `extra` holds the raw keys of the file for what only one family knows.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    hidden_act: str = "silu"
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in positive:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"the model's {name} is {value!r}: a positive integer wanted")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ModelLoadError(f"the model's {name} is {value!r}: a positive number wanted")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"the model has num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads}: "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"the model's head_dim is {self.head_dim}: it must be even")
        if self.dtype not in _DTYPES:
            raise ModelLoadError(
                f"the model's dtype is {self.dtype!r}: one of {', '.join(_DTYPES)} is supported"
            )
        if self.sliding_window is not None and (
            not isinstance(self.sliding_window, int) or self.sliding_window < 1
        ):
            raise ModelLoadError(
                f"the model's sliding_window is {self.sliding_window!r}: "
                "a positive integer or null wanted"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the content of `config.json` (and of `generation_config.json`).

        Raises:
            ModelLoadError: a key is missing or its value is impossible; the message names it.
        """
        architecture = _hf_architecture(config)
        heads = _need(config, "num_attention_heads", int)
        hidden = _need(config, "hidden_size", int)
        window = config.get("sliding_window")
        if config.get("use_sliding_window") is False:
            window = None
        theta, scaling = _hf_rope(config)
        ends = _token_ids("eos_token_id", config.get("eos_token_id"))
        if generation is not None:
            ends |= _token_ids("eos_token_id", generation.get("eos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=_need(config, "vocab_size", int),
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size", int),
            num_layers=_need(config, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=_default(config.get("num_key_value_heads"), heads),
            head_dim=_default(config.get("head_dim"), hidden // heads if heads > 0 else 0),
            max_position_embeddings=_need(config, "max_position_embeddings", int),
            rms_norm_eps=_default(config.get("rms_norm_eps"), 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            sliding_window=window,
            hidden_act=str(config.get("hidden_act") or "silu"),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix(
                "torch."
            ),
            eos_token_ids=ends,
            bos_token_id=_first(_token_ids("bos_token_id", config.get("bos_token_id"))),
            extra=dict(config),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_types: Mapping[str, str],
        *,
        rope_factors: Collection[float] | None = None,
    ) -> ModelConfig:
        """Read GGUF metadata.

        Args:
            metadata: the file's key-value pairs.
            tensor_types: GGUF tensor name -> type name; tells of tied embeddings, biases and dtype.
            rope_factors: content of the tensor `rope_freqs.weight`, if the file has it.

        Raises:
            ModelLoadError: a key is missing, or the architecture or its value is unsupported.
        """
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in GGUF_ARCHITECTURES:
            raise ModelLoadError(
                f"the GGUF file has general.architecture={arch!r}: supported are "
                f"{', '.join(sorted(GGUF_ARCHITECTURES))}"
            )
        if metadata.get(f"{arch}.expert_count"):
            raise ModelLoadError(
                f"the GGUF file has {arch}.expert_count={metadata[f'{arch}.expert_count']}: "
                "mixtures of experts are not supported"
            )
        heads = _need(metadata, f"{arch}.attention.head_count", int)
        hidden = _need(metadata, f"{arch}.embedding_length", int)
        head_dim = _default(
            metadata.get(f"{arch}.attention.key_length"), hidden // heads if heads > 0 else 0
        )
        rotary = _default(metadata.get(f"{arch}.rope.dimension_count"), head_dim)
        if rotary != head_dim:
            raise ModelLoadError(
                f"the GGUF file has {arch}.rope.dimension_count={rotary} and a head of {head_dim}: "
                "partial rotary embeddings are not supported"
            )
        return cls(
            architecture=GGUF_ARCHITECTURES[arch],
            vocab_size=_gguf_vocab_size(metadata, arch),
            hidden_size=hidden,
            intermediate_size=_need(metadata, f"{arch}.feed_forward_length", int),
            num_layers=_need(metadata, f"{arch}.block_count", int),
            num_heads=heads,
            num_kv_heads=_default(metadata.get(f"{arch}.attention.head_count_kv"), heads),
            head_dim=head_dim,
            max_position_embeddings=_need(metadata, f"{arch}.context_length", int),
            rms_norm_eps=_need(metadata, f"{arch}.attention.layer_norm_rms_epsilon", float),
            rope_theta=_default(metadata.get(f"{arch}.rope.freq_base"), 10_000.0),
            rope_scaling=_gguf_rope(metadata, arch, rope_factors),
            tie_word_embeddings="output.weight" not in tensor_types,
            attention_bias="blk.0.attn_q.bias" in tensor_types,
            sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
            dtype={"F16": "float16", "BF16": "bfloat16"}.get(
                tensor_types.get("blk.0.attn_q.weight", ""), "float32"
            ),
            eos_token_ids=_gguf_ends(metadata),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            extra={k: v for k, v in metadata.items() if not k.startswith("tokenizer.")},
        )


def _need(source: Mapping[str, Any], key: str, kind: type) -> Any:
    value = source.get(key)
    kinds = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        state = "is missing" if value is None else f"is {value!r}"
        raise ModelLoadError(f"the model's {key} {state}: type {kind.__name__} wanted")
    return value


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _first(ids: frozenset[int]) -> int | None:
    return min(ids, default=None)


def _token_ids(name: str, value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelLoadError(f"the model's {name} is {value!r}: token ids wanted")
    return frozenset(values)


def _hf_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(
            f"config.json has architectures={names!r}: a list of one class name is needed, "
            "such as ['LlamaForCausalLM']"
        )
    if "quantization_config" in config:
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ModelLoadError(
            f"config.json has a quantization_config ({method!r}): folders with float32, "
            "bfloat16 or float16 weights are supported, and quantised weights in GGUF files"
        )
    return str(names[0])


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Theta and scaling, from the one mapping newer files have or the two keys older ones have."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    theta = config.get("rope_theta")
    if scaling is None:
        return _default(theta, 10_000.0), None
    if not isinstance(scaling, dict):
        raise ModelLoadError(f"config.json has rope_scaling={scaling!r}: a mapping is needed")
    scaling = dict(scaling)
    theta = _default(scaling.pop("rope_theta", None), _default(theta, 10_000.0))
    kind = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", _default(kind, "default"))
    if not isinstance(kind, str):
        raise ModelLoadError(f"config.json has rope_type={kind!r}: one name is needed")
    return theta, None if kind == "default" else scaling


def _gguf_vocab_size(metadata: Mapping[str, Any], arch: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = metadata.get(f"{arch}.vocab_size")
    if tokens is not None:
        # The list is what the embedding's rows follow; the number is optional and at times stale.
        return len(tokens)
    if not isinstance(size, int):
        raise ModelLoadError(
            f"the GGUF file has neither tokenizer.ggml.tokens nor {arch}.vocab_size: "
            "the size of the vocabulary is not known"
        )
    return size


def _gguf_rope(
    metadata: Mapping[str, Any], arch: str, factors: Collection[float] | None
) -> Mapping[str, Any] | None:
    if factors is not None:
        return {"rope_type": "factors", "factors": tuple(factors)}
    kind = metadata.get(f"{arch}.rope.scaling.type")
    if kind is None or kind == "none":
        return None
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": _need(metadata, f"{arch}.rope.scaling.factor", float),
    }
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _gguf_ends(metadata: Mapping[str, Any]) -> frozenset[int]:
    """End tokens: the file's eos, and its end of turn where it names one."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return frozenset(value for value in values if isinstance(value, int))
