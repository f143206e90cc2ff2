"""`ExitHook`: ends an engine that nobody closed before the interpreter goes.

A thread that is inside a kernel when the interpreter has gone takes the process down with it.
"""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING

from aengine.engine.ending import EXIT_GRACE
from aengine.engine.messages import Close

if TYPE_CHECKING:
    from aengine.engine.runtime import Runtime
    from aengine.engine.service import EngineService

logger = logging.getLogger("aengine")


class ExitHook:
    """The hook of one engine; holds its service and runtime, and not the engine."""

    def __init__(self, service: EngineService, runtime: Runtime) -> None:
        self._service = service
        self._runtime = runtime

    def arm(self) -> None:
        """Run at exit, before the hooks of whatever was made so far."""
        self.disarm()
        atexit.register(self)

    def disarm(self) -> None:
        """Do not run at exit."""
        atexit.unregister(self)

    def __call__(self) -> None:
        """End the engine in bounded time."""
        if self._service.forked:
            return
        logger.warning("an engine was still open at the end of the program")
        self._service.ask_close(Close(drain=False, timeout=0.0, grace=EXIT_GRACE))
        if not self._runtime.join(EXIT_GRACE + 0.3):
            self._service.abandon()
