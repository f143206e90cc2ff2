"""A tokenizer of bytes: token i is byte i, one more token ends a text. For tests, no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

EOS = 256


class ByteTokenizer:
    """Implements `aengine.model.tokenizer.Tokenizer` on bytes, and a chat template of one line."""

    vocab_size = 257
    bos_token_id: int | None = None
    eos_token_ids = frozenset({EOS})
    special_ids = frozenset({EOS})

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(text.encode())

    def fewest_tokens(self, text: str) -> int:
        """Nothing is told from the length: tests want prompts to be encoded."""
        return 0

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the bytes; invalid ones become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or nothing for the end token."""
        return bytes([token_id]) if 0 <= token_id < EOS else b""

    def token_id(self, text: str) -> int | None:
        """The token of a one-byte text."""
        encoded = text.encode()
        return encoded[0] if len(encoded) == 1 else None

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """One line a message.

        Raises:
            InvalidRequestError: a message lacks a role or text.
        """
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):
                raise InvalidRequestError(
                    "a message has a role and a text content", param="prompt", value=message
                )
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "
