"""Pydantic models as schemas: what is generated is what the model accepts."""

from __future__ import annotations

import enum
import random
import uuid  # noqa: TC003 -- pydantic reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from aengine.errors import GrammarError
from aengine.request import StructuredOutput

from .support import text_of, walk

if TYPE_CHECKING:
    from aengine.grammar import GrammarCompiler, TokenizerInfo


class Colour(enum.Enum):
    """An enumeration."""

    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    """One alternative of a union."""

    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """The other one."""

    kind: Literal["dog", "wolf"]
    name: Annotated[str, Field(max_length=5)]


class Owner(BaseModel):
    """A discriminated union, which pydantic writes as oneOf of references."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Plain(BaseModel):
    """Everyday fields."""

    model_config = ConfigDict(extra="forbid")
    id: uuid.UUID
    colour: Colour
    maybe: int | None = None
    tags: Annotated[list[Literal["a", "b"]], Field(max_length=3)]
    level: Annotated[int, Field(ge=0, lt=10)]
    ratio: float
    pair: tuple[int, bool]
    code: Annotated[str, Field(pattern="^[A-Z]{2}$")]


class Tree(BaseModel):
    """A model that contains itself."""

    value: int
    children: Annotated[list[Tree], Field(max_length=2)] = []


class Unique(BaseModel):
    """A set, which cannot be enforced."""

    items: set[int]


@pytest.mark.parametrize("model", [Owner, Plain, Tree])
def test_walks_are_accepted_by_the_model(
    model: type[BaseModel], compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(StructuredOutput.json(model))
    assert grammar.weakenings == ()
    ended = 0
    for seed in range(10):
        tokens = walk(grammar.matcher(), info, random.Random(seed))
        if tokens is not None:
            model.model_validate_json(text_of(tokens, info))
            ended += 1
    assert ended


def test_a_set_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiler.compile(StructuredOutput.json(Unique))
