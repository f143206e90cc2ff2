"""`Sequence`: the scheduler's record of a request; `RowUpdate`: what a settled step says of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aengine.policy.block_pool import BlockTable
from aengine.request import FinishReason, RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from aengine.batch import TokenLogprobs
    from aengine.policy.prefix_cache import Node
    from aengine.request import Request


@dataclass(slots=True, eq=False)
class RowUpdate:
    """What one settled step means for one live sequence.

    `token_ids` are new tokens, the ending one included (it is empty when the sequence ended with an
    `error`). `stop_reason` is the member of `stop_token_ids` that ended it; the model's own end
    tokens leave it None. `first` marks the first token; the prompt's log-probabilities come with it
    (None for the first token of the prompt, which follows nothing).
    """

    seq_id: int
    request: Request
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    first: bool = False
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from `add` to its end. What a launch changes is in `RowTable`, by slot."""

    request: Request
    order: tuple[float, int]
    """Urgency: smaller goes first, and never changes (see `admission`)."""
    limit: int
    """Most tokens, prompt and output together."""
    most_output: int
    """Most generated tokens."""
    stops: frozenset[int]
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    held: bool = False
    output: list[int] = field(default_factory=list)
    """Generated tokens that the host knows."""
    slot: int = 0
    """While it runs: its row of `RowTable`. Slot 0 is padding, so 0 is no slot."""
    since: int = 0
    """The first step of its present stay in a slot; results of earlier steps are stale."""
    blocks: BlockTable = field(default_factory=BlockTable)
    node: Node | None = None
    """The cache node of the last of its blocks that the cache has."""
    num_nodes: int = 0
    """How many of its blocks the cache has, from the first on."""
    caching: bool = False
    """Whether more of its blocks may go into the cache."""
    generation: int = 0
    """The cache's generation when it took its slot."""
    parked: bool = False
    """It is to be preempted as soon as its launched steps have settled."""
    packed: bytes = b""
    """The prompt as native int32, for the cache's keys."""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    preemptions: int = 0
    forced: list[int] = field(default_factory=list)
    """Appended tokens that no launched step has computed yet."""
    unannounced: bool = False
    """It has a slot that no plan has named as its own yet."""
    host: BlockTable = field(default_factory=BlockTable)
    """Its blocks in host memory."""
    swapped: int = 0
    """Tokens whose keys and values are there, or will be when `copying` has ended."""
    copying: int = 0
    """The copy to or from the host that has not ended (`block_pool.NEVER`: none)."""

    @property
    def seq_id(self) -> int:
        return self.request.seq_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens that the host knows."""
        return len(self.request.prompt_token_ids) + len(self.output)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt

    def tokens(self, start: int, stop: int) -> Seq[int]:
        """The host-known tokens at positions `start .. stop-1`."""
        prompt = self.request.prompt_token_ids
        if stop <= len(prompt):
            return prompt[start:stop]
        tail = self.output[max(0, start - len(prompt)) : stop - len(prompt)]
        return [*prompt[start:], *tail]

    def key(self, start: int, stop: int) -> bytes:
        """The same as native int32."""
        if stop <= self.num_prompt:
            return self.packed[4 * start : 4 * stop]
        return pack(self.tokens(start, stop))

    def end_of(self, token: int) -> FinishReason | None:
        """Why the sequence ends with this token, the last of `output`; None: it goes on."""
        count = len(self.output)
        if token in self.stops and count >= self.request.params.min_tokens:
            return FinishReason.STOP
        if count >= self.most_output:
            return FinishReason.LENGTH
        return None


def pack(tokens: Seq[int]) -> bytes:
    """Token ids as native int32."""
    return array("i", tokens).tobytes()
