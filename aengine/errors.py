"""Every exception that aengine raises, in one tree.

::

    AEngineError
    ├── ConfigError (ValueError)            a setting of the engine makes no sense
    ├── ModelLoadError                      a model, tokenizer or file cannot be used
    ├── OutOfMemoryError                    .breakdown, .hint
    ├── DeviceError                         work on a device failed
    │   └── DeviceLostError                 .step_id; the device's context is gone, for good
    ├── EngineClosedError                   use after aclose()
    ├── EngineDeadError                     .cause; the step loop died
    ├── EngineStateError                    not possible now: the engine is asleep, paused, ...
    ├── EngineOverloadedError               .retry_after; the queue's bound is reached
    ├── GrammarTimeoutError (TimeoutError)  a grammar took too long to compile
    └── RequestError                        .request_id
        ├── InvalidRequestError (ValueError)    .param, .value
        │   ├── ContextLengthError              .prompt_tokens, .max_model_len
        │   └── GrammarError                    a schema, regex or grammar is invalid or unsupported
        ├── DeadlineExceededError (TimeoutError)
        ├── RequestAbortedError
        ├── ReaderConflictError (RuntimeError)  a stream is read twice at a time
        └── GenerationError                 this request failed while it ran; others go on

Each class has `.code` (a stable word for programs) and `.status_code` (what an HTTP front end
would answer). All can be pickled.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

E = TypeVar("E", bound="AEngineError")


def shown(value: object, longest: int = 100) -> str:
    """A value as error messages show it: of bounded length, whatever it is."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


class AEngineError(Exception):
    """Base of all errors of this package."""

    code: ClassVar[str] = "internal_error"
    status_code: ClassVar[int] = 500

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        for name, value in fields.items():
            setattr(self, name, value)

    def fresh(self) -> Self:
        """The same error as a new object: one that many raise would collect their tracebacks."""
        error: Self = _rebuild(type(self), self.args, self.__dict__.copy())
        error.__cause__ = self.__cause__
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: _picklable(value) for name, value in self.__dict__.items()}
        return _rebuild, (type(self), self.args, state)


def _picklable(value: Any) -> Any:
    """The value itself, or what error messages show of it."""
    try:
        pickle.dumps(value)
    except Exception:
        return shown(value)
    return value


def _rebuild(cls: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class ConfigError(AEngineError, ValueError):
    """A setting of the engine is impossible; the message names it and what would be accepted."""

    code = "invalid_config"
    status_code = 400


class ModelLoadError(AEngineError):
    """A model name, file, tensor or tokenizer cannot be used; the message says why."""

    code = "model_load_failed"


class OutOfMemoryError(AEngineError):
    """Memory does not suffice. `breakdown` maps uses to bytes; `hint` would work."""

    code = "out_of_memory"
    status_code = 507

    def __init__(
        self, message: str = "", *, breakdown: Mapping[str, int] | None = None, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.breakdown: dict[str, int] = dict(breakdown or {})
        self.hint = hint


class DeviceError(AEngineError):
    """Work on a device failed."""

    code = "device_error"


class DeviceLostError(DeviceError):
    """The device's context is gone: everything pending and everything later fails.

    `step_id` is the step whose work was pending when the loss was seen, if one was.
    """

    code = "device_lost"

    def __init__(self, message: str = "", *, step_id: int | None = None) -> None:
        super().__init__(message)
        self.step_id = step_id


class EngineClosedError(AEngineError):
    """The engine was closed (or is closing) and takes no new work."""

    code = "engine_closed"
    status_code = 503


class EngineDeadError(AEngineError):
    """The engine's step loop died; `cause` is the error that killed it."""

    code = "engine_dead"
    status_code = 503

    def __init__(self, message: str = "", *, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class EngineStateError(AEngineError):
    """The engine runs, but cannot do this now (it is asleep, or paused with requests)."""

    code = "wrong_state"
    status_code = 409


class EngineOverloadedError(AEngineError):
    """The waiting queue is full; try again after `retry_after` seconds."""

    code = "overloaded"
    status_code = 429

    def __init__(self, message: str = "", *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GrammarTimeoutError(AEngineError, TimeoutError):
    """Compiling a grammar took longer than the configured limit and was stopped."""

    code = "grammar_timeout"
    status_code = 400


class RequestError(AEngineError):
    """One request failed; the engine and all other requests go on."""

    code = "request_failed"
    status_code = 400

    def __init__(self, message: str = "", *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class InvalidRequestError(RequestError, ValueError):
    """A parameter of the request is invalid: `param` is its name, `value` what was given."""

    code = "invalid_request"

    def __init__(
        self,
        message: str = "",
        *,
        param: str | None = None,
        value: Any = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.param = param
        self.value = value


class ContextLengthError(InvalidRequestError):
    """Prompt (plus requested output) does not fit: `prompt_tokens` against `max_model_len`.

    Of a text that is much too long `prompt_tokens` is a lower bound: it is refused by its length.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str = "",
        *,
        prompt_tokens: int,
        max_model_len: int,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, param="prompt", value=prompt_tokens, request_id=request_id)
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class GrammarError(InvalidRequestError):
    """A schema, regular expression or grammar is invalid, or asks for what cannot be enforced."""

    code = "invalid_grammar"


class DeadlineExceededError(RequestError, TimeoutError):
    """The request's deadline passed before it produced anything."""

    code = "deadline_exceeded"
    status_code = 504


class RequestAbortedError(RequestError):
    """The request was aborted by the engine's side (abort(), shutdown), not by its reader."""

    code = "request_aborted"
    status_code = 499


class ReaderConflictError(RequestError, RuntimeError):
    """A stream has one reader at a time, in the event loop that called `generate`."""

    code = "reader_conflict"
    status_code = 409


class GenerationError(RequestError):
    """This request failed while it ran (a processor, a matcher, a stop check raised)."""

    code = "generation_failed"
    status_code = 500
