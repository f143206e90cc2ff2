"""Context variables for what callers hand in: their callbacks run in the context of the call."""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from aengine.request import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")


class Carried(Generic[P, R]):
    """A callback with the context in which this was made.

    Each call runs in a copy: the callbacks of two sequences may run in two threads, and a context
    can be entered by one at a time. So what a call sets is gone with the call.
    """

    __slots__ = ("_callback", "_context")

    def __init__(self, callback: Callable[P, R]) -> None:
        self._callback = callback
        self._context = copy_context()

    def __getattr__(self, name: str) -> Any:
        # Messages name a callback by its `__qualname__`: by the caller's, not by ours.
        if name != "__qualname__":
            raise AttributeError(name)
        return getattr(self._callback, name, type(self._callback).__qualname__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._context.copy().run(self._callback, *args, **kwargs)


def carried(params: SamplingParams) -> SamplingParams:
    """The same parameters, whose logits processors run in the context of now."""
    if not params.logits_processors:
        return params
    return replace(params, logits_processors=tuple(map(Carried, params.logits_processors)))
