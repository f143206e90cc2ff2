"""The CPU kernels against a float64 oracle: every stored type, every instruction set, odd sizes.

No torch here: these tests also run under the sanitizers (`tests/device/test_sanitized.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from aengine.errors import ConfigError
from aengine.kernels import native
from tests.kernels import small_decoder as small

pytestmark = pytest.mark.skipif(not native.available(), reason="the CPU kernels are not built")

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
TYPES = tuple(native.GGML_TYPES)


def sets() -> list[str]:
    if not native.available():
        return []
    from aengine_ext import _cpu

    return _cpu.isas()


def case(dtype: str, **others: Any) -> tuple[native.NativeSpec, dict[str, Any]]:
    """Sizes and weights. Blocks of 256 columns leave less room for odd sizes."""
    wide = {"hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
    sizes = small.spec(**({**wide, **others} if dtype in K_TYPES else others))
    seed = int.from_bytes(hashlib.sha256(dtype.encode()).digest()[:4], "big")
    return sizes, small.weights(sizes, dtype, seed)


def sequences(*lengths: int, vocab: int = 77) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def relative(found: Any, right: Any) -> float:
    """Root mean square of the error, as a share of the logits' own."""
    return float(np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2)))


@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize("dtype", TYPES)
def test_float32_mode_is_the_oracle_within_rounding(
    dtype: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case(dtype)
    model = native.NativeModel(sizes, weights)
    assert model.isa == isa
    given = sequences(1, 19, 133)
    for ids, found in zip(given, small.run(model, given, [131, 7, 1]), strict=True):
        assert relative(found, small.oracle(sizes, weights, ids)) < 1e-5


@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize("dtype", TYPES)
def test_int8_mode_is_near_the_oracle(
    dtype: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case(dtype, mode="int8", tied=True, qkv_bias=False)
    given = sequences(1, 19, 37)
    found = np.concatenate(small.run(native.NativeModel(sizes, weights), given, [35, 1]))
    right = np.concatenate([small.oracle(sizes, weights, ids) for ids in given])
    assert relative(found, right) < (0.03 if dtype.startswith("Q") else 1e-5)


@pytest.mark.parametrize("isa", sets())
def test_an_outlier_does_not_coarsen_what_is_beside_it(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block has a second 8-bit term. The head ignores the outlier itself: what counts is what
    shares a block with it."""
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case("Q8_0", hidden=512, mode="int8", layers=1)
    (ids,) = sequences(40)
    errors = []
    for outlier in (1.0, 100.0):
        scales = np.ones((1, 512), dtype=np.float32)
        scales[0, 17::32] = 0.0
        scales[0, 17] = outlier
        blocks = weights["lm_head.weight"].raw.reshape(77, -1, 34).copy()
        blocks[:, :, 2 + 17] = 0
        head = replace(weights["lm_head.weight"], stored=blocks.reshape(77, -1))
        norm = replace(weights["model.norm.weight"], stored=scales.view(np.uint8))
        given = weights | {"lm_head.weight": head, "model.norm.weight": norm}
        (found,) = small.run(native.NativeModel(sizes, given), [ids], [40])
        errors.append(relative(found, small.oracle(sizes, given, ids)))
    assert errors[1] < 1.1 * errors[0], errors


@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize("mode", ["float32", "int8"])
def test_kinds_of_weights_that_share_an_input(
    mode: Literal["float32", "int8"], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may keep some matrices as floats: the input serves both."""
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case("Q8_0", mode=mode)
    _, others = case("F16")
    for name in ("q_proj", "v_proj", "gate_proj"):
        weights |= {key: value for key, value in others.items() if f".{name}.weight" in key}
    given = sequences(1, 19)
    model = native.NativeModel(sizes, weights)
    for ids, found in zip(given, small.run(model, given, [17, 1]), strict=True):
        assert relative(found, small.oracle(sizes, weights, ids)) < 0.03


@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize("head_dim", [32, 96, 160])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (10, 2)])
def test_odd_numbers_of_heads(
    heads: int, kv_heads: int, head_dim: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case(
        "Q4_1", hidden=32, inner=224, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=33
    )
    given = sequences(3, 130, 261, vocab=33)
    for ids, found in zip(
        given, small.run(native.NativeModel(sizes, weights), given, [97, 160, 1]), strict=True
    ):
        assert relative(found, small.oracle(sizes, weights, ids)) < 1e-5


@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 32), (7, 1, 96), (10, 2, 160)])
def test_float16_keys_and_values_are_the_oracle_within_their_rounding(
    heads: int, kv_heads: int, head_dim: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case("Q4_1", heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    given = sequences(3, 130, 261)
    model = native.NativeModel(sizes, weights)
    runs = [small.run(model, given, [97, 160, 1], kv) for kv in (np.float16, np.float32)]
    for ids, half, whole in zip(given, *runs, strict=True):
        assert relative(half, small.oracle(sizes, weights, ids)) < 1e-4
        assert relative(half, whole) > 0


@pytest.mark.parametrize("isa", sets())
def test_float16_values_are_rounded_as_numpy_rounds(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are a projection's bias when its weights are zero: any float can be stored."""
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case("F32", kv_heads=1, head_dim=160, layers=1)
    rng = np.random.default_rng(5)
    edges = [0.0, 65504.0, 65519.0, 65520.0, -1e9, np.inf, -np.inf, 2.0**-14, 2.0**-25]
    edges += [2.0**-24, 1.5 * 2.0**-24, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 1e-30, -6.1e-5]
    spread = rng.choice([-1, 1], 160) * 2.0 ** rng.uniform(-26, 17, 160)
    given = np.concatenate([edges, spread])[:160].astype(np.float32)
    at = "model.layers.0.self_attn.v_proj"
    zero = np.zeros((160, sizes.hidden_size), dtype=np.float32)
    weights[f"{at}.weight"] = replace(weights[f"{at}.weight"], stored=zero.view(np.uint8))
    weights[f"{at}.bias"] = replace(weights[f"{at}.bias"], stored=given[None].view(np.uint8))
    cache = small.Cache(native.NativeModel(sizes, weights), 2, np.float16)
    cache.step([([5], 0, [1])])
    stored = cache.layers[1][1, 0, 0]
    assert np.array_equal(
        stored.view(np.uint16), given.clip(-65504, 65504).astype(np.float16).view(np.uint16)
    )


@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize(
    ("dtype", "mode", "kv_dtype"),
    [
        ("F32", "float32", np.float16),
        ("F32", "float32", np.float32),
        ("Q4_0", "int8", np.float16),
        ("Q4_1", "int8", np.float16),
        ("Q6_K", "int8", np.float32),
    ],
)
def test_a_number_that_is_none_is_not_hidden(
    dtype: str,
    mode: Literal["float32", "int8"],
    kv_dtype: type[np.floating[Any]],
    isa: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case(dtype, mode=mode, layers=1)
    name = "model.layers.0.self_attn.v_proj.bias"
    nothing = np.full_like(weights[name].dequantize()[None], np.nan)
    weights[name] = replace(weights[name], stored=nothing.view(np.uint8))
    cache = small.Cache(native.NativeModel(sizes, weights), 2, kv_dtype)
    (logits,) = cache.step([([5], 0, [1])])
    assert np.isnan(logits).all()


@pytest.mark.parametrize("kv_dtype", [np.float16, np.float32])
@pytest.mark.parametrize("mode", ["float32", "int8"])
@pytest.mark.parametrize("isa", sets())
@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "Q6_K", "F16"])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(
    dtype: str,
    isa: str,
    mode: Literal["float32", "int8"],
    kv_dtype: type[np.floating[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", isa)
    sizes, weights = case(dtype, mode=mode)
    alone_sizes, _ = case(dtype, mode=mode, threads=1)
    given = sequences(150, 9, 140, 1)
    together = small.run(native.NativeModel(sizes, weights), given, [17, 110, 3, 1], kv_dtype)
    alone = native.NativeModel(alone_sizes, weights)
    for ids, found in zip(given, together, strict=True):
        assert np.array_equal(found, small.run(alone, [ids], [len(ids)], kv_dtype)[0])


WRAP = 2**32
"""What an int32 forgets: 2^32 + k becomes k."""


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([5, 77])},
        {"token_ids": np.array([-1, 5])},
        {"token_ids": np.array([5])},
        {"token_ids": np.array([5.0, 6.0])},
        {"token_ids": np.array([5, 2**64 - 1], dtype=np.uint64)},
        {"token_ids": np.array([[5, 6]])},
        {"positions": np.array([0, 4])},
        {"positions": np.array([1, 0])},
        {"positions": np.array([-3, 1])},
        {"positions": np.array([[0, 1]])},
        {"slot_mapping": np.array([4, 12])},
        {"slot_mapping": np.array([4, -1])},
        {"slot_mapping": np.array([4])},
        {"block_tables": np.array([[3]], dtype=np.int32)},
        {"block_tables": np.array([[-1]], dtype=np.int32)},
        {"block_tables": np.array([[WRAP + 1]])},
        {"block_tables": np.array([1], dtype=np.int32)},
        {"block_tables": np.array([[1.0]])},
        {"logit_index": np.array([2])},
        {"logit_index": np.array([[1]])},
        {"query_start": np.array([0, 3], dtype=np.int32)},
        {"query_start": np.array([0], dtype=np.int32)},
        {"query_start": np.array([], dtype=np.int32)},
        {"query_start": np.array([WRAP, 2])},
        {"query_start": np.array([0, WRAP + 2])},
        {"query_start": np.array([0.0, 2.0])},
        {"query_start": np.array([[0, 2]])},
        # each difference of these is positive in int32, where it wraps around
        {
            "query_start": np.array([0, 2**31 - 1, -(2**31), -1, 2], dtype=np.int32),
            "context_lens": np.array([1, 2, 1, 2]),
            "block_tables": np.ones((4, 1), dtype=np.int32),
        },
        {"context_lens": np.array([9], dtype=np.int32)},
        {"context_lens": np.array([WRAP + 2])},
        {"context_lens": np.array([2.0])},
        {"num_blocks": 0},
        {"num_blocks": -3},
        {"block_size": 0},
        {"block_size": -4},
        {"out": np.zeros((2, 77), dtype=np.float32)},
        {"out": np.zeros((1, 77))},
        {"out": np.zeros((77, 1), dtype=np.float32).T[:, ::-1]},
        {"keys": [1]},
        {"keys": [1, 2, 3]},
        {"keys": [0, 0]},
        {"kv_itemsize": 8},
        {"kv_itemsize": 0},
    ],
)
def test_a_step_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    sizes, weights = case("Q4_0")
    model = native.NativeModel(sizes, weights)
    layer = np.zeros((3, small.BLOCK, 1, 32), dtype=np.float32)

    def step() -> dict[str, Any]:
        return {
            "token_ids": np.array([5, 6]),
            "positions": np.array([0, 1]),
            "slot_mapping": np.array([4, 5]),
            "query_start": np.array([0, 2], dtype=np.int32),
            "context_lens": np.array([2], dtype=np.int32),
            "block_tables": np.array([[1]], dtype=np.int32),
            "logit_index": np.array([1]),
            "keys": [layer.ctypes.data] * 2,
            "values": [layer.ctypes.data] * 2,
            "kv_itemsize": 4,
            "num_blocks": 3,
            "block_size": small.BLOCK,
            "out": np.full((1, 77), np.nan, dtype=np.float32),
        }

    with pytest.raises(ValueError, match=r"range|integers|float32|address|bytes"):
        model.forward(**step() | changes)
    good = step()
    model.forward(**good)
    assert np.isfinite(good["out"]).all()


def test_a_read_only_output_is_refused() -> None:
    sizes, weights = case("Q4_0")
    cache = small.Cache(native.NativeModel(sizes, weights), 2)
    out = np.zeros((1, 77), dtype=np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        cache.model.forward(
            token_ids=np.array([5]),
            positions=np.array([0]),
            slot_mapping=np.array([4]),
            query_start=np.array([0, 1]),
            context_lens=np.array([1]),
            block_tables=np.array([[1]]),
            logit_index=np.array([0]),
            keys=[layer.ctypes.data for layer in cache.layers[:2]],
            values=[layer.ctypes.data for layer in cache.layers[2:]],
            kv_itemsize=4,
            num_blocks=2,
            block_size=small.BLOCK,
            out=out,
        )


def test_an_instruction_set_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENGINE_CPU_ISA", "sse9")
    sizes, weights = case("Q4_0")
    with pytest.raises(ConfigError, match="sse9"):
        native.NativeModel(sizes, weights)
