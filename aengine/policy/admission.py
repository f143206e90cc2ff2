"""The waiting queue: who goes next, how many may wait, and what can never run.

A request's place is fixed when it arrives: `priority * ageing + time of arrival`, smaller first. A
level of priority is worth `ageing` seconds of waiting, so every request overtakes all that arrive
late enough, whatever their priority: nobody waits for ever, and the order never needs sorting
again. A lower priority number is more urgent.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

from aengine.errors import ContextLengthError, EngineOverloadedError, InvalidRequestError
from aengine.policy.sequence import Sequence, pack
from aengine.request import RequestState

if TYPE_CHECKING:
    from aengine.config import SchedulerConfig
    from aengine.request import Request

_MAX_TOKEN = 2**31 - 1
_PRIORITIES = range(-(2**31), 2**31)


class WaitingQueue:
    """Sequences without a slot, most urgent first.

    Args:
        config: bounds and ageing.
        num_blocks: blocks in the pool.
        max_model_len: longest prompt plus output, tokens.
    """

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, max_model_len: int) -> None:
        self._config = config
        self._capacity = num_blocks * config.tokens_per_block
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._count = 0
        self._tokens = 0
        self._tickets = 0
        self._admissions: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        """Tokens that the waiting sequences know."""
        return self._tokens

    def accept(self, request: Request, now: float) -> Sequence:
        """Check a new request against the limits and make its record, outside the queue still.

        Raises:
            ContextLengthError: the prompt leaves no room for output in the model's context.
            InvalidRequestError: the prompt can never fit the KV pool, or is no prompt; the priority
                is none.
            EngineOverloadedError: the queue's bound is reached.
        """
        prompt = request.prompt_token_ids
        self._check_prompt(request)
        self._check_priority(request)
        self._check_bounds(len(prompt), now)
        self._tickets += 1
        params = request.params
        ends = frozenset() if params.ignore_eos else request.end_token_ids
        # The last token of all needs no keys and values: nothing follows it.
        limit = min(len(prompt) + request.max_tokens, self._max_model_len, self._capacity + 1)
        return Sequence(
            request=request,
            order=(request.priority * self._config.priority_ageing + now, self._tickets),
            limit=limit,
            most_output=limit - len(prompt),
            stops=ends | frozenset(params.stop_token_ids),
            packed=pack(prompt) if self._config.enable_prefix_cache else b"",
            prompt_logprobs=[None] if params.prompt_logprobs is not None else [],
        )

    def _check_prompt(self, request: Request) -> None:
        tokens = len(request.prompt_token_ids)
        label = request.request_id
        if not tokens:
            raise InvalidRequestError("the prompt is empty", param="prompt", request_id=label)
        if tokens >= self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {tokens} tokens and the context {self._max_model_len}: "
                f"at most {self._max_model_len - 1} leave room for output",
                prompt_tokens=tokens,
                max_model_len=self._max_model_len,
                request_id=label,
            )
        if tokens > self._capacity:
            size = self._config.tokens_per_block
            raise InvalidRequestError(
                f"the prompt has {tokens} tokens and needs {-(-tokens // size)} KV blocks of "
                f"{size}, but the whole pool has {self._num_blocks} ({self._capacity} tokens): "
                "it can never run; give the KV cache more memory or shorten the prompt",
                param="prompt",
                value=tokens,
                request_id=label,
            )
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) > _MAX_TOKEN:
            raise InvalidRequestError(
                f"token ids must be from 0 to {_MAX_TOKEN}", param="prompt", request_id=label
            )

    def _check_priority(self, request: Request) -> None:
        """One that has no place in the order (NaN) or no key (too large) would harm everybody."""
        priority = request.priority
        if not isinstance(priority, int) or priority not in _PRIORITIES:
            raise InvalidRequestError(
                f"priority must be an integer from {_PRIORITIES[0]} to {_PRIORITIES[-1]}",
                param="priority",
                value=priority,
                request_id=request.request_id,
            )

    def _check_bounds(self, tokens: int, now: float) -> None:
        requests_bound = self._config.max_num_queued_requests
        tokens_bound = self._config.max_num_queued_tokens
        if requests_bound is not None and self._count >= requests_bound:
            raise EngineOverloadedError(
                f"{self._count} requests wait and at most {requests_bound} may",
                retry_after=self.retry_after(now),
            )
        # A prompt beyond the bound may wait alone, or it could never run.
        if tokens_bound is not None and self._count and self._tokens + tokens > tokens_bound:
            raise EngineOverloadedError(
                f"{self._tokens} prompt tokens wait; {tokens} more would pass {tokens_bound}",
                retry_after=self.retry_after(now),
            )

    def retry_after(self, now: float) -> float:
        """Seconds until an eighth of the queue will have been admitted, at the recent rate."""
        if len(self._admissions) < 2:
            return 1.0
        each = max(0.0, now - self._admissions[0]) / len(self._admissions)
        return min(60.0, max(0.05, each * math.ceil(self._count / 8)))

    def push(self, sequence: Sequence) -> None:
        """Begin to wait."""
        self._count += 1
        self._tokens += sequence.num_known
        if not sequence.held:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def lengthened(self, count: int) -> None:
        """A waiting sequence knows `count` more tokens."""
        self._tokens += count

    def unhold(self, sequence: Sequence) -> None:
        """A waiting sequence may be admitted again. (A held one is dropped when it is met.)"""
        # It may be in the heap still: two entries do no harm, the second finds it admitted.
        heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The most urgent sequence that may be admitted."""
        while self._heap:
            sequence = self._heap[0][1]
            waits = sequence.state in (RequestState.WAITING, RequestState.PREEMPTED)
            if waits and not sequence.held:
                return sequence
            heapq.heappop(self._heap)
        return None

    def admit(self, sequence: Sequence, now: float) -> None:
        """The sequence that `peek` returned has taken a slot."""
        heapq.heappop(self._heap)
        self._forget(sequence)
        self._admissions.append(now)

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence has ended; its entry goes when it is met, or when many are stale."""
        self._forget(sequence)
        if len(self._heap) > 2 * self._count + 64:
            live = {RequestState.WAITING, RequestState.PREEMPTED}
            self._heap = [entry for entry in self._heap if entry[1].state in live]
            heapq.heapify(self._heap)

    def _forget(self, sequence: Sequence) -> None:
        self._count -= 1
        self._tokens -= sequence.num_known
