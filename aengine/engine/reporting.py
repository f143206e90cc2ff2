"""`Reporter`: the host's `on_progress`, which cannot break the loading of an engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aengine.engine.contexts import Carried
from aengine.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str, int, int], None]

logger = logging.getLogger("aengine")


class Reporter:
    """Calls a callback, from any thread.

    A callback that raises is logged and not called again: a model that takes minutes to load is
    not lost for a progress bar.

    Args:
        callback: called with (stage, done, total).
        closing: whether the engine was closed meanwhile.

    Raises:
        EngineClosedError: when called after that: ends the loading from inside.
    """

    def __init__(self, callback: Progress | None, closing: Callable[[], bool]) -> None:
        self._callback = callback
        self._closing = closing

    def carry_context(self) -> None:
        """Call the callback in the context of now."""
        if self._callback is not None:
            self._callback = Carried(self._callback)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._closing():
            raise EngineClosedError("the engine was closed while it was loading")
        if self._callback is None:
            return
        try:
            self._callback(stage, done, total)
        except Exception:
            self._callback = None
            logger.exception("on_progress failed and is not called any more")
