"""`Tokenizer`: text to token ids and back, on the `tokenizers` library.

Encoding goes through `encode_batch_fast` only, which lets go of the GIL (`encode` holds it: 1.3 MB
of text froze a loop for 1.6 s), and a long text goes in pieces, so that turning the results into
Python lists never takes long at a stretch. Decoding is a table of bytes: the library's decoder
holds the GIL and cannot stream.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE

from aengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_PIECE = 16_384
"""Characters of a piece of a long text."""
_PIECES_A_CALL = 32

# Between these two characters every byte-level pre-tokenizer that we know has a border: all begin a
# new word at a space before a letter, at a letter after a line break, and at punctuation after a
# letter (the last for scripts that have no spaces).
_BORDER = re.compile(r"[A-Za-z](?= [A-Za-z])|\n(?=[^\W\d_])|[一-鿿ぁ-ゖァ-ヺ가-힣](?=[、。，])")


class Tokenizer(Protocol):
    """What the engine and the grammar room need of a tokenizer. Implementations are immutable."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids: 0 to this, exclusive. The model's embedding may have more rows."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The begin-of-text token, if there is one."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, as far as the tokenizer's files tell."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: left out of decoded text unless asked for."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: any string; it may be megabytes long (call from a thread then).
            add_special_tokens: put the begin (and end) tokens around it that the model wants.
            parse_special: control tokens spelled out in the text become those tokens; False
                encodes their spelling as ordinary text.

        Raises:
            InvalidRequestError: the text holds a lone surrogate.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that this text has at least, told from its length.

        A text that is much too long for a model is refused by it without being encoded: one word
        of five million letters holds the GIL for longer than an event loop may be late.
        """
        ...

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id outside the vocabulary."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled exactly so in the vocabulary."""
        ...


class FastTokenizer:
    """A `Tokenizer` over one of the `tokenizers` library.

    Args:
        library: the library's tokenizer, its special tokens marked as such. Not changed later.
        token_bytes: what each token stands for; index is the id.
        special_ids, bos_token_id, eos_token_ids: see `Tokenizer`.
        prefix, suffix: token ids that `add_special_tokens` puts around a text.
        splittable: a long text may be encoded in pieces (see `may_split`).
    """

    def __init__(
        self,
        library: LibraryTokenizer,
        token_bytes: Sequence[bytes],
        *,
        special_ids: frozenset[int] = frozenset(),
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        splittable: bool = False,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._literal = _without_special(library)
        self._bytes = list(token_bytes)
        self._longest = _longest(library, self._bytes)
        self._special = special_ids
        self._bos = bos_token_id
        self._eos = eos_token_ids
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._splittable = splittable

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def bos_token_id(self) -> int | None:
        return self._bos

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """See `Tokenizer.encode`."""
        library = self._library if parse_special else self._literal
        ids = list(self._prefix) if add_special_tokens else []
        pieces = _pieces(text) if self._splittable else iter((text,))
        try:
            while group := list(islice(pieces, _PIECES_A_CALL)):
                encodings = library.encode_batch_fast(group, add_special_tokens=False)
                encodings.reverse()
                while encodings:  # one at a time: freeing them all at once would hold the GIL
                    ids += encodings.pop().ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: {error}", param="prompt", value=text[:100]
            ) from None
        if add_special_tokens:
            ids += self._suffix
        return ids

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer.fewest_tokens`."""
        return 0 if self._longest is None else len(text) // self._longest

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        if skip_special_tokens:
            token_ids = (token for token in token_ids if token not in self._special)
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_id(self, text: str) -> int | None:
        """See `Tokenizer.token_id`."""
        found: int | None = self._library.token_to_id(text)
        return found


def _longest(library: LibraryTokenizer, token_bytes: Sequence[bytes]) -> int | None:
    """Most characters of a text that one token stands for; None: there is no such bound."""
    added = library.get_added_tokens_decoder().values()
    if library.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None  # these leave characters out
    model = library.model
    if not isinstance(model, BPE) or (model.unk_token is not None and not model.byte_fallback):
        return None  # one token may stand for any number of unknown characters
    spelled = max((len(token.content) for token in added), default=0)
    return max(1, spelled, *map(len, token_bytes))


def may_split(library: LibraryTokenizer) -> bool:
    """Whether no added token can reach over the borders at which long texts are cut."""
    for token in library.get_added_tokens_decoder().values():
        text = token.content
        at_letter = text[:1].isalpha() or text[-1:].isalpha()
        greedy = token.lstrip or token.rstrip or token.single_word
        if any(c.isspace() for c in text) or (at_letter and greedy) or _BORDER.search(text):
            return False
    return True


def _pieces(text: str) -> Iterator[str]:
    """The text cut at safe borders into pieces of about `_PIECE` characters, or longer ones."""
    begin, size = 0, len(text)
    search = begin + _PIECE
    while search < size:
        # A bounded window: the search holds the GIL.
        border = _BORDER.search(text, search, min(size, search + _PIECE))
        if border is None:
            search += _PIECE
            continue
        yield text[begin : border.end()]
        begin = border.end()
        search = begin + _PIECE
    yield text[begin:]


def _without_special(library: LibraryTokenizer) -> LibraryTokenizer:
    """A second tokenizer over the same model that takes control tokens in a text for plain text.

    The library has that as a switch on the object, which no two threads could share.
    """
    twin = LibraryTokenizer(library.model)
    added = library.get_added_tokens_decoder()
    twin.add_tokens([added[token] for token in sorted(added)])
    if twin.get_added_tokens_decoder().keys() != added.keys():
        # Added tokens with gaps between their ids: only a full copy keeps the ids.
        twin = LibraryTokenizer.from_str(library.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        if (part := getattr(library, name)) is not None:
            setattr(twin, name, part)
    twin.encode_special_tokens = True
    return twin


def special(content: str) -> AddedToken:
    """A control token: matched in text before anything else, and never normalised."""
    return AddedToken(content, normalized=False, special=True)
