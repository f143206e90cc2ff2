"""Sizing of the KV cache: a refusal shows the numbers, and what it proposes works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import KVCacheConfig
from aengine.errors import OutOfMemoryError
from aengine.execute.kv_cache import KVCacheSpec, fit_context, size_cache
from aengine.execute.memory_profile import MemoryProfile

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)


def profile(free: int, *, activations: int = 2 << 20, graphs: int = 1 << 20) -> MemoryProfile:
    return MemoryProfile(weights=7 << 20, activations=activations, graphs=graphs, free=free)


def size(
    config: KVCacheConfig,
    there: MemoryProfile,
    longest: int,
    rows: int = 4,
    spec: KVCacheSpec = SPEC,
) -> int:
    return size_cache(spec, config, there, max_num_seqs=rows, max_model_len=longest)


def attempt(
    config: KVCacheConfig, there: MemoryProfile, longest: int, spec: KVCacheSpec
) -> int | OutOfMemoryError:
    try:
        return size(config, there, longest, spec=spec)
    except OutOfMemoryError as error:
        return error


@given(
    free=st.integers(0, 1 << 26),
    longest=st.integers(2, 4096),
    fraction=st.none() | st.floats(0.01, 1),
    memory=st.none() | st.integers(1, 1 << 27),
    block_size=st.sampled_from([1, 3, 16]),
    activations=st.integers(0, 1 << 25),
    graphs=st.integers(0, 1 << 23),
)
def test_what_a_refusal_proposes_works(
    free: int,
    longest: int,
    fraction: float | None,
    memory: int | None,
    block_size: int,
    activations: int,
    graphs: int,
) -> None:
    spec = replace(SPEC, block_size=block_size)
    there = profile(free, activations=activations, graphs=graphs)
    config = KVCacheConfig(fraction=fraction) if memory is None else KVCacheConfig(memory=memory)
    found = attempt(config, there, longest, spec)
    left = max(0, free - activations - graphs)
    if isinstance(found, int):
        assert found * spec.bytes_per_block <= left
        assert found * spec.block_size >= longest
        return
    parts = {"weights", "activations", "graphs", "kv_cache", "free", "one_sequence"}
    assert set(found.breakdown) == parts
    assert found.breakdown["free"] == free
    assert found.breakdown["activations"] == activations
    assert found.breakdown["graphs"] == graphs
    message = str(found)
    together = "or less with" in message
    shorter = re.search(r"max_model_len=(\d+) or less", message)
    more = re.search(r"kv_cache_memory=(\d+)", message)
    bigger = config if more is None else KVCacheConfig(memory=int(more[1]))
    if shorter:
        assert size(bigger if together else config, there, int(shorter[1]), spec=spec) > 0
    if more and not together:
        assert size(bigger, there, longest, spec=spec) > 0
    if left >= spec.bytes_per_block * -(-longest // spec.block_size):
        assert more


def test_more_than_is_left_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory") as caught:
        size(KVCacheConfig(memory=1 << 30), profile(1 << 24), 1024, rows=64)
    left = (1 << 24) - (3 << 20)
    assert caught.value.hint == f"kv_cache_memory={left // 49152 * 49152}"


def test_the_numbers_are_in_the_message() -> None:
    told = "16 MiB are free .* weights' 7 MiB; .* activations take 2 MiB, captured graphs 1 MiB"
    with pytest.raises(OutOfMemoryError, match=told) as caught:
        size(KVCacheConfig(fraction=0.1), profile(1 << 24), 4096)
    assert caught.value.breakdown["one_sequence"] == 256 * SPEC.bytes_per_block


def test_nothing_that_would_work_is_said_to_be_so() -> None:
    with pytest.raises(OutOfMemoryError, match="no context") as caught:
        size(KVCacheConfig(), profile(1000), 64)
    assert "max_model_len=2" not in str(caught.value)
    assert "max_num_batched_tokens" in str(caught.value)


def test_the_default_share_is_that_of_the_device() -> None:
    there = replace(profile(100 << 20), default_fraction=0.9)
    blocks = size(KVCacheConfig(), there, 4096, rows=64)
    assert blocks == int((97 << 20) * 0.9) // SPEC.bytes_per_block
    quarter = size(KVCacheConfig(fraction=0.25), there, 16, rows=64)
    assert quarter == min(int((97 << 20) * 0.25) // SPEC.bytes_per_block, 64)


@given(free=st.integers(1 << 23, 1 << 28), longest=st.integers(2, 10_000))
def test_the_context_that_fits_is_served(free: int, longest: int) -> None:
    there = profile(free)
    context = fit_context(SPEC, KVCacheConfig(), there, longest=longest)
    assert size(KVCacheConfig(), there, context, rows=1) * SPEC.block_size >= context
