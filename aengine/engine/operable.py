"""`Operable`: the calls of `Engine` for whoever operates it: pause, sleep, other weights."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from aengine.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aengine.engine.lifecycle import Lifecycle, PauseMode
    from aengine.engine.service import EngineService


class Operable:
    """Operates the service of an engine. Each call may come from any loop."""

    _service: EngineService

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Launch no more steps; returns when the device has nothing of this engine left to do.

        New requests are taken and wait for `resume`. Cancelling the pause before it is reached
        undoes it. Idempotent.

        Args:
            mode: "abort" ends all requests with `finish_reason="abort"`; "wait" lets them finish
                first (those that come meanwhile wait); "keep" keeps them as they are, KV and all,
                and `resume` goes on with them.

        Raises:
            EngineStateError: `resume` was called before the pause was reached.
            ConfigError: no such mode.
            EngineClosedError, EngineDeadError: the engine is not running, or ends meanwhile.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ConfigError(f"mode={shown(mode)} must be 'abort', 'wait' or 'keep'")
        await self._perform(lambda life: life.pause(mode))

    async def resume(self) -> None:
        """Launch steps again. Idempotent.

        Raises:
            EngineStateError: the engine is asleep (use `wake`), or its weights are being exchanged.
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        await self._perform(lambda life: life.resume())

    async def sleep(self) -> None:
        """Abort all requests and give the KV cache's memory back; the weights stay. Idempotent.

        Until `wake`, `generate` raises `EngineStateError`. Cached prefixes are forgotten.

        Raises:
            ConfigError: a model whose steps are captured graphs cannot do without its KV cache.
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        await self._perform(lambda life: life.sleep())

    async def wake(self) -> None:
        """Make the KV cache again and serve; undoes `pause` too. Idempotent.

        Raises:
            OutOfMemoryError: there is no memory for it now; the engine stays asleep.
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        await self._perform(lambda life: life.wake())

    async def update_weights(self, model: str | os.PathLike[str]) -> None:
        """Exchange the weights for others of the same network.

        Requests that run finish with the old weights first; those that come meanwhile wait and are
        computed with the new ones. The new weights are loaded beside the old (memory for both is
        needed) and checked as a whole before anything changes: after an error the engine goes on
        with the old ones. Cached prefixes are forgotten.

        Args:
            model: as for `Engine`.

        Raises:
            ModelLoadError: the files cannot be used, or hold another network.
            ConfigError: a model whose steps are captured graphs keeps its weights.
            EngineStateError: the engine is asleep, or paused with requests kept.
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
            raise ConfigError(f"model={shown(model)} must be a path, a hub id or an alias")
        path = str(os.fspath(model))
        await self._perform(lambda life: life.update_weights(path))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; requests that run go on.

        Raises:
            EngineClosedError, EngineDeadError: the engine is not running.
        """
        service = self._service
        await asyncio.wrap_future(service.call(service.reset_prefix_cache))

    async def _perform(self, operation: Callable[[Lifecycle], Coroutine[Any, Any, None]]) -> None:
        await asyncio.wrap_future(self._service.perform(operation))
