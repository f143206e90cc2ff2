"""Projections of few rows in Llama-3.1-8B's shapes: tiles of the Triton kernel beside cuBLAS.

    python benchmarks/linear.py [ROWS ...]

Each candidate runs in a CUDA graph that walks over enough copies of the weights that the cache does
not hold them. The kernels are compiled by several processes first.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aengine.kernels.triton_activation import gated_activation
from aengine.kernels.triton_linear import LinearTile, few_rows_linear

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28_672, 4096, True),
    "down": (4096, 14_336, False),
    "head": (128_256, 4096, False),
}
PROCESSES = 12


def tiles(rows: int) -> list[LinearTile]:
    plain = [
        LinearTile(outputs=j, inputs=k, warps=w, plain=True)
        for j, k, w in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (1, 2, 4, 8))
        if 256 <= j * k // w <= 4096
    ]
    products = [
        LinearTile(outputs=j, inputs=k, warps=w, stages=s)
        for j, k, w, s in itertools.product((16, 32, 64), (128, 256, 512), (2, 4, 8), (3, 4, 5))
        if j * k * s * 2 <= 180_000 and j * k // w >= 1024 and (j < 64 or w >= 4)
    ]
    return plain + [p for p in products if rows > 1 or p.inputs > 128]


def compile_part(part: int, rows: int) -> None:
    for tile in tiles(rows)[part::PROCESSES]:
        for outputs, inputs, gated in SHAPES.values():
            if outputs == 128_256:
                continue
            x = torch.zeros(rows, inputs, device="cuda", dtype=torch.bfloat16)
            weight = torch.zeros(outputs, inputs, device="cuda", dtype=torch.bfloat16)
            try:
                few_rows_linear(x, weight, "silu" if gated else None, tile=tile)
            except Exception as error:
                if "resource" not in str(error):
                    print(tile, error, flush=True)
    torch.cuda.synchronize()


def time_of(run: Callable[[int], object], copies: int) -> float:
    """Microseconds of one call."""
    for i in range(copies):
        run(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    best = []
    for _ in range(7):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best.append(start.elapsed_time(stop) * 1e3 / copies)
    return sorted(best)[3]


def measure(rows: int) -> None:
    for name, (outputs, inputs, gated) in SHAPES.items():
        size = outputs * inputs * 2
        copies = max(2, 600_000_000 // size)
        weights = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / 64
            for _ in range(copies)
        ]
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        activation = "silu" if gated else None

        def cublas(i: int, x=x, weights=weights, gated=gated) -> object:
            out = F.linear(x, weights[i])
            return gated_activation(out, "silu") if gated else out

        want = cublas(0)
        base = time_of(cublas, copies)
        found = []
        for tile in tiles(rows):
            try:
                got = few_rows_linear(x, weights[0], activation, tile=tile)
                error = float((got.float() - want.float()).norm() / want.float().norm())
                assert error < 1e-2, error

                def mine(i: int, x=x, weights=weights, tile=tile, activation=activation) -> object:
                    return few_rows_linear(x, weights[i], activation, tile=tile)

                found.append((time_of(mine, copies), tile))
            except Exception as failure:
                if "resource" not in str(failure):
                    print(name, tile, type(failure).__name__, failure)
        print(f"{rows} rows {name}: cuBLAS {base:.1f} us ({size / base / 1e6:.2f} TB/s)")
        for took, tile in sorted(found, key=lambda f: f[0])[:4]:
            print(
                f"    {took:7.1f} us {size / took / 1e6:.2f} TB/s  J {tile.outputs} "
                f"K {tile.inputs} w {tile.warps} s {tile.stages} {'plain' if tile.plain else ''}",
                flush=True,
            )
        del weights


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        compile_part(int(sys.argv[2]), int(sys.argv[3]))
        return
    for rows in [int(a) for a in sys.argv[1:]] or [1, 32]:
        parts = [
            subprocess.Popen([sys.executable, __file__, "--compile", str(part), str(rows)])
            for part in range(PROCESSES)
        ]
        for part in parts:
            part.wait()
        measure(rows)


if __name__ == "__main__":
    main()
