"""What a caller asks for: sampling parameters, structured output, and the engine's request record.

Pure data. Parameters are validated when they are built, so that a bad value is reported where it
was written and never reaches the step loop.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from aengine.checks import as_tuple, bad, check_integer, check_names, check_number, is_unicode
from aengine.errors import GrammarError, shown

StructuredKind = Literal["json", "regex", "grammar", "choice", "json_object", "structural_tag"]

LogitsProcessor = Callable[[Sequence[int], Any], Any]
"""`processor(output_token_ids, logits) -> logits`; logits is a float32 vector [vocabulary]."""

MAX_LOGPROBS = 20
MAX_INT = 2**31 - 1


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"
    REPETITION = "repetition"


class RequestState(enum.Enum):
    """Where a request is on its way through the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the output. Build one with the class methods, not with the constructor.

    `spec` is the constraint as text: a JSON schema, a regular expression, an EBNF grammar, a JSON
    list of choices or of structural tags.
    """

    kind: StructuredKind
    spec: str

    def __post_init__(self) -> None:
        kinds = get_args(StructuredKind)
        if self.kind not in kinds or not isinstance(self.spec, str):
            raise GrammarError(
                f"kind={shown(self.kind)} must be one of {', '.join(kinds)} and "
                f"spec={shown(self.spec)} a text: use the class methods",
                param="structured",
                value=self.kind,
            )

    @classmethod
    def json(cls, schema: Any) -> StructuredOutput:
        """Output that validates against a JSON schema.

        Args:
            schema: a dict, a JSON text, or a pydantic model class.

        Raises:
            GrammarError: the schema is none of these, or not valid JSON.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, (Mapping, bool)):
            schema = _dumped(schema, "the schema")
        if not isinstance(schema, str):
            raise GrammarError(
                "a JSON schema is a dict, a JSON text or a pydantic model, "
                f"not {type(schema).__name__}",
                param="structured",
                value=schema,
            )
        try:
            json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(
                f"the schema is not valid JSON: {error}", param="structured", value=schema
            ) from error
        return cls(kind="json", spec=schema)

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """Output that matches the whole regular expression.

        Raises:
            GrammarError: the pattern is not a non-empty string.
        """
        return cls(kind="regex", spec=_text(pattern, "pattern"))

    @classmethod
    def grammar(cls, ebnf: str) -> StructuredOutput:
        """Output that the EBNF (Lark or GBNF) grammar derives.

        Raises:
            GrammarError: the grammar is not a non-empty string.
        """
        return cls(kind="grammar", spec=_text(ebnf, "grammar"))

    @classmethod
    def choice(cls, options: Sequence[str]) -> StructuredOutput:
        """Output that is exactly one of the options.

        Raises:
            GrammarError: the list is empty or holds something that is not a non-empty string.
        """
        if (
            isinstance(options, (str, bytes))
            or not isinstance(options, Sequence)
            or not options
            or not all(isinstance(o, str) and o for o in options)
        ):
            raise GrammarError(
                f"choice needs a list of at least one non-empty string, not {shown(options)}",
                param="structured",
                value=options,
            )
        return cls(kind="choice", spec=json.dumps(list(options)))

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Output that is any JSON object."""
        return cls(kind="json_object", spec="{}")

    @classmethod
    def structural_tag(cls, tags: Sequence[Mapping[str, Any]]) -> StructuredOutput:
        """Free text until a tag begins, then output constrained by that tag's schema until its end.

        Args:
            tags: mappings with `begin` (str), `schema` (JSON schema) and `end` (str).

        Raises:
            GrammarError: the list is empty or a tag lacks one of the three keys.
        """
        given: Any = tags
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
            raise GrammarError(
                f"structural_tag takes a list of tags, not {shown(tags)}",
                param="structured",
                value=tags,
            )
        for tag in tags:
            if not isinstance(tag, Mapping) or not {"begin", "schema", "end"} <= set(tag):
                raise GrammarError(
                    "a structural tag has the keys begin, schema and end",
                    param="structured",
                    value=tag,
                )
        if not tags:
            raise GrammarError(
                "structural_tag needs at least one tag", param="structured", value=tags
            )
        return cls(kind="structural_tag", spec=_dumped([dict(tag) for tag in tags], "a tag"))


def _dumped(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(
            f"{what} cannot be written as JSON: {error}", param="structured", value=value
        ) from error


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(
            f"the {what} must be a non-empty string", param="structured", value=value
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Spellings follow vLLM and OpenAI.

    Args:
        max_tokens: most tokens to generate; None means to the end of the context.
        min_tokens: no stop of any kind before this many tokens.
        temperature: 0 is greedy; above, the softmax temperature.
        top_p, top_k, min_p: nucleus, k-best (0 or -1: off) and relative-probability truncation.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens (-2 to 2).
        repetition_penalty: divides (positive) or multiplies (negative) logits of seen tokens (> 0).
        seed: makes sampling reproducible, alone and in any batch.
        stop: strings that end the output; the earliest match wins.
        stop_token_ids: token ids that end the output, besides the model's own end tokens.
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        n: number of independent completions of the prompt.
        logprobs, prompt_logprobs: how many top log-probabilities to report per token (0 to 20).
        logit_bias: token id -> value added to its logit (-100 to 100).
        allowed_token_ids: only these tokens may be produced.
        bad_words: strings whose token sequences are never produced.
        structured: a grammar for the output.
        skip_special_tokens: leave special tokens out of the text.
        logits_processors: callables `(output_token_ids, logits) -> logits`, run for this request.

    Raises:
        InvalidRequestError: a value is out of range; `.param` names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured: StructuredOutput | None = None
    skip_special_tokens: bool = True
    logits_processors: Sequence[LogitsProcessor] = ()

    def __new__(cls, **options: Any) -> Self:
        check_names(cls, options)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(
            self,
            "stop",
            (self.stop,) if isinstance(self.stop, str) else as_tuple("stop", self.stop),
        )
        set_(self, "stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids))
        set_(self, "bad_words", as_tuple("bad_words", self.bad_words))
        set_(self, "logits_processors", as_tuple("logits_processors", self.logits_processors))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.top_k == -1:
            set_(self, "top_k", 0)
        self._check_lengths()
        self._check_numbers()
        self._check_tokens()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None)
        check_integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        check_integer("n", self.n, 1, 128)
        check_integer("top_k", self.top_k, 0, MAX_INT)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)

    def _check_tokens(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise bad(name, getattr(self, name), "True or False")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text or not is_unicode(text):
                    raise bad(name, text, "non-empty strings of valid Unicode")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, MAX_INT)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise bad(
                    "allowed_token_ids", self.allowed_token_ids, "at least one token id, or None"
                )
            for token in self.allowed_token_ids:
                check_integer("allowed_token_ids", token, 0, MAX_INT)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise bad("logit_bias", self.logit_bias, "a mapping of token id to number")
            for token, value in self.logit_bias.items():
                check_integer("logit_bias", token, 0, MAX_INT)
                check_number("logit_bias", value, -100.0, 100.0)
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise bad("structured", self.structured, "a StructuredOutput")
        for processor in self.logits_processors:
            if not callable(processor):
                raise bad("logits_processors", processor, "callables")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, naming the nearest known parameter for an unknown one.

        Raises:
            InvalidRequestError: an unknown name or a bad value.
        """
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise bad("options", options, "a mapping of names to values")
        return cls(**options)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_counts(self) -> bool:
        """Whether the sampler needs to know which tokens were seen before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sequence to generate, as the scheduler sees it: immutable, integers and parameters.

    `seq_id` identifies it inside the engine; `request_id` is the caller's label and need not be
    unique. A request with n > 1 becomes n of these, which share `request_id` and differ in `index`.
    Times are seconds on the scheduler's clock. `prompt_token_ids` is never empty.
    """

    seq_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    index: int = 0
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    cache_salt: str | None = None
    bad_word_token_ids: tuple[tuple[int, ...], ...] = field(default=())
