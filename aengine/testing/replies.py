"""`Replies`: whole answers for a scripted model, chosen by what the prompt says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aengine.testing.tokens import EOS

if TYPE_CHECKING:
    from aengine.request import Request

ReplySource = str | Mapping[str, str] | Callable[[str], str]
"""One answer for all; or prompt part -> answer, first match wins; or `answer(prompt)`."""


class Replies:
    """A script of bytes that gives each request an answer and then ends.

    The answer depends on the request's prompt alone (for chat messages: on the rendered
    conversation), never on the order in which requests come, so tests are deterministic.

    Args:
        source: one answer; a mapping, whose first key that occurs in the prompt decides; or a
            function of the prompt's text.
    """

    def __init__(self, source: ReplySource) -> None:
        self._source = source
        self._prompts: dict[int, Request] = {}
        self._answers: dict[int, bytes] = {}

    def admit(self, request: Request) -> None:
        """Note the prompt of a sequence that is about to run."""
        self._prompts[request.seq_id] = request

    def token(self, seq_id: int, length: int) -> int:
        """The token after the first `length` tokens (prompt and answer) of a sequence.

        Raises:
            LookupError: no key of the mapping occurs in the prompt.
        """
        prompt = self._prompts[seq_id].prompt_token_ids
        if seq_id not in self._answers:
            text = bytes(t for t in prompt if t < EOS).decode(errors="replace")
            self._answers[seq_id] = self._answer(text).encode()
        answer, position = self._answers[seq_id], length - len(prompt)
        return answer[position] if position < len(answer) else EOS

    def _answer(self, prompt: str) -> str:
        if isinstance(self._source, str):
            return self._source
        if callable(self._source):
            return self._source(prompt)
        for part, answer in self._source.items():
            if part in prompt:
                return answer
        raise LookupError(
            f"no scripted reply for the prompt {prompt!r}: it contains none of "
            f"{', '.join(map(repr, self._source))}"
        )
