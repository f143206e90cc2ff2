"""The Triton attention kernels against loops in float64 and, at larger sizes, their twin."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aengine.kernels import attention as twin
from aengine.kernels.attention import KVLayer
from aengine.kernels.triton_attention import paged_attention
from aengine.kernels.triton_decode import (
    DecodeTile,
    DecodeWorkspace,
    decode_attention,
    decode_tile,
)
from aengine.kernels.triton_prefill import PrefillTile, prefill_attention

from .paged import PagedCase, make_case, naive_attention
from .triton_device import DEVICE, INTERPRETED, needs_device, poison, relative_error

pytestmark = needs_device

SCALE = 0.3
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def on_device(case: PagedCase) -> PagedCase:
    moved = {
        name: getattr(case, name).to(DEVICE)
        for name in ("q_TND", "block_tables", "query_start", "context_lens")
    }
    return dataclasses.replace(case, kv=KVLayer(*(t.to(DEVICE) for t in case.kv)), **moved)


def workspace_for(case: PagedCase) -> DecodeWorkspace:
    _, heads, dim = case.q_TND.shape
    return DecodeWorkspace.allocate(
        max_rows=max(1, case.num_decode),
        num_heads=heads,
        num_kv_heads=case.kv.k.shape[2],
        head_dim=dim,
        device=DEVICE,
    )


def run(case: PagedCase, **options: object) -> torch.Tensor:
    moved = on_device(case)
    workspace = workspace_for(case)
    poison()
    got = paged_attention(
        moved.q_TND,
        moved.kv,
        moved.block_tables,
        moved.query_start,
        moved.context_lens,
        SCALE,
        workspace=workspace,
        **case.arguments(),
        **options,
    )
    assert not workspace.arrived.any(), "the counters are left as they were found"
    return got


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(4, 4, 16, 16), (6, 2, 20, 16), (7, 1, 80, 48)],
)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (8, None), (21, 3.0)])
def test_matches_float64_loops(heads, kv_heads, dim, block_size, window, cap):
    case = make_case(
        [1, 1, 20, 3, 1],
        [31, 5, 52, 3, 40],
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        seed=dim,
    )
    want = naive_attention(case, SCALE, sliding_window=window, soft_cap=cap)
    got = run(case, sliding_window=window, soft_cap=cap)
    assert relative_error(got, want) < BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bf16 matrices")
    case = make_case([1, 1, 17, 6], [33, 130, 17, 70], heads=8, kv_heads=2, dim=64, dtype=dtype)
    got = run(case)
    assert got.dtype == dtype
    assert relative_error(got, naive_attention(case, SCALE)) < BOUND[dtype]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("splits", [1, 8])
def test_decode_splits(splits, window):
    """Rows of one part, of some and of all parts, beside padding rows of context 0."""
    lens = [1, 17, 63, 257]
    case = make_case([1] * len(lens), lens, heads=4, kv_heads=2, dim=32, seed=splits)
    want = naive_attention(case, SCALE, sliding_window=window)
    moved = on_device(case)
    padding = 2
    tables = torch.nn.functional.pad(moved.block_tables, (0, 0, 0, padding))
    contexts = torch.nn.functional.pad(moved.context_lens, (0, padding))
    queries = torch.nn.functional.pad(moved.q_TND, (0, 0, 0, 0, 0, padding), value=1.0)
    rows = len(lens) + padding
    workspace = DecodeWorkspace(
        partial=torch.full((rows * splits * 4 * 32,), float("nan"), device=DEVICE),
        statistics=torch.full((2, rows * splits * 4), float("nan"), device=DEVICE),
        arrived=torch.zeros(rows * 2, dtype=torch.int32, device=DEVICE),
    )
    out = torch.full((rows, 4, 32), float("nan"), device=DEVICE)
    for _ in range(2):  # the second launch finds the counters as the first left them
        got = decode_attention(
            queries,
            moved.kv,
            tables,
            contexts,
            SCALE,
            workspace,
            sliding_window=window,
            max_context_len=100_000,
            out=out,
            tile=DecodeTile(keys=16, splits=splits, warps=4, stages=2, shortest=32),
        )
        assert got is out
        assert relative_error(got[: len(lens)], want) < BOUND[torch.float32]
        assert not got[len(lens) :].any()
        out.fill_(float("nan"))


def test_a_workspace_that_is_too_small_is_refused():
    case = on_device(make_case([1, 1], [300, 300]))
    with pytest.raises(ValueError, match="workspace"):
        decode_attention(
            case.q_TND,
            case.kv,
            case.block_tables,
            case.context_lens,
            SCALE,
            DecodeWorkspace.allocate(
                max_rows=1, num_heads=1, num_kv_heads=1, head_dim=16, device=DEVICE
            ),
            max_context_len=300,
        )


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 40])
def test_a_workspace_holds_any_smaller_batch_of_any_context(kv_heads):
    heads, dim, most = 4 * kv_heads, 64, 200
    workspace = DecodeWorkspace.allocate(
        max_rows=most, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, device=DEVICE
    )
    for context in (1, 255, 4096, 8192, 16_384, 16_385, 131_072, 10_000_000):
        for rows in range(1, most + 1):
            tile = decode_tile(rows, kv_heads, dim, context, 2)
            assert workspace.holds(rows, tile.splits, heads, kv_heads, dim), (rows, context)


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("lengths", [[1], [37, 1, 20], [3] * 9, [32, 11, 21]])
def test_prefill_finds_its_rows(lengths, boxes):
    """More rows than tiles, rows that end on a tile's edge, prefixes of any length."""
    contexts = [length + 13 * i for i, length in enumerate(lengths)]
    case = make_case(lengths, contexts, heads=6, kv_heads=2, dim=16, seed=len(lengths))
    moved = on_device(case)
    got = prefill_attention(
        moved.q_TND,
        moved.kv,
        moved.block_tables,
        moved.query_start,
        moved.context_lens,
        SCALE,
        num_tokens=sum(lengths),
        out=torch.full_like(moved.q_TND, float("nan")),
        tile=PrefillTile(queries=32, keys=16, warps=4, stages=2, boxes=boxes),
    )
    assert relative_error(got, naive_attention(case, SCALE)) < BOUND[torch.float32]


def test_queries_that_are_slices_of_a_projection():
    case = make_case([1, 9], [20, 30], heads=4, kv_heads=2, dim=16)
    want = naive_attention(case, SCALE)
    merged = torch.full((case.q_TND.shape[0], 8, 16), float("nan"))
    merged[:, :4] = case.q_TND
    case = dataclasses.replace(case, q_TND=merged[:, :4])
    moved = on_device(dataclasses.replace(case, q_TND=merged))
    got = paged_attention(
        moved.q_TND[:, :4],
        moved.kv,
        moved.block_tables,
        moved.query_start,
        moved.context_lens,
        SCALE,
        workspace=workspace_for(case),
        **case.arguments(),
    )
    assert relative_error(got, want) < BOUND[torch.float32]


def random_paged(
    lengths: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int
) -> PagedCase:
    """A large bf16 case on the device, too large for loops."""
    page = 16
    needed = [-(-context // page) for context in contexts]
    order = torch.randperm(sum(needed)).to(torch.int32)
    tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[at : at + count]
        at += count
    shape = (sum(needed), page, kv_heads, dim)
    cast = {"dtype": torch.bfloat16, "device": DEVICE}
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PagedCase(
        q_TND=torch.randn(sum(lengths), heads, dim, **cast),
        kv=KVLayer(torch.randn(shape, **cast), torch.randn(shape, **cast)),
        block_tables=tables.to(DEVICE),
        query_start=starts.to(DEVICE),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        num_decode=sum(1 for length in lengths if length == 1),
    )


@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (300, 20.0)])
def test_large_steps_against_the_twin_in_float64(dim, window, cap):
    lengths = [1, 1, 1, 1, 700, 33, 2]
    contexts = [5, 1152, 3000, 127, 700, 1100, 2000]
    case = random_paged(lengths, contexts, 16, 4, dim)
    scale = dim**-0.5
    options = {"sliding_window": window, "soft_cap": cap}
    tables = case.block_tables, case.query_start, case.context_lens
    poison()
    got = paged_attention(
        case.q_TND, case.kv, *tables, scale,
        workspace=workspace_for(case), **case.arguments(), **options,
    )  # fmt: skip
    wide = KVLayer(case.kv.k.double(), case.kv.v.double())
    want = twin.paged_attention(
        case.q_TND.double(), wide, *tables, scale, **case.arguments(), **options
    )
    assert relative_error(got, want) < BOUND[torch.bfloat16]
    each = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert float(each.max()) < 2 * BOUND[torch.bfloat16], "no token is off alone"


@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_captured_decode_fits_any_context():
    case = random_paged([1] * 6, [2000] * 6, 8, 2, 128)
    workspace = workspace_for(case)
    contexts = torch.ones_like(case.context_lens)
    arguments = (case.q_TND, case.kv, case.block_tables, contexts, 0.1, workspace)
    decode_attention(*arguments, max_context_len=2000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*arguments, max_context_len=2000)
    for lens in ([2000] * 6, [1, 0, 130, 1999, 128, 700]):
        contexts.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        want = twin.paged_attention(
            case.q_TND.double(),
            KVLayer(case.kv.k.double(), case.kv.v.double()),
            case.block_tables,
            case.query_start,
            contexts,
            0.1,
            num_decode=6,
            max_query_len=1,
            max_context_len=2000,
        )
        real = contexts > 0
        assert relative_error(out[real], want[real]) < BOUND[torch.bfloat16]
