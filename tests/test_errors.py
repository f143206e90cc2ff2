"""The exception tree: picklable, coded, catchable the way Python programs expect."""

from __future__ import annotations

import inspect
import pickle

import pytest

from aengine import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.AEngineError)
]


def make(cls: type[errors.AEngineError]) -> errors.AEngineError:
    if cls is errors.ContextLengthError:
        return errors.ContextLengthError("too long", prompt_tokens=9, max_model_len=8)
    return cls("what went wrong")


@pytest.mark.parametrize("cls", CLASSES)
def test_survives_a_pickle_round_trip(cls: type[errors.AEngineError]) -> None:
    error = make(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize("cls", CLASSES)
def test_has_a_code_and_a_status(cls: type[errors.AEngineError]) -> None:
    assert cls.code
    assert 400 <= cls.status_code < 600


def test_the_tree_is_drawn_in_the_module() -> None:
    drawing = errors.__doc__ or ""
    assert [cls.__name__ for cls in CLASSES if cls.__name__ not in drawing] == []


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.InvalidRequestError, ValueError),
        (errors.GrammarTimeoutError, TimeoutError),
        (errors.DeadlineExceededError, TimeoutError),
        (errors.GrammarError, errors.RequestError),
        (errors.DeviceLostError, errors.DeviceError),
    ],
)
def test_is_caught_as_its_builtin_relative(
    cls: type[errors.AEngineError], builtin: type[Exception]
) -> None:
    assert issubclass(cls, builtin)
