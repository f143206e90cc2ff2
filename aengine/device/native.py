"""Whether the C extension is there. Without it everything works, with slower wake-ups."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def load_native() -> ModuleType | None:
    """`aengine_ext._completions`, or None; the reason for None is logged, once a process."""
    try:
        return importlib.import_module("aengine_ext._completions")
    except ImportError as error:
        # As text: a log record that keeps the exception would keep every frame it came through.
        logger.info("completions use the pure-Python reactor: %s", str(error))
        return None
