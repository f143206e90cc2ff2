"""Delivery: one wake-up per (step, loop), whatever the number of streams.

The step loop posts chunks while it settles a step and flushes once. A reader that does not read
costs the engine nothing: its chunks merge in its own channel.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from aengine.engine.channel import Channel
    from aengine.engine.metrics import Metrics
    from aengine.engine.spans import Spans
    from aengine.errors import AEngineError
    from aengine.outputs import Chunk

    Parcel = tuple[Channel, Chunk | AEngineError]

logger = logging.getLogger("aengine")


class Outbox:
    """Chunks on their way to their callers' loops. Used by the engine's thread only.

    `metrics`, if any, sees each last chunk that leaves, and the counts at every flush; `spans`
    each last chunk and each error.
    """

    def __init__(
        self,
        engine_loop: asyncio.AbstractEventLoop,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._engine_loop = engine_loop
        self._metrics = metrics
        self._spans = spans
        self._parcels: dict[asyncio.AbstractEventLoop, list[Parcel]] = {}

    def post(self, channel: Channel, item: Chunk | AEngineError) -> None:
        """Queue one chunk, or the error that ends the request."""
        if isinstance(item, Exception) or item.finish_reason:
            self._note_end(channel, item)
        self._parcels.setdefault(channel.loop, []).append((channel, item))

    def _note_end(self, channel: Channel, item: Chunk | AEngineError) -> None:
        if self._metrics is not None and not isinstance(item, Exception):
            self._count(partial(self._metrics.ended, item))
        if self._spans is not None:
            self._spans.saw(channel, item)

    def _count(self, count: Callable[[], None]) -> None:
        try:
            count()
        except Exception:  # the host's registry; telemetry ends no engine
            self._metrics = None
            logger.exception("metrics failed and are not kept any more")

    def flush(self) -> list[Channel]:
        """Send everything. Returns the channels whose loop is closed: nobody will read them."""
        if self._metrics is not None:
            self._count(self._metrics.look)
        lost: list[Channel] = []
        parcels, self._parcels = self._parcels, {}
        for loop, items in parcels.items():
            if loop is self._engine_loop:
                _deliver(items)
                continue
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the caller's loop was closed under its requests
                lost.extend(channel for channel, _ in items)
        return lost


def _deliver(items: Sequence[Parcel]) -> None:
    for channel, item in items:
        if isinstance(item, Exception):
            channel.fail(item)
        else:
            channel.deliver(item)
