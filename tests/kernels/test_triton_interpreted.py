"""The Triton tests without a GPU: in a process where Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["attention", "small", "sampling"])
def test_interpreted(part: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / f"test_triton_{part}.py")],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
