"""Small decoders of random stored weights, and their forward in float64: the CPU kernels' oracle.

Nothing here imports torch, so that the same tests run under sanitizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.kernels.native import NativeSpec
from aengine.model.tensors import WeightTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from aengine.kernels.native import NativeModel

    Floats = npt.NDArray[np.float64]
    Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Columns and bytes of a block, as the GGUF specification has them."""

_HALVES = {
    "Q4_0": [(0, 8)],
    "Q4_1": [(0, 8), (2, -60)],
    "Q5_0": [(0, 16)],
    "Q5_1": [(0, 16), (2, -240)],
    "Q8_0": [(0, 74)],
    "Q4_K": [(0, 250), (2, 1000)],
    "Q5_K": [(0, 500), (2, 1000)],
    "Q6_K": [(208, 1600)],
}
"""Where a block has its float16 numbers, and by what they are divided to make weights of order 1;
negative: the minimum of a block of unsigned numbers."""

BLOCK = 4
"""Positions a KV block."""


def stored(rng: np.random.Generator, dtype: str, shape: tuple[int, int]) -> Bytes:
    """Random rows of a stored type: every bit pattern of the values, scales of a sensible size."""
    rows, cols = shape
    if dtype in ("F32", "F16", "BF16"):
        values = (rng.standard_normal(shape) / np.sqrt(cols)).astype(np.float32)
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return (values if dtype == "F32" else values.astype(np.float16)).view(np.uint8)
    columns, size = BLOCK_BYTES[dtype]
    raw = rng.integers(0, 256, (rows, cols // columns, size), dtype=np.uint8)
    for place, divisor in _HALVES[dtype]:
        numbers = rng.uniform(0.5, 1.5, (rows, cols // columns)) / np.sqrt(cols)
        if divisor < 0:
            numbers = -numbers
            divisor = 1 if dtype in ("Q4_1", "Q5_1") else -divisor
        elif dtype not in ("Q4_K", "Q5_K"):
            numbers = numbers * rng.choice([-1.0, 1.0], numbers.shape)
        half = (numbers / divisor).astype(np.float16)
        raw[:, :, place : place + 2] = half[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def spec(
    *,
    hidden: int = 96,
    inner: int = 160,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 32,
    vocab: int = 77,
    layers: int = 2,
    tied: bool = False,
    qkv_bias: bool = True,
    **others: Any,
) -> NativeSpec:
    """Sizes that no vector length divides evenly, where the kernels leave that open."""
    frequencies = (10000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))).tolist()
    return NativeSpec(
        **{
            "num_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "rms_eps": 1e-5,
            "inv_freq": frequencies,
            "tied": tied,
            "qkv_bias": qkv_bias,
            "mode": "float32",
            "threads": 2,
            **others,
        }
    )


def weights(sizes: NativeSpec, dtype: str, seed: int) -> dict[str, WeightTensor]:
    """Random weights of one stored type, by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    found: dict[str, WeightTensor] = {}

    def matrix(name: str, rows: int, cols: int) -> None:
        raw = stored(rng, dtype, (rows, cols))
        found[name] = WeightTensor(name, (rows, cols), dtype, raw)

    def vector(name: str, size: int, around: float) -> None:
        values = (around + 0.2 * rng.standard_normal((1, size))).astype(np.float32)
        found[name] = WeightTensor(name, (size,), "F32", values.view(np.uint8))

    for layer in range(sizes.num_layers):
        at = f"model.layers.{layer}"
        matrix(f"{at}.self_attn.q_proj.weight", q, hidden)
        matrix(f"{at}.self_attn.k_proj.weight", kv, hidden)
        matrix(f"{at}.self_attn.v_proj.weight", kv, hidden)
        matrix(f"{at}.self_attn.o_proj.weight", hidden, q)
        matrix(f"{at}.mlp.gate_proj.weight", inner, hidden)
        matrix(f"{at}.mlp.up_proj.weight", inner, hidden)
        matrix(f"{at}.mlp.down_proj.weight", hidden, inner)
        vector(f"{at}.input_layernorm.weight", hidden, 1)
        vector(f"{at}.post_attention_layernorm.weight", hidden, 1)
        if sizes.qkv_bias:
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                vector(f"{at}.self_attn.{name}_proj.bias", size, 0)
    matrix("model.embed_tokens.weight", sizes.vocab_size, hidden)
    if not sizes.tied:
        matrix("lm_head.weight", sizes.vocab_size, hidden)
    vector("model.norm.weight", hidden, 1)
    return found


def oracle(
    sizes: NativeSpec, stored_weights: dict[str, WeightTensor], token_ids: Sequence[int]
) -> Floats:
    """Logits [T, vocab_size] of one sequence, all in float64."""
    w = {name: t.dequantize().astype(np.float64) for name, t in stored_weights.items()}
    x = w["model.embed_tokens.weight"][list(token_ids)]
    length, dim = len(token_ids), sizes.head_dim
    angles = np.arange(length)[:, None] * np.asarray(sizes.inv_freq)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    hidden_ones = np.triu(np.full((length, length), -np.inf), 1)

    def norm(values: Floats, name: str) -> Floats:
        mean: Floats = np.mean(values**2, -1, keepdims=True)
        return values / np.sqrt(mean + sizes.rms_eps) * w[name]

    def turn(values: Floats) -> Floats:
        a, b = values[..., : dim // 2], values[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for layer in range(sizes.num_layers):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            (
                h @ w[f"{at}.self_attn.{name}_proj.weight"].T
                + w.get(f"{at}.self_attn.{name}_proj.bias", 0.0)
            ).reshape(length, -1, dim)
            for name in "qkv"
        )
        share = sizes.num_heads // sizes.num_kv_heads
        q, k, v = turn(q), turn(k).repeat(share, 1), v.repeat(share, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim) + hidden_ones
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        attended = np.einsum("hts,shd->thd", scores, v).reshape(length, -1)
        x = x + attended @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gate = h @ w[f"{at}.mlp.gate_proj.weight"].T
        up = h @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if sizes.tied else "lm_head.weight"]
    logits: Floats = norm(x, "model.norm.weight") @ head.T
    return logits


class Cache:
    """A paged cache of a `NativeModel`, and its steps."""

    def __init__(
        self, model: NativeModel, num_blocks: int, dtype: type[np.floating[Any]] = np.float32
    ) -> None:
        sizes = model.spec
        self.model, self.num_blocks = model, num_blocks
        shape = (num_blocks, BLOCK, sizes.num_kv_heads, sizes.head_dim)
        self.layers = [np.zeros(shape, dtype) for _ in range(2 * sizes.num_layers)]

    def step(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> list[Any]:
        """One step; each row is token ids, the first one's position and the row's blocks.

        Returns:
            Logits [tokens, vocab_size] of each row.
        """
        sizes = self.model.spec
        width = max(len(blocks) for _, _, blocks in rows)
        tables = np.zeros((len(rows), width), np.int32)
        positions, slots = [], []
        for i, (ids, first, blocks) in enumerate(rows):
            tables[i, : len(blocks)] = blocks
            for p in range(first, first + len(ids)):
                positions.append(p)
                slots.append(blocks[p // BLOCK] * BLOCK + p % BLOCK)
        spans = np.array([len(ids) for ids, _, _ in rows])
        starts = np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)
        out = np.full((len(positions), sizes.vocab_size), np.nan, np.float32)
        addresses = [layer.ctypes.data for layer in self.layers]
        self.model.forward(
            token_ids=np.array([t for ids, _, _ in rows for t in ids]),
            positions=np.array(positions),
            slot_mapping=np.array(slots),
            query_start=starts,
            context_lens=np.array([a + len(ids) for ids, a, _ in rows], dtype=np.int32),
            block_tables=tables,
            logit_index=np.arange(len(positions)),
            keys=addresses[: sizes.num_layers],
            values=addresses[sizes.num_layers :],
            kv_itemsize=self.layers[0].itemsize,
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            out=out,
        )
        return np.split(out, starts[1:-1])


def run(
    model: NativeModel,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[int],
    dtype: type[np.floating[Any]] = np.float32,
) -> list[npt.NDArray[np.float32]]:
    """Logits of every position of every sequence, `chunks` tokens at a step (the last repeats).
    `dtype`: of keys and values."""
    per = -(-max(map(len, sequences)) // BLOCK)
    cache = Cache(model, per * len(sequences) + 1, dtype)
    # Blocks interleave, so that a row that reads another's block is seen.
    blocks = [
        list(range(1 + i, 1 + per * len(sequences), len(sequences))) for i in range(len(sequences))
    ]
    done = [0] * len(sequences)
    out: list[list[Any]] = [[] for _ in sequences]
    step = 0
    while rows := [i for i, s in enumerate(sequences) if done[i] < len(s)]:
        size = chunks[min(step, len(chunks) - 1)]
        step += 1
        spans = [slice(done[i], done[i] + size) for i in rows]
        parts = cache.step(
            [(sequences[i][span], done[i], blocks[i]) for i, span in zip(rows, spans, strict=True)]
        )
        for i, part in zip(rows, parts, strict=True):
            out[i].append(part)
            done[i] += len(part)
    return [np.concatenate(parts) for parts in out]
