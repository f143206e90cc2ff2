"""The public surface: sorted, complete, importable without torch."""

from __future__ import annotations

import subprocess
import sys

import aengine


def test_all_is_sorted_and_resolves() -> None:
    assert list(aengine.__all__) == sorted(aengine.__all__)
    missing = [name for name in aengine.__all__ if not hasattr(aengine, name)]
    assert missing == []


def test_importing_the_package_imports_no_torch_and_starts_nothing() -> None:
    code = (
        "import sys, threading, signal\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "import aengine\n"
        "aengine.SamplingParams, aengine.Engine, aengine.BlockingEngine\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert threading.active_count() == 1\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "print('ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(aengine, "Motor")
