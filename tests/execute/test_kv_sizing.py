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
from aengine.execute.kv_cache import KVCacheSpec, size_cache

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.float32)


def size(
    config: KVCacheConfig, free: int, longest: int, rows: int = 4, spec: KVCacheSpec = SPEC
) -> int:
    return size_cache(
        spec,
        config,
        free_bytes=free,
        weight_bytes=7 << 20,
        max_num_seqs=rows,
        max_model_len=longest,
    )


def attempt(
    config: KVCacheConfig, free: int, longest: int, spec: KVCacheSpec
) -> int | OutOfMemoryError:
    try:
        return size(config, free, longest, spec=spec)
    except OutOfMemoryError as error:
        return error


@given(
    free=st.integers(0, 1 << 26),
    longest=st.integers(2, 4096),
    fraction=st.none() | st.floats(0.01, 1),
    memory=st.none() | st.integers(1, 1 << 27),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_what_a_refusal_proposes_works(
    free: int, longest: int, fraction: float | None, memory: int | None, block_size: int
) -> None:
    spec = replace(SPEC, block_size=block_size)
    config = KVCacheConfig(fraction=fraction) if memory is None else KVCacheConfig(memory=memory)
    found = attempt(config, free, longest, spec)
    if isinstance(found, int):
        assert found * spec.bytes_per_block <= free
        assert found * spec.block_size >= longest
        return
    assert set(found.breakdown) == {"weights", "kv_cache", "free", "one_sequence"}
    assert found.breakdown["free"] == free
    message = str(found)
    together = "or less with" in message
    shorter = re.search(r"max_model_len=(\d+) or less", message)
    more = re.search(r"kv_cache_memory=(\d+)", message)
    bigger = config if more is None else KVCacheConfig(memory=int(more[1]))
    if shorter:
        assert size(bigger if together else config, free, int(shorter[1]), spec=spec) > 0
    if more and not together:
        assert size(bigger, free, longest, spec=spec) > 0
    if free >= spec.bytes_per_block * -(-longest // spec.block_size):
        assert more


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory") as caught:
        size(KVCacheConfig(memory=1 << 30), 1 << 24, 1024, rows=64)
    assert caught.value.hint == f"kv_cache_memory={(1 << 24) // 49152 * 49152}"


def test_the_numbers_are_in_the_message() -> None:
    with pytest.raises(OutOfMemoryError, match=r"16 MiB are free, weights take 7 MiB") as caught:
        size(KVCacheConfig(fraction=0.1), 1 << 24, 4096)
    assert caught.value.breakdown["one_sequence"] == 256 * SPEC.bytes_per_block


def test_nothing_that_would_work_is_said_to_be_so() -> None:
    with pytest.raises(OutOfMemoryError, match="no context") as caught:
        size(KVCacheConfig(), 1000, 64)
    assert "max_model_len=2" not in str(caught.value)
