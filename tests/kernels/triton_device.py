"""Where the Triton tests run: on the GPU, or under Triton's interpreter if asked before import.

`TRITON_INTERPRET=1` must be set before Triton is imported, which other tests of a process may have
done: `test_triton_interpreted` therefore starts a process of its own for it.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

needs_device = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a GPU, or TRITON_INTERPRET=1 (see test_triton_interpreted)",
    )
]
if not INTERPRETED:
    needs_device.append(pytest.mark.gpu)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN if anything is NaN."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def poison() -> None:
    """Leave NaN in freed memory, so that an output which is not written shows."""
    for size in (1 << 8, 1 << 12, 1 << 16):
        spots = [torch.full((size,), float("nan"), device=DEVICE) for _ in range(8)]
        del spots
