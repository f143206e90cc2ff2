"""Sampling parameters and constraints are checked where they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aengine.errors import GrammarError, InvalidRequestError
from aengine.request import SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.inf),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("n", 0),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-5: 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("structured", "json"),
        ("logits_processors", [3]),
    ],
)
def test_bad_values_name_the_parameter(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert param in str(caught.value)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=3, min_tokens=4)
    assert caught.value.param == "min_tokens"


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.from_options({"temprature": 1})
    assert "temperature" in str(caught.value)


def test_a_single_stop_string_is_one_stop_string() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_vllm_spelling_of_no_top_k() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


class Model:
    """Quacks like a pydantic model class."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object"}


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}', Model])
def test_a_json_schema_may_be_a_dict_a_text_or_a_model(schema: Any) -> None:
    assert StructuredOutput.json(schema).spec == '{"type": "object"}'


@pytest.mark.parametrize(
    "build",
    [
        lambda: StructuredOutput.json("{not json"),
        lambda: StructuredOutput.json(7),
        lambda: StructuredOutput.regex(""),
        lambda: StructuredOutput.grammar(None),  # type: ignore[arg-type]
        lambda: StructuredOutput.choice([]),
        lambda: StructuredOutput.choice("abc"),
        lambda: StructuredOutput.choice(["a", ""]),
        lambda: StructuredOutput.structural_tag([]),
        lambda: StructuredOutput.structural_tag([{"begin": "<a>"}]),
    ],
)
def test_bad_constraints_are_grammar_errors(build: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        build()
    assert caught.value.param == "structured"
