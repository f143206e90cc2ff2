"""What callers say to the engine's loop. Each message is small, immutable and fire-and-forget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from aengine.engine.channel import Channel
    from aengine.grammar.protocol import GrammarMatcher
    from aengine.request import Request, SamplingParams

    Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new request. Times are seconds; `arrival` and `deadline` are on the engine's clock."""

    channel: Channel
    prompt: Prompt
    params: SamplingParams
    priority: int
    arrival: float
    deadline: float | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A submitted request whose prompt is tokenized: n sequences for the scheduler."""

    channel: Channel
    requests: Sequence[Request]
    matchers: Sequence[GrammarMatcher] = ()
    """One a sequence for a request with structured output, else none."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop everything of this channel."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class AbortById:
    """Drop every request with this label."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function between two steps, on the engine's loop, and hand its result back."""

    function: Callable[[], Any]
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class Wake:
    """Come round: something outside the inbox has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """End the engine: finish what runs if `drain`, within `timeout` seconds, then stop.

    `grace`: seconds from then on for what the device has begun.
    """

    drain: bool
    timeout: float
    grace: float


Message = Submit | Prepared | Abort | AbortById | Call | Wake | Close
