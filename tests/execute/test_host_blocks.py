"""KV blocks on the host: what goes there comes back, wherever its place is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aengine.batch import BlockCopy
from aengine.errors import ConfigError, OutOfMemoryError
from aengine.execute import host_blocks
from aengine.execute.host_blocks import HostBlocks, count_host_blocks, slabs
from aengine.execute.kv_cache import KVCacheSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.kernels.attention import KVLayer


def spec_of(dtype: torch.dtype, block_size: int = 4) -> KVCacheSpec:
    return KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=block_size, dtype=dtype)


def filled(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> list[KVLayer]:
    """A cache whose values are all different."""
    cache = spec.allocate(num_blocks, device)
    for number, tensor in enumerate(t for layer in cache for t in (layer.k, layer.v)):
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        tensor.copy_(values)
    return cache


def copy(device: Sequence[int], host: Sequence[int], *, to_host: bool) -> BlockCopy:
    return BlockCopy(
        copy_id=1, to_host=to_host, device_blocks=tuple(device), host_blocks=tuple(host)
    )


def check_round_trip(
    spec: KVCacheSpec, blocks: HostBlocks, cache: list[KVLayer], device: list[int], host: list[int]
) -> None:
    """Blocks go out, are overwritten, and come back to other places; nothing else changes."""
    before = [t.clone() for layer in cache for t in (layer.k, layer.v)]
    num_blocks = len(before[0]) - 1
    blocks.copy_blocks(copy(device, host, to_host=True))
    if cache[0].k.is_cuda:
        torch.cuda.synchronize()
    others = [b for b in range(1, num_blocks + 1) if b not in device]
    targets = (others + device)[: len(device)]
    for layer in cache:
        layer.k[device] = -1.0
        layer.v[device] = -2.0
    blocks.copy_blocks(copy(targets, host, to_host=False))
    if cache[0].k.is_cuda:
        torch.cuda.synchronize()
    after = [t for layer in cache for t in (layer.k, layer.v)]
    untouched = [b for b in range(num_blocks + 1) if b not in device and b not in targets]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[targets], old[device])
        assert torch.equal(new[untouched], old[untouched])


@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    staged=st.booleans(),
    piece=st.integers(1, 4),
)
def test_what_goes_out_comes_back(
    data: st.DataObject, dtype: torch.dtype, staged: bool, piece: int
) -> None:
    """`staged`: in the way of a GPU, a few blocks at a time."""
    num_blocks, num_host = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 50))
    count = data.draw(st.integers(1, min(num_blocks, num_host)))
    device = data.draw(st.permutations(range(1, num_blocks + 1)))[:count]
    host = data.draw(st.permutations(range(1, num_host + 1)))[:count]
    spec, cpu = spec_of(dtype), torch.device("cpu")
    cache = filled(spec, num_blocks, cpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_blocks, "STAGING_BYTES", piece * spec.bytes_per_block)
        blocks = HostBlocks(spec, cache, num_blocks=num_host, device=cpu, staged=staged)
    check_round_trip(spec, blocks, cache, device, host)


@given(num_blocks=st.integers(1, 10_000), bytes_per_block=st.integers(1, 1 << 24))
def test_slabs_hold_all_blocks_and_waste_little(num_blocks: int, bytes_per_block: int) -> None:
    full, sizes = slabs(num_blocks, bytes_per_block)
    assert sum(sizes) == num_blocks
    assert all(size == full for size in sizes[:-1])
    assert 0 < sizes[-1] <= full
    taken = full * bytes_per_block
    rounded = 1 << (taken - 1).bit_length()
    assert rounded - taken < rounded / 16 + 1


def test_swap_space_must_hold_a_block_and_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(torch.float32)
    monkeypatch.setattr(host_blocks, "available_memory", lambda: 100 * spec.bytes_per_block)
    assert count_host_blocks(spec, 0) == 0
    assert count_host_blocks(spec, 3 * spec.bytes_per_block + 1) == 3
    with pytest.raises(ConfigError, match=f"takes {spec.bytes_per_block} bytes"):
        count_host_blocks(spec, spec.bytes_per_block - 1)
    with pytest.raises(OutOfMemoryError, match="host memory") as caught:
        count_host_blocks(spec, 101 * spec.bytes_per_block)
    name, value = caught.value.hint.split("=")
    assert name == "swap_space"
    assert count_host_blocks(spec, int(value)) == 50


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_what_leaves_a_gpu_comes_back(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, gpu = spec_of(dtype), torch.device("cuda", 0)
    monkeypatch.setattr(host_blocks, "STAGING_BYTES", piece * spec.bytes_per_block)
    cache = filled(spec, 12, gpu)
    blocks = HostBlocks(spec, cache, num_blocks=40, device=gpu)
    assert all(slab.is_pinned() for slab in blocks._slabs)
    check_round_trip(spec, blocks, cache, [7, 2, 3, 11, 5], [15, 16, 17, 3, 40])
    check_round_trip(spec, blocks, cache, [1, 12], [40, 1])


@pytest.mark.gpu
def test_a_copy_waits_for_nothing() -> None:
    """The host goes on at once: torch would raise at anything that waits for the device."""
    spec, gpu = spec_of(torch.bfloat16), torch.device("cuda", 0)
    cache = filled(spec, 12, gpu)
    blocks = HostBlocks(spec, cache, num_blocks=40, device=gpu)
    blocks.copy_blocks(copy([1, 2], [3, 4], to_host=True))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        blocks.copy_blocks(copy([1, 2, 9], [3, 4, 6], to_host=True))
        blocks.copy_blocks(copy([5, 6, 7], [3, 4, 6], to_host=False))
    finally:
        torch.cuda.set_sync_debug_mode("default")
