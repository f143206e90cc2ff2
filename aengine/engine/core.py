"""`EngineCore`: the requests of one engine, on the engine's loop.

It turns messages into scheduler calls and scheduler updates into chunks. Everything here is
synchronous and runs between two launches; what takes time (tokenizing, compiling a grammar) is a
task that comes back as a `Prepared` message.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from typing import TYPE_CHECKING

from aengine.engine.detokenize import Detokenizer
from aengine.engine.live import LiveSequence, empty_chunk
from aengine.engine.messages import Prepared
from aengine.engine.prompts import check_token_rules, encode_prompt
from aengine.errors import (
    AEngineError,
    EngineClosedError,
    GenerationError,
    RequestError,
)
from aengine.outputs import EngineStats
from aengine.request import FinishReason, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aengine.engine.channel import Channel
    from aengine.engine.delayed import DelayedSampling
    from aengine.engine.delivery import Outbox
    from aengine.engine.inbox import Inbox
    from aengine.engine.intake import Intake
    from aengine.engine.messages import Message, Prompt, Submit
    from aengine.engine.parts import EngineParts
    from aengine.grammar.protocol import GrammarMatcher
    from aengine.policy.scheduler import RowUpdate

logger = logging.getLogger("aengine")

MOST_IDS = 2048
"""Token ids of a prompt that are checked in the engine's loop; more go to the text thread."""


class EngineCore:
    """Live requests, and what happens to them.

    Args:
        parts: scheduler, tokenizer and the rest of a loaded engine.
        inbox: where prepared requests come back to.
        outbox: where chunks leave.
        delayed: follows the grammars of constrained sequences.
        intake: bounds what waits.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        parts: EngineParts,
        inbox: Inbox[Message],
        outbox: Outbox,
        delayed: DelayedSampling,
        intake: Intake,
        clock: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._inbox = inbox
        self._outbox = outbox
        self._delayed = delayed
        self._intake = intake
        self._clock = clock
        self._ids = itertools.count(1)
        self._live: dict[int, LiveSequence] = {}
        self._by_channel: dict[Channel, set[int]] = {}
        self._preparing: dict[Channel, asyncio.Task[None]] = {}
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self.closing = False

    # -- requests in ---------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is live or on its way in."""
        return not self._live and not self._preparing

    def submit(self, message: Submit) -> None:
        """Begin with a request: tokenize beside the step loop."""
        if self.closing:
            self._fail(message.channel, EngineClosedError("the engine is closing"))
            return
        try:
            self._intake.check(
                preparing=len(self._preparing),
                waiting=self._scheduler.num_waiting,
                running=self._scheduler.num_running,
                now=self._clock(),
            )
        except AEngineError as error:
            self._fail(message.channel, error)
            return
        task = asyncio.get_running_loop().create_task(self._prepare(message))
        self._preparing[message.channel] = task

    async def _prepare(self, message: Submit) -> None:
        channel = message.channel
        try:
            check_token_rules(message.params, self._parts.launcher.vocab_size)
            ids = await self._encode(message.prompt)
            bad_words: tuple[tuple[int, ...], ...] = ()
            if message.params.bad_words:
                bad_words = await self._parts.text_thread.run(
                    self._parts.bad_word_ids, message.params
                )
            requests = self._expand(message, ids, bad_words)
            matchers: list[GrammarMatcher] = []
            if (structured := message.params.structured) is not None:
                first = await self._parts.grammars.matcher(structured)
                matchers = [first, *(first.fork() for _ in requests[1:])]
            prepared = Prepared(channel=channel, requests=requests, matchers=matchers)
            self._inbox.put(prepared)
        except AEngineError as error:
            self._drop_prepared(channel)
            self._fail(channel, error)
            self._outbox.flush()
        except Exception as error:
            logger.exception("preparing request %s failed", channel.request_id)
            self._drop_prepared(channel)
            failure = GenerationError(f"preparing the request failed: {error!r}")
            failure.__cause__ = error
            self._fail(channel, failure)
            self._outbox.flush()

    async def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        codec, longest = self._parts.codec, self._parts.max_model_len
        if not isinstance(prompt, str) and len(prompt) <= MOST_IDS and isinstance(prompt[0], int):
            # Checking so few is quicker than a thread's answer.
            return encode_prompt(prompt, codec, max_model_len=longest)
        run = self._parts.text_thread.run
        return await run(encode_prompt, prompt, codec, max_model_len=longest)

    def _drop_prepared(self, channel: Channel) -> None:
        self._preparing.pop(channel, None)

    def _expand(
        self,
        message: Submit,
        prompt_token_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...],
    ) -> list[Request]:
        params = message.params
        room = self._parts.max_model_len - len(prompt_token_ids)
        return [
            Request(
                seq_id=next(self._ids),
                request_id=message.channel.request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                end_token_ids=self._parts.end_token_ids,
                index=index,
                priority=message.priority,
                arrival=message.arrival,
                deadline=message.deadline,
                cache_salt=message.cache_salt,
                bad_word_token_ids=bad_words,
            )
            for index in range(params.n)
        ]

    def admit(self, message: Prepared) -> None:
        """Hand a prepared request to the scheduler, unless it was aborted meanwhile."""
        channel = message.channel
        if self._preparing.pop(channel, None) is None:
            return
        now = self._clock()
        self._intake.passed(now)
        for request in message.requests:
            try:
                self._scheduler.add(request, now)
            except RequestError as error:
                error.request_id = request.request_id
                self._end_channel(channel, FinishReason.ERROR)
                self._fail(channel, error)
                return
            except AEngineError as error:
                self._end_channel(channel, FinishReason.ERROR)
                self._fail(channel, error)
                return
            self._live[request.seq_id] = LiveSequence(
                request=request,
                channel=channel,
                detokenizer=Detokenizer(self._parts.tokenizer, request.params),
                arrival=request.arrival,
            )
            self._by_channel.setdefault(channel, set()).add(request.seq_id)
            if message.matchers:
                self._delayed.attach(request, message.matchers[request.index])
        self._prompt_tokens += len(message.requests[0].prompt_token_ids)

    # -- requests out --------------------------------------------------------------------------

    def abort(self, channel: Channel, reason: FinishReason = FinishReason.ABORT) -> None:
        """Drop a request in whatever phase it is; its reader gets what there is and the reason."""
        task = self._preparing.pop(channel, None)
        if task is not None:
            task.cancel()
            self._end_unprepared(channel, reason)
            return
        for seq_id in sorted(self._by_channel.get(channel, ())):
            self._finish_early(seq_id, reason)

    def _end_unprepared(self, channel: Channel, reason: FinishReason) -> None:
        for index in range(channel.n):
            self._finished[reason] += 1
            self._outbox.post(channel, empty_chunk(channel.request_id, index, reason))

    def abort_id(self, request_id: str) -> None:
        """Drop every request with this label."""
        for channel in self.channels():
            if channel.request_id == request_id:
                self.abort(channel)

    def channels(self) -> list[Channel]:
        """The channels of all requests that have not ended."""
        return [*self._preparing, *self._by_channel]

    def fail_all(self, make_error: Callable[[], AEngineError]) -> None:
        """End every request with an error, a new object each."""
        for channel in self.channels():
            self._end_channel(channel, FinishReason.ERROR)
            self._fail(channel, make_error())

    def _finish_early(self, seq_id: int, reason: FinishReason) -> None:
        self._scheduler.finish(seq_id, reason)
        live = self._forget(seq_id)
        if live is not None:
            text = live.detokenizer.finish()
            self._finished[reason] += 1
            chunk = live.last_chunk(text, (), reason=reason, stop_reason=None, now=self._clock())
            self._outbox.post(live.channel, chunk)

    def _end_channel(self, channel: Channel, reason: FinishReason) -> None:
        task = self._preparing.pop(channel, None)
        if task is not None:
            task.cancel()
        for seq_id in sorted(self._by_channel.get(channel, ())):
            self._scheduler.finish(seq_id, reason)
            self._forget(seq_id)
            self._finished[reason] += 1

    def _forget(self, seq_id: int) -> LiveSequence | None:
        live = self._live.pop(seq_id, None)
        if live is not None:
            if self._parts.trace is not None:
                live.trace(self._parts.trace, self._clock())
            self._delayed.detach(seq_id)
            ids = self._by_channel[live.channel]
            ids.discard(seq_id)
            if not ids:
                del self._by_channel[live.channel]
        return live

    def _fail(self, channel: Channel, error: AEngineError) -> None:
        if isinstance(error, RequestError) and error.request_id is None:
            error.request_id = channel.request_id
        self._outbox.post(channel, error)

    # -- steps ---------------------------------------------------------------------------------

    def launched(self, seq_ids: Iterable[int]) -> None:
        """Note that these sequences took a slot in the step being launched."""
        now = self._clock()
        for seq_id in seq_ids:
            live = self._live.get(seq_id)
            if live is None:
                continue
            if live.scheduled is None:
                live.scheduled = now
            else:
                live.preemptions += 1

    def expire(self) -> None:
        """End the sequences whose deadline passed, keeping what they have produced."""
        for seq_id in self._scheduler.expire(self._clock()):
            self._finish_early(seq_id, FinishReason.DEADLINE)

    def settle(self, updates: Iterable[RowUpdate]) -> None:
        """Turn the tokens of a settled step into chunks and send them, one wake-up per loop."""
        now = self._clock()
        for update in updates:
            live = self._live.get(update.seq_id)
            if live is None:
                continue
            try:
                self._advance(live, update, now)
            except Exception as error:
                # One sequence's fault (a broken tokenizer table, a processor) ends it alone.
                self._fail_sequence(live, error)
        self.flush()

    def _advance(self, live: LiveSequence, update: RowUpdate, now: float) -> None:
        if update.error is not None:
            raise update.error
        count = len(update.token_ids)
        if live.first_token is None:
            live.cached_tokens = update.cached_tokens
            self._cached_tokens += update.cached_tokens
        live.saw_tokens(count, now)
        self._generation_tokens += count
        delta = live.detokenizer.push(update.token_ids)
        reason = update.finish_reason
        stop_reason: str | int | None = update.stop_reason
        text = delta.text
        if delta.stop is not None:
            reason, stop_reason = FinishReason.STOP, delta.stop
            self._scheduler.finish(update.seq_id, FinishReason.STOP)
        elif reason is not None:
            text += live.detokenizer.finish()
        if reason is None:
            chunk = live.chunk(text, update.token_ids, update.logprobs, update.prompt_logprobs)
        else:
            self._forget(update.seq_id)
            self._finished[reason] += 1
            chunk = live.last_chunk(
                text,
                update.token_ids,
                reason=reason,
                stop_reason=stop_reason,
                now=now,
                logprobs=update.logprobs,
                prompt_logprobs=update.prompt_logprobs,
            )
        self._outbox.post(live.channel, chunk)

    def fail_sequence(self, seq_id: int, error: Exception) -> None:
        """End a sequence (and the rest of its request) with an error."""
        if (live := self._live.get(seq_id)) is not None:
            self._fail_sequence(live, error)

    def _fail_sequence(self, live: LiveSequence, error: Exception) -> None:
        if not isinstance(error, RequestError):
            logger.error("request %s failed", live.request.request_id, exc_info=error)
            failure = GenerationError(f"generation failed: {error!r}")
            failure.__cause__ = error
            error = failure
        self._end_channel(live.channel, FinishReason.ERROR)
        self._fail(live.channel, error)

    def flush(self) -> None:
        """Send what is posted; drop the requests whose loop is gone."""
        for channel in dict.fromkeys(self._outbox.flush()):
            self._end_channel(channel, FinishReason.ABORT)

    # -- ends ----------------------------------------------------------------------------------

    def end(self, make_error: Callable[[], AEngineError]) -> None:
        """The step loop is over: every stream raises at once."""
        self.closing = True
        self.fail_all(make_error)
        self.flush()

    def stats(self, *, steps: int, in_flight: int) -> EngineStats:
        """A snapshot."""
        blocks = self._scheduler.stats()
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting + len(self._preparing),
            steps=steps,
            steps_in_flight=in_flight,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=blocks.preemptions,
            finished=dict(self._finished),
            kv_blocks_total=blocks.total_blocks,
            kv_blocks_free=blocks.free_blocks,
            kv_blocks_cached=blocks.cached_blocks,
            kv_blocks_in_use=blocks.used_blocks,
            kv_blocks_leased=blocks.leased_blocks,
            swap_blocks_total=blocks.host_total_blocks,
            swap_blocks_in_use=blocks.swapped_blocks,
            swapped_out=blocks.swapped_out,
            swapped_in=blocks.swapped_in,
            copies_in_flight=blocks.copies_in_flight,
            device=self._parts.device.statistics(),
        )
