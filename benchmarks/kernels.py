"""Times of the Triton kernels in Llama-3.1-8B's shapes, beside torch's own and the device's limits.

    python benchmarks/kernels.py                  every group, the tiles that the engine uses
    python benchmarks/kernels.py --tiles decode   one group, with all its candidate tiles
    python benchmarks/kernels.py --compile 3/8    only fill Triton's cache with each 8th variant

Each variant is captured in a CUDA graph that walks over several layers' worth of data, so that
neither launch gaps nor the cache flatter it; the figure is the median over replays. Limits: bytes
over the measured copy bandwidth, or operations over the measured matrix rate.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aengine.kernels import activation as activation_twin
from aengine.kernels import norm as norm_twin
from aengine.kernels import sampling as sampling_twin
from aengine.kernels.attention import KVLayer
from aengine.kernels.rope import rope_table
from aengine.kernels.triton_activation import gated_activation
from aengine.kernels.triton_decode import DecodeTile, DecodeWorkspace, decode_attention
from aengine.kernels.triton_norm import add_rms_norm
from aengine.kernels.triton_prefill import PrefillTile, prefill_attention
from aengine.kernels.triton_rope import rope_write_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, VOCABULARY = 4096, 32, 8, 128, 14336, 128256
LAYERS = 4
COPY_BYTES_PER_S = 4.24e12
MATRIX_FLOP_PER_S = 790e12

DECODE_TILES = [
    DecodeTile(keys=keys, splits=splits, warps=4, stages=3, shortest=shortest)
    for keys in (64, 128)
    for splits, shortest in [(1, 128), (4, 64), (8, 128), (16, 64), (4, 2048)]
]
PREFILL_TILES = [
    PrefillTile(queries=queries, keys=keys, warps=warps, stages=stages, boxes=True)
    for queries, keys, warps, stages in [
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 32, 4, 4),
        (64, 64, 4, 2),
        (64, 128, 4, 2),
        (128, 128, 8, 2),
    ]
]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table: `launch(i)` works on the i-th layer's data."""

    group: str
    name: str
    launch: Callable[[int], object]
    bytes: float = 0.0
    flop: float = 0.0

    @property
    def limit(self) -> float:
        return max(self.bytes / COPY_BYTES_PER_S, self.flop / MATRIX_FLOP_PER_S)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def paged_layers(rows: int, context: int, page: int = 16) -> tuple[list[KVLayer], torch.Tensor]:
    """Caches of some layers and a table of scattered blocks."""
    blocks = -(-context // page)
    shape = (rows * blocks, page, KV_HEADS, DIM)
    tables = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
    return [KVLayer(random(*shape), random(*shape)) for _ in range(LAYERS)], tables


def decode(rows: int, context: int, all_tiles: bool) -> Iterator[Variant]:
    layers, tables = paged_layers(rows, context)
    q = random(rows, HEADS, DIM)
    lens = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    most = 64
    workspace = DecodeWorkspace(
        partial=torch.empty(rows * most * HEADS * DIM, device="cuda"),
        statistics=torch.empty(2, rows * most * HEADS, device="cuda"),
        arrived=torch.zeros(rows * KV_HEADS, dtype=torch.int32, device="cuda"),
    )
    group = f"decode {rows}x{context}"
    read = 2.0 * rows * context * KV_HEADS * DIM * 2

    def run(tile: DecodeTile | None) -> Callable[[int], object]:
        return lambda i: decode_attention(
            q, layers[i], tables, lens, DIM**-0.5, workspace, max_context_len=8192, tile=tile
        )

    yield Variant(group=group, name="triton", launch=run(None), bytes=read)
    for tile in DECODE_TILES if all_tiles else ():
        yield Variant(group=group, name=repr(tile), launch=run(tile), bytes=read)
    flat = [
        [cache.view(rows, -1, KV_HEADS, DIM)[:, :context].transpose(1, 2) for cache in layer]
        for layer in layers
    ]
    packed = q.view(rows, KV_HEADS, HEADS // KV_HEADS, DIM)
    yield Variant(
        group=group,
        name="torch SDPA, contiguous, heads packed",
        launch=lambda i: F.scaled_dot_product_attention(packed, *flat[i]),
        bytes=read,
    )


def prefill(
    rows: int, length: int, prefix: int, all_tiles: bool, page: int = 16
) -> Iterator[Variant]:
    layers, tables = paged_layers(rows, prefix + length, page)
    tokens = rows * length
    q = random(tokens, HEADS, DIM)
    out = torch.empty_like(q)
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    lens = torch.full((rows,), prefix + length, dtype=torch.int32, device="cuda")
    group = f"prefill {rows}x{length}+{prefix} /{page}"
    pairs = rows * (prefix * length + length * (length + 1) / 2)
    flop = 4.0 * pairs * HEADS * DIM

    def run(tile: PrefillTile | None) -> Callable[[int], object]:
        return lambda i: prefill_attention(
            q, layers[i], tables, starts, lens, DIM**-0.5, num_tokens=tokens, out=out, tile=tile
        )

    yield Variant(group=group, name="triton", launch=run(None), flop=flop)
    for tile in PREFILL_TILES if all_tiles else ():
        yield Variant(group=group, name=repr(tile), launch=run(tile), flop=flop)
    if prefix or page > 16:
        return
    flat = [
        [
            cache.view(rows, -1, KV_HEADS, DIM)[:, :length]
            .transpose(1, 2)
            .repeat_interleave(HEADS // KV_HEADS, dim=1)
            for cache in layer
        ]
        for layer in layers[:1]
    ]
    heads_first = q.view(rows, length, HEADS, DIM).transpose(1, 2)
    yield Variant(
        group=group,
        name="torch SDPA, contiguous, causal",
        launch=lambda i: F.scaled_dot_product_attention(heads_first, *flat[0], is_causal=True),
        flop=flop,
    )


def small(tokens: int) -> Iterator[Variant]:
    group = f"{tokens} tokens"
    x, residual, weight = random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN)
    moved = 4.0 * tokens * HIDDEN * 2
    for name, call in (("triton", add_rms_norm), ("torch", norm_twin.add_rms_norm)):
        yield Variant(
            group=group,
            name=f"add_rms_norm {name}",
            launch=lambda _, call=call: call(x, residual, weight, 1e-5),
            bytes=moved,
        )
    gate_up = random(tokens, 2 * INTERMEDIATE)
    for name, call in (
        ("triton", gated_activation),
        ("torch", activation_twin.gated_activation),
    ):
        yield Variant(
            group=group,
            name=f"silu(gate)*up {name}",
            launch=lambda _, call=call: call(gate_up, "silu"),
            bytes=3.0 * tokens * INTERMEDIATE * 2,
        )
    merged = random(tokens, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = merged.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    table = rope_table(torch.logspace(0, -5, DIM // 2), 8192).cuda()
    positions = torch.arange(tokens, device="cuda") % 8192
    shape = (-(-tokens // 16), 16, KV_HEADS, DIM)
    kv = KVLayer(random(*shape), random(*shape))
    slots = torch.randperm(tokens, device="cuda")
    yield Variant(
        group=group,
        name="rope + KV write triton",
        launch=lambda _: rope_write_kv(q, k, v, table, positions, kv, slots),
        bytes=2.0 * tokens * (HEADS + 2 * KV_HEADS) * DIM * 2,
    )


def sampling(rows: int) -> Iterator[Variant]:
    from aengine.kernels import triton_sampling

    logits = random(rows, VOCABULARY, dtype=torch.float32) * 2.5
    index = torch.arange(rows, device="cuda")
    wide = {"dtype": torch.float64, "device": "cuda"}
    for label, top_k, top_p in (("plain", 0, 1.0), ("top-p", 0, 0.95), ("top-k, top-p", 50, 0.9)):
        params = sampling_twin.DrawParams(
            uniform=torch.rand(rows, **wide),
            temperature=torch.full((rows,), 0.8, **wide),
            top_k=torch.full((rows,), top_k, device="cuda"),
            top_p=torch.full((rows,), top_p, **wide),
            min_p=torch.zeros(rows, **wide),
            truncated=label != "plain",
            largest_top_k=top_k or None,
        )
        for name, kernels in (("triton", triton_sampling), ("torch", sampling_twin)):
            yield Variant(
                group=f"sampling {rows}",
                name=f"peaks + draw, {label}, {name}",
                launch=lambda _, kernels=kernels, params=params: kernels.draw(
                    logits, index, kernels.peaks(logits), params
                ),
                bytes=1.0 * logits.numel() * 4,
            )
    for name, kernels in (("triton", triton_sampling), ("torch", sampling_twin)):
        yield Variant(
            group=f"sampling {rows}",
            name=f"argmax {name}",
            launch=lambda _, kernels=kernels: kernels.argmax(logits),
            bytes=1.0 * logits.numel() * 4,
        )


GROUPS: dict[str, list[Callable[[bool], Iterator[Variant]]]] = {
    "decode": [
        lambda tiles: decode(1, 256, tiles),
        lambda tiles: decode(1, 1152, tiles),
        lambda tiles: decode(1, 8192, tiles),
        lambda tiles: decode(32, 1152, tiles),
        lambda tiles: decode(256, 1152, tiles),
    ],
    "prefill": [
        lambda tiles: prefill(16, 4096, 0, tiles),
        lambda _: prefill(16, 4096, 0, False, page=64),
        lambda tiles: prefill(16, 4096, 0, tiles, page=128),
        lambda _: prefill(8, 512, 8192, False),
    ],
    "small": [
        lambda _: small(1),
        lambda _: small(32),
        lambda _: small(256),
        lambda _: small(16384),
    ],
    "sampling": [lambda _: sampling(1), lambda _: sampling(32), lambda _: sampling(256)],
}


def median_time(variant: Variant) -> float:
    """Seconds of one launch."""
    for i in range(LAYERS):
        variant.launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAYERS):
            variant.launch(i)
    graph.replay()
    times = []
    spent = 0.0
    while len(times) < 5 or (spent < 0.05 and len(times) < 50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / LAYERS)
        spent += times[-1] * LAYERS
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS))
    parser.add_argument("--tiles", nargs="*", default=[], help="groups to try all tiles of")
    parser.add_argument("--compile", default=None, metavar="I/N")
    options = parser.parse_args()
    torch.manual_seed(0)
    share, of = (int(part) for part in (options.compile or "0/1").split("/"))
    seen = 0
    for group in options.groups:
        for make in GROUPS[group]:
            for variant in make(group in options.tiles):
                seen += 1
                if options.compile and seen % of != share:
                    continue
                try:
                    if options.compile:
                        variant.launch(0)
                        continue
                    took = median_time(variant)
                except Exception as error:  # a tile that does not fit: say so and go on
                    print(f"{variant.group:24} {variant.name:60} {str(error).splitlines()[0][:60]}")
                    continue
                rate = variant.flop / took / 1e12
                print(
                    f"{variant.group:24} {variant.name:60} {took * 1e6:9.1f} µs"
                    f"  {variant.limit / took:5.0%} of the limit"
                    + (f"  {rate:5.0f} TFLOP/s" if rate else "")
                )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
