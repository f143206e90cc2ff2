"""From what a caller gives as a prompt to token ids, with every bad prompt named.

`encode_prompt` runs in the engine's text thread: a long prompt must not hold up a loop.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aengine.errors import ContextLengthError, InvalidRequestError, shown
from aengine.request import SamplingParams

if TYPE_CHECKING:
    from aengine.engine.messages import Prompt


class TextCodec(Protocol):
    """What the engine needs of a tokenizer and its chat template."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def fewest_tokens(self, text: str) -> int: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str: ...


def check_prompt(prompt: Prompt) -> None:
    """Reject at once what can be rejected without a tokenizer.

    Raises:
        InvalidRequestError: the prompt is empty, of a wrong type, or not valid Unicode.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt", value=prompt)
        _check_unicode(prompt)
        return
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            "a prompt is a string, a list of token ids or a list of chat messages, "
            f"not {type(prompt).__name__}: {shown(prompt)}",
            param="prompt",
            value=prompt,
        )
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty", param="prompt", value=prompt)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt is not valid Unicode: a lone surrogate at position {error.start}",
            param="prompt",
            value=text[max(0, error.start - 10) : error.start + 10],
        ) from None


def check_options(
    params: Any, priority: Any, deadline: Any, request_id: Any, cache_salt: Any
) -> None:
    """Reject options of `generate` that make no sense.

    Raises:
        InvalidRequestError: `.param` names the one.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"params must be SamplingParams, not {shown(params)}",
            param="params",
            value=params,
        )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise _bad_option("priority", priority, "an integer")
    if not -(2**31) <= priority < 2**31:
        raise _bad_option("priority", priority, f"an integer from {-(2**31)} to {2**31 - 1}")
    if deadline is not None and (
        isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0
    ):
        raise _bad_option("deadline", deadline, "a number of seconds from now, above 0")
    for name, value in (("request_id", request_id), ("cache_salt", cache_salt)):
        if value is not None and (not isinstance(value, str) or not value):
            raise _bad_option(name, value, "a non-empty string")


def _bad_option(name: str, value: Any, wanted: str) -> InvalidRequestError:
    message = f"{name}={shown(value)} must be {wanted}"
    return InvalidRequestError(message, param=name, value=value)


def encode_prompt(prompt: Prompt, codec: TextCodec, *, max_model_len: int) -> tuple[int, ...]:
    """Token ids of a checked prompt.

    Args:
        prompt: text (taken as it is), token ids, or chat messages (the model's template applies).
        codec: the model's tokenizer.
        max_model_len: prompt and output together may not be longer, in tokens.

    Raises:
        InvalidRequestError: bad messages or token ids, no chat template, or an empty result.
        ContextLengthError: the prompt leaves no room for one token of output.
    """
    if isinstance(prompt, str):
        _check_length(codec.fewest_tokens(prompt), max_model_len, "at least ")
        ids = codec.encode(prompt)
    elif isinstance(prompt[0], Mapping):
        _check_messages(prompt)
        text = codec.render_chat(prompt)  # type: ignore[arg-type]
        _check_unicode(text)
        _check_length(codec.fewest_tokens(text), max_model_len, "at least ")
        ids = codec.encode(text, add_special_tokens=False)
    else:
        ids = _token_ids(prompt, codec.vocab_size)
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", param="prompt", value=prompt)
    _check_length(len(ids), max_model_len)
    return tuple(ids)


def _check_length(tokens: int, max_model_len: int, known: str = "") -> None:
    if tokens >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {known}{tokens} tokens; with at least one token of output it must "
            f"fit in max_model_len={max_model_len}",
            prompt_tokens=tokens,
            max_model_len=max_model_len,
        )


def _check_messages(prompt: Sequence[Any]) -> None:
    for message in prompt:
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"a prompt of chat messages holds {shown(message)}, not a mapping with role and "
                "content",
                param="prompt",
                value=message,
            )
        if not isinstance(role := message.get("role"), str):
            raise InvalidRequestError(
                f"the role of a chat message must be a string, not {shown(role)}",
                param="prompt",
                value=message,
            )


def check_token_rules(params: SamplingParams, vocab_size: int) -> None:
    """Reject rules about tokens that the model does not have.

    Raises:
        InvalidRequestError: `.param` names the rule.
    """
    rules = {"allowed_token_ids": params.allowed_token_ids, "logit_bias": params.logit_bias}
    for name, ids in rules.items():
        for token in ids or ():
            if token >= vocab_size:
                raise InvalidRequestError(
                    f"{name} holds {token}, which is not in the vocabulary (0 to {vocab_size - 1})",
                    param=name,
                    value=token,
                )


def _token_ids(prompt: Sequence[Any], vocab_size: int) -> list[int]:
    ids: list[int] = []
    for value in prompt:
        try:
            token = operator.index(value)
        except TypeError:
            raise InvalidRequestError(
                f"a prompt of token ids holds {shown(value)}, not an integer of 0 to "
                f"{vocab_size - 1}",
                param="prompt",
                value=value,
            ) from None
        if isinstance(value, bool) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"token id {shown(value)} is not in the vocabulary (0 to {vocab_size - 1})",
                param="prompt",
                value=value,
            )
        ids.append(token)
    return ids
