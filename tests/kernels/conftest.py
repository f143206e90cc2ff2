"""Without Triton (a CPU build of torch brings none) its kernels' tests cannot even be imported."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_triton_*.py"]
