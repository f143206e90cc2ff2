"""`generate_many`: a batch of prompts through one engine, a bounded number of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aengine.errors import AEngineError, EngineOverloadedError, InvalidRequestError, shown
from aengine.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aengine.engine.front import Engine
    from aengine.engine.messages import Prompt
    from aengine.outputs import RequestOutput

    Outcome = RequestOutput | AEngineError
    Advance = Callable[[int, int | None], None]
    """Called with (prompts done, prompts in all; None: nobody knows)."""


async def generate_many(
    engine: Engine,
    prompts: Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    concurrency: int | None,
    return_exceptions: bool,
    on_progress: Advance | None,
    progress: bool,
    options: dict[str, Any],
) -> list[Outcome]:
    """See `Engine.generate_many`."""
    limit = 2 * engine.config.scheduler.max_num_seqs if concurrency is None else concurrency
    total = len(prompts) if isinstance(prompts, Sequence) else None
    _check(prompts, params, limit, total)
    if on_progress is not None and not callable(on_progress):
        raise InvalidRequestError(
            f"on_progress={shown(on_progress)} must be callable",
            param="on_progress",
            value=on_progress,
        )
    with _advances(on_progress, progress, total) as advance:
        batch = _Batch(engine, _pairs(prompts, params), return_exceptions, options, advance, total)
        return await batch.run(limit if total is None else min(limit, total))


class _Batch:
    """Workers that take the next prompt when they are done with the one before."""

    def __init__(
        self,
        engine: Engine,
        work: Iterator[tuple[Prompt, SamplingParams | None]],
        return_exceptions: bool,
        options: dict[str, Any],
        advance: Advance,
        total: int | None,
    ) -> None:
        self._engine = engine
        self._work = enumerate(work)
        self._return_exceptions = return_exceptions
        self._options = options
        self._advance = advance
        self._total = total
        self._outcomes: dict[int, Outcome] = {}

    async def run(self, workers: int) -> list[Outcome]:
        tasks = [asyncio.create_task(self._worker()) for _ in range(workers)]
        try:
            # gather raises the first error as it is; the others are cancelled below.
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # whose streams abort, synchronously, when they hear of it
            if tasks:
                await asyncio.wait(tasks)
        return [self._outcomes[i] for i in range(len(self._outcomes))]

    async def _worker(self) -> None:
        for index, (prompt, params) in self._work:
            self._outcomes[index] = await self._one(prompt, params)
            self._advance(len(self._outcomes), self._total)

    async def _one(self, prompt: Prompt, params: SamplingParams | None) -> Outcome:
        while True:
            try:
                return await self._engine.generate(prompt, params, **self._options)
            except EngineOverloadedError as error:
                # Others fill the queue. A batch has time.
                await asyncio.sleep(error.retry_after)
            except AEngineError as error:
                if not self._return_exceptions:
                    raise
                return error


def _check(prompts: Any, params: Any, limit: Any, total: int | None) -> None:
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"generate_many takes a list (or another iterable) of prompts, not {shown(prompts)}",
            param="prompts",
            value=prompts,
        )
    if isinstance(prompts, (str, bytes)):
        raise InvalidRequestError(
            "generate_many takes prompts, not one text; use generate() for that",
            param="prompts",
            value=prompts[:80],
        )
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidRequestError(
            f"concurrency={shown(limit)} must be an integer of at least 1",
            param="concurrency",
            value=limit,
        )
    if params is None or isinstance(params, SamplingParams):
        return
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        raise InvalidRequestError(
            f"params must be SamplingParams, or a list with one for each prompt, not "
            f"{shown(params)}",
            param="params",
            value=params,
        )
    if total is None or len(params) != total:
        known = "an iterable of unknown length" if total is None else f"{total} prompts"
        raise InvalidRequestError(
            f"{len(params)} params for {known}: give one for all, or a list of prompts and a list "
            "of params that are equally long",
            param="params",
            value=len(params),
        )


def _pairs(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    each = iter(params) if isinstance(params, Sequence) else None
    for prompt in prompts:
        # A type checker sees a union here, not the two cases.
        yield prompt, params if each is None else next(each)  # type: ignore[misc]


@contextmanager
def _advances(on_progress: Advance | None, bar: bool, total: int | None) -> Iterator[Advance]:
    """What to call when a prompt is done."""
    if not bar:
        yield on_progress or _say_nothing
        return
    # Imported when a bar is asked for: a program without one does not pay for it.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as shown:
        task = shown.add_task("generate", total=total)

        def advance(done: int, total: int | None) -> None:
            shown.update(task, completed=done)
            if on_progress is not None:
                on_progress(done, total)

        yield advance


def _say_nothing(done: int, total: int | None) -> None:
    """Progress nobody asked for."""
