"""What this machine can run: the facts behind `aengine doctor`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys


def examine() -> dict[str, str]:
    """Findings by name, each a short sentence."""
    from aengine import __version__
    from aengine.kernels import native

    found = {
        "aengine": __version__,
        "python": f"{platform.python_version()} on {platform.machine()} {platform.system()}",
        "cores": str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
        "event loop": "uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        "completion queue": _module("aengine_ext._completions", "pure Python takes its place"),
        "CPU kernels": native.describe(),
    }
    return found | _torch()


def _module(name: str, otherwise: str) -> str:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return f"not built ({error}): {otherwise}"
    return "built"


def _torch() -> dict[str, str]:
    import torch

    from aengine.device import green

    lanes = str(green.probe())
    if not torch.cuda.is_available():
        reason = "built without CUDA" if torch.version.cuda is None else "no device or driver found"
        return {"torch": torch.__version__, "cuda": f"not available: {reason}", "lanes": lanes}
    devices = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    )
    if (queues := os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) != "32":
        # Read once by the driver, so it is for whoever starts the process to set.
        lanes += f"; CUDA_DEVICE_MAX_CONNECTIONS is {queues}: with 32 no two lanes share a queue"
    return {"torch": torch.__version__, "cuda": f"{torch.version.cuda}: {devices}", "lanes": lanes}
