"""`delayed_sample` and `grammar_mask`: coroutines that chain, for rows that wait for a mask.

The forward of a step is running on the device while its masks are filled in a worker thread; only
the sample of the constrained rows waits for them. Rows whose masks are late leave the batch, so
that the others go on, and come back when their masks are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy.typing as npt

    from aengine.batch import StepPlan
    from aengine.device.future import DeviceFuture
    from aengine.device.protocols import Stream
    from aengine.engine.parts import EngineParts
    from aengine.errors import GenerationError
    from aengine.execute.launcher import StepOutput
    from aengine.grammar.protocol import GrammarMatcher
    from aengine.policy.scheduler import RowUpdate
    from aengine.request import Request, SamplingParams, StructuredOutput

    Bitmask = npt.NDArray[np.int32]


SHORTEST_JUMP = 8
"""Forced tokens that are worth a step in which the row does not overlap. With 4, a batch of 64 rows
of nested JSON was a tenth slower on a CPU than with none; with 8 it was not (measured)."""


def may_jump(params: SamplingParams) -> bool:
    """Whether forced text may be appended in the tokenizer's own spelling.

    Not where each token is looked at: a forced token has no log-probability, behind a stop string
    there must be none, and rules about token ids may want another spelling, or none.
    """
    rules = params.allowed_token_ids, params.logit_bias, params.bad_words, params.logits_processors
    return params.logprobs is None and not params.stop and not any(rules)


class DelayedSampling:
    """The matchers of running sequences, and the samples that wait for their masks.

    Args:
        parts: the loaded engine.
        wake: makes the step loop come round.
        mask_patience: seconds that a step waits for its masks before it goes on without them.
    """

    def __init__(
        self, parts: EngineParts, wake: Callable[[], None], *, mask_patience: float
    ) -> None:
        self._parts = parts
        self._wake = wake
        self._patience = mask_patience
        self._matchers: dict[int, GrammarMatcher] = {}
        self._grammars: dict[int, StructuredOutput | None] = {}
        self._may_jump: set[int] = set()
        self._jumping: dict[int, int] = {}
        """Sequences held for a jump -> the step whose token comes before it."""
        self._ready: dict[int, Bitmask] = {}
        self._skipped: dict[int, int] = {}
        """Sequences whose mask was late -> the step that goes on without a sample of theirs."""
        self._late: set[asyncio.Task[None]] = set()
        self._faults: list[tuple[int, GenerationError]] = []

    def attach(self, request: Request, matcher: GrammarMatcher) -> None:
        """This sequence is constrained by `matcher` from its first token on."""
        self._matchers[request.seq_id] = matcher
        self._grammars[request.seq_id] = request.params.structured
        if may_jump(request.params):
            self._may_jump.add(request.seq_id)

    def detach(self, seq_id: int) -> None:
        """The sequence is over: nothing of its grammar stays alive."""
        self._matchers.pop(seq_id, None)
        self._grammars.pop(seq_id, None)
        self._ready.pop(seq_id, None)
        self._jumping.pop(seq_id, None)
        self._skipped.pop(seq_id, None)
        self._may_jump.discard(seq_id)

    def advance(self, updates: Sequence[RowUpdate], step_id: int) -> Sequence[RowUpdate]:
        """Move the matchers on by the tokens of a settled step, jump where nothing is left to
        choose, and report the rows that failed."""
        if not self._matchers and not self._jumping:
            return updates
        advanced = [self._advance(update) for update in updates]
        for seq_id in [each for each, step in self._skipped.items() if step == step_id]:
            del self._skipped[seq_id]
            self._resume(seq_id)
        if self._jumping:
            landing = {seq_id for seq_id, step in self._jumping.items() if step == step_id}
            advanced = [self._jump(u) if u.seq_id in landing else u for u in advanced]
            for seq_id in landing:
                del self._jumping[seq_id]
                self._parts.scheduler.unhold(seq_id)
        return advanced

    def _advance(self, update: RowUpdate) -> RowUpdate:
        matcher = self._matchers.get(update.seq_id)
        if matcher is None or update.error is not None:
            return update
        try:
            for token in update.token_ids:
                matcher.advance(token)
        except Exception as error:  # one row's matcher ends that row alone (law 9)
            self._discard(update.seq_id)
            return replace(update, error=error)
        return update

    def _jump(self, update: RowUpdate) -> RowUpdate:
        """Append the tokens that must follow, if the row goes on."""
        matcher = self._matchers.get(update.seq_id)
        if matcher is None or update.error is not None or update.finish_reason is not None:
            return update
        request = update.request
        try:
            forced = matcher.forced_tokens()
            ends = frozenset(request.params.stop_token_ids)
            ends |= frozenset() if request.params.ignore_eos else request.end_token_ids
            # What ends the answer is sampled, like any other end.
            tokens = tuple(itertools.takewhile(lambda token: token not in ends, forced))
            if not self._parts.scheduler.append_forced(update.seq_id, tokens):
                return update
            for token in tokens:
                matcher.advance(token)
        except Exception as error:
            self._discard(update.seq_id)
            return replace(update, error=error)
        return replace(update, token_ids=update.token_ids + tokens)

    def _fault(self, seq_id: int, error: GenerationError) -> None:
        self._discard(seq_id)
        self._faults.append((seq_id, error))

    def _discard(self, seq_id: int) -> None:
        """A matcher failed: its compiled grammar is kept for nobody else."""
        structured = self._grammars.get(seq_id)
        if structured is not None:
            self._parts.grammars.discard(structured)

    def take_faults(self) -> list[tuple[int, GenerationError]]:
        """The sequences whose masks failed since the last call, and why."""
        faults, self._faults = self._faults, []
        return faults

    async def sample(
        self,
        plan: StepPlan,
        begun: DeviceFuture[Any],
        stream: Stream,
    ) -> DeviceFuture[StepOutput]:
        """Sample the constrained rows of a begun step as soon as their masks are there.

        `stream` is the one that began it.
        """
        rows, masks = await self._grammar_masks(plan)
        launcher = self._parts.launcher_of(stream)
        replayed = launcher.replay_finish(begun, rows, masks)
        return replayed or stream.launch(launcher.finish, begun, rows, masks)

    async def _grammar_masks(self, plan: StepPlan) -> tuple[list[int], Bitmask]:
        """Masks of the constrained rows; rows that are late or over are left out."""
        masks: dict[int, Bitmask] = {}
        missing: dict[int, GrammarMatcher] = {}
        for row in plan.constrained:
            seq_id = plan.seq_ids[row]
            if (mask := self._ready.pop(seq_id, None)) is not None:
                masks[row] = mask
            elif (matcher := self._matchers.get(seq_id)) is not None:
                missing[row] = matcher
        if missing:
            masks |= await self._fill(plan, missing)
        self._look_for_jumps(plan, masks.keys())
        rows = sorted(masks)
        words = -(-self._parts.launcher.vocab_size // 32)
        stacked = [masks[row] for row in rows]
        return rows, np.stack(stacked) if stacked else np.zeros((0, words), dtype=np.int32)

    def _look_for_jumps(self, plan: StepPlan, rows: Collection[int]) -> None:
        """Hold the rows that have no choice for several tokens: after the token of this step the
        rest is appended, which takes one forward instead of one for each."""
        for row in rows:
            seq_id = plan.seq_ids[row]
            if seq_id not in self._may_jump:
                continue
            with contextlib.suppress(Exception):  # it will say so again when it is asked to go on
                if len(self._matchers[seq_id].forced_tokens()) >= SHORTEST_JUMP:
                    self._parts.scheduler.hold(seq_id)
                    self._jumping[seq_id] = plan.step_id

    async def _fill(
        self, plan: StepPlan, missing: Mapping[int, GrammarMatcher]
    ) -> dict[int, Bitmask]:
        """Fill masks in a worker thread while the forward runs; give up waiting after a while."""
        rows = list(missing)
        words = -(-self._parts.launcher.vocab_size // 32)
        bitmask = np.zeros((len(rows), words), dtype=np.int32)
        filling = self._parts.grammars.fill(list(missing.values()), bitmask)
        done, _ = await asyncio.wait([filling], timeout=self._patience)
        if not done:
            seq_ids = [plan.seq_ids[row] for row in rows]
            for seq_id in seq_ids:
                self._parts.scheduler.hold(seq_id)
                self._skipped[seq_id] = plan.step_id
            rejoining = self._rejoin(filling, seq_ids, bitmask)
            task = asyncio.get_running_loop().create_task(rejoining)
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            return {}
        failed = filling.result()
        for index, error in failed.items():
            self._fault(plan.seq_ids[rows[index]], error)
        return {row: bitmask[i] for i, row in enumerate(rows) if i not in failed}

    async def _rejoin(
        self,
        filling: asyncio.Future[Mapping[int, GenerationError]],
        seq_ids: Sequence[int],
        bitmask: Bitmask,
    ) -> None:
        """Late masks are here: their rows may take part again."""
        failed = await filling
        for index, seq_id in enumerate(seq_ids):
            if seq_id not in self._matchers:
                continue
            if index in failed:
                self._fault(seq_id, failed[index])
            else:
                self._ready[seq_id] = bitmask[index]
                self._resume(seq_id)
        self._wake()

    def _resume(self, seq_id: int) -> None:
        """Let a row come back, if its mask is there and the step without it has settled.

        Before that the scheduler counts on a token of that step: a forward would read a token that
        was never sampled, and what is sampled from it would be dropped but counted by penalties.
        """
        if seq_id in self._ready and seq_id not in self._skipped:
            self._parts.scheduler.unhold(seq_id)

    async def aclose(self) -> None:
        """Wait for the threads that still fill masks."""
        if self._late:
            await asyncio.wait(self._late)
