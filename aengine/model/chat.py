"""Chat templates: from messages to the text that a model was trained on.

Templates come from files that one downloads, so they run in jinja2's immutable sandbox. The
environment is that of Hugging Face's: trimmed blocks, `raise_exception`, `strftime_now`, `tojson`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aengine.errors import InvalidRequestError, ModelLoadError


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the jinja2 text; None where the model has no template.
        special_tokens: names such as `bos_token` that the template may use.

    Raises:
        ModelLoadError: the template is not valid jinja2.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special = dict(special_tokens or {})
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                raise ModelLoadError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, ready for the model to answer.

        Args:
            messages: mappings with `role` and `content` (text, or parts of `type` "text").

        Raises:
            InvalidRequestError: the model has no template, a message is malformed, or the template
                refuses the conversation.
        """
        checked = [_check(message) for message in messages]
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: give the prompt as text, in the form that the "
                "model was trained on",
                param="prompt",
                value=messages,
            )
        try:
            return self._template.render(
                messages=checked, add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InvalidRequestError(
                f"the chat template refuses the messages: {error}", param="prompt", value=messages
            ) from error


def _check(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            "a chat message is a mapping with a role (text)", param="prompt", value=message
        )
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        parts = [_text_part(part) for part in content]
        content = "".join(parts)
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        raise InvalidRequestError(
            f"the content of a chat message is text, not {type(content).__name__}",
            param="prompt",
            value=message,
        )
    return {**message, "content": content}


def _text_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part["text"], str):
        return str(part["text"])
    raise InvalidRequestError(
        "a part of a chat message has type 'text' and a text", param="prompt", value=part
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 reads it as a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
