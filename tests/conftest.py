"""Fixtures of the whole suite: the loops it runs on, the real model, and markers that skip."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest
import uvloop

if TYPE_CHECKING:
    from pathlib import Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure() -> None:
    # A shell starts what runs in its background with Ctrl-C ignored, and the programs that the
    # tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_slow = None if config.getoption("--slow") else pytest.mark.skip(reason="needs --slow")
    no_gpu = None if _has_gpu(items) else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if no_slow and "slow" in item.keywords:
            item.add_marker(no_slow)
        if no_gpu and "gpu" in item.keywords:
            item.add_marker(no_gpu)


def _has_gpu(items: list[pytest.Item]) -> bool:
    if not any("gpu" in item.keywords for item in items):
        return False
    import torch

    return torch.cuda.is_available()


def pytest_asyncio_loop_factories() -> dict[str, object]:
    """Every async test runs on both loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real small model; fetched once into the user's cache, as a user's first run does."""
    from aengine.errors import ModelLoadError
    from aengine.model.hub import resolve

    try:
        return resolve("smollm2-135m")
    except ModelLoadError as error:
        pytest.skip(f"the model cannot be had here: {error}")
