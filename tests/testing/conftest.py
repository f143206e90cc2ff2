"""`suite`: runs a small test suite under the plugin, whether or not it is installed."""

from __future__ import annotations

import gc
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401  # before pytester's runs: it forgets what they import, which C code hates

import aengine.testing  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> Iterator[Callable[..., pytest.RunResult]]:
    """`suite(source, *arguments, ini=...)`: the result of running it."""
    installed = any(found.name == "aengine" for found in entry_points(group="pytest11"))
    plugin = "aengine" if installed else "aengine.pytest_plugin"

    def run(
        source: str, *arguments: str, ini: str = "", subprocess: bool = False
    ) -> pytest.RunResult:
        if "no:asyncio" not in arguments:
            ini = f"asyncio_default_fixture_loop_scope = function\n{ini}"
        pytester.makeini(f"[pytest]\nfilterwarnings = error\n{ini}")
        pytester.makepyfile(source)
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start("-p", plugin, "-p", "no:cacheprovider", *arguments)

    gc.freeze()  # pytest collects garbage at its end, which torch's many objects would make slow
    yield run
    gc.unfreeze()
