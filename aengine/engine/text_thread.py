"""One thread for text work: tokenizing holds the GIL in long pieces, so it is off the loops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from aengine.threads import DaemonPool

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class TextThread:
    """An executor with a single worker, started at its first use."""

    def __init__(self, name: str) -> None:
        self._pool = DaemonPool(1, name)

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Await `function(*args, **kwargs)`. Cancelling abandons the wait, not the work."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
