"""The plain-torch paged attention against loops in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from aengine.kernels import attention
from aengine.kernels.attention import KVLayer, paged_attention, write_kv

from .paged import make_case, naive_attention

SHAPES = {
    "decode": ([1, 1, 1], [1, 17, 40]),
    "prefill": ([7, 33], [7, 33]),
    "chunked": ([5, 16, 1], [37, 16, 9]),
    "mixed": ([1, 1, 20, 3], [31, 5, 52, 3]),
}


@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize(("window", "cap"), list(itertools.product([None, 8], [None, 5.0])))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_matches_float64_loops(rows, window, cap, heads, kv_heads):
    case = make_case(*SHAPES[rows], heads=heads, kv_heads=kv_heads, seed=len(rows))
    got = paged_attention(
        case.q_TND,
        case.kv,
        case.block_tables,
        case.query_start,
        case.context_lens,
        0.3,
        sliding_window=window,
        soft_cap=cap,
        **case.arguments(),
    )
    want = naive_attention(case, 0.3, sliding_window=window, soft_cap=cap)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    case = make_case(*SHAPES["mixed"], dtype=dtype, seed=3)
    args = (case.q_TND, case.kv, case.block_tables, case.query_start, case.context_lens, 0.25)
    got = paged_attention(*args, **case.arguments())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), naive_attention(case, 0.25), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 6])
def test_pieces_of_rows_and_groups_of_decode_rows(monkeypatch, window):
    """Long rows and large gathers are split: the same numbers as in one piece."""
    case = make_case([1, 1, 1, 23], [9, 30, 2, 41], seed=5)
    args = (case.q_TND, case.kv, case.block_tables, case.query_start, case.context_lens, 0.25)
    want = naive_attention(case, 0.25, sliding_window=window)
    monkeypatch.setattr(attention, "_QUERIES_AT_ONCE", 8)
    monkeypatch.setattr(attention, "_GATHER_ELEMENTS", 1)
    got = paged_attention(*args, sliding_window=window, **case.arguments())
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-5)


def test_padding_rows_disturb_no_other_row():
    """Rows of context 0, as a captured graph has them, beside a real one."""
    case = make_case([1], [20], seed=6)
    want = naive_attention(case, 0.25)
    got = paged_attention(
        case.q_TND.repeat(3, 1, 1),
        case.kv,
        torch.cat((case.block_tables, torch.zeros(2, case.block_tables.shape[1]).int())),
        torch.arange(4, dtype=torch.int32),
        torch.tensor([20, 0, 0], dtype=torch.int32),
        0.25,
        num_decode=3,
        max_query_len=1,
        max_context_len=64,
    )
    torch.testing.assert_close(got[:1].double(), want, atol=2e-6, rtol=2e-5)


def test_write_kv_touches_its_slots_alone():
    kv = KVLayer(torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 16))
    merged = torch.randn(3, 3, 2, 16)  # strides as in slices of one projection
    slots = torch.tensor([9, 31, 0])
    write_kv(merged[:, 1], merged[:, 2], kv, slots)
    for cache, new in ((kv.k, merged[:, 1]), (kv.v, merged[:, 2])):
        flat = cache.view(32, 2, 16)
        torch.testing.assert_close(flat[slots], new)
        flat[slots] = 0
        assert not flat.any()


def test_write_kv_converts_to_the_caches_dtype():
    kv = KVLayer(*(torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16) for _ in range(2)))
    new = torch.randn(1, 1, 8)
    write_kv(new, new, kv, torch.tensor([2]))
    torch.testing.assert_close(kv.k[0, 2], new[0].bfloat16())
