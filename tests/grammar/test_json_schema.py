"""JSON schemas: output that ends by itself validates, or the schema was refused."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aengine.errors import GrammarError
from aengine.request import StructuredOutput

from .schemas import ENFORCED, REFUSED, Enforced
from .support import takes, text_of, walk

if TYPE_CHECKING:
    from aengine.grammar import GrammarCompiler, TokenizerInfo


def _validate(document: Any, schema: Any) -> None:
    cls = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    if isinstance(schema, dict) and schema.get("exclusiveMinimum") is True:
        cls = jsonschema.Draft4Validator
    cls(schema, format_checker=cls.FORMAT_CHECKER).validate(document)


def test_there_are_many_schemas() -> None:
    assert len(ENFORCED) + len(REFUSED) >= 100


@pytest.mark.parametrize("case", ENFORCED.values(), ids=ENFORCED.keys())
def test_random_walks_validate(
    case: Enforced, compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(StructuredOutput.json(case.schema))
    rng = random.Random(7)
    ended = 0
    for _ in range(8):
        tokens = walk(grammar.matcher(), info, rng)
        if tokens is not None:
            _validate(json.loads(text_of(tokens, info)), case.schema)
            ended += 1
    assert ended >= 1


@pytest.mark.parametrize("case", ENFORCED.values(), ids=ENFORCED.keys())
def test_documents_are_taken_or_rejected(
    case: Enforced, compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    grammar = compiler.compile(StructuredOutput.json(case.schema))
    for text in case.good:
        _validate(json.loads(text), case.schema)
        assert takes(grammar.matcher(), text, info), f"must be possible: {text}"
    for text in case.bad:
        assert not takes(grammar.matcher(), text, info), f"must not be possible: {text}"


@pytest.mark.parametrize(("schema", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_enforced_is_an_error(
    schema: Any, words: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError) as raised:
        compiler.compile(StructuredOutput(kind="json", spec=json.dumps(schema)))
    assert words in str(raised.value)
    assert raised.value.param == "structured"
    assert raised.value.value == json.dumps(schema)


def test_a_weakening_is_listed_and_logged(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "format": "int32"}}}
    grammar = compiler.compile(StructuredOutput.json(schema))
    assert grammar.weakenings == ("format 'int32' is not enforced (at #/properties/n/format)",)
    assert "int32" in caplog.text


def test_the_same_weakening_many_times_is_one_sentence(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    number = {"type": "integer", "format": "int32"}
    grammar = compiler.compile(StructuredOutput.json({"prefixItems": [number] * 30}))
    assert len(grammar.weakenings) == len(caplog.records) == 1
    assert "and 29 more places" in grammar.weakenings[0]


def test_long_names_cost_once(compiler: GrammarCompiler) -> None:
    """A name of 100 KB above 20,000 schemas would be gigabytes if each place spelled its path."""
    schema = {"properties": {"n" * 100_000: {"anyOf": [{}] * 20_000 + [{"oops": 1}]}}}
    with pytest.raises(GrammarError, match="'oops'") as raised:
        compiler.prepare(StructuredOutput.json(schema))
    assert len(str(raised.value)) < 500


def test_numbers_that_are_no_json_are_refused(compiler: GrammarCompiler) -> None:
    for spec in ('{"const": NaN}', '{"maximum": Infinity}', '{"const": 0.12345678901234567890}'):
        with pytest.raises(GrammarError):
            compiler.compile(StructuredOutput(kind="json", spec=spec))


def test_a_string_is_never_invalid_utf8(compiler: GrammarCompiler, info: TokenizerInfo) -> None:
    grammar = compiler.compile(StructuredOutput.json({"type": "string"}))
    for bad in (b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xc0\xaf"'):
        assert not takes(grammar.matcher(), bad, info)


_NAMES = st.sampled_from(["a", "b", "key", "é", 'q"'])
_LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -5, "maximum": 40},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[ab]+$"},
        {"type": ["boolean", "null"]},
        {"enum": ["x", 1, None]},
        {"const": [1, {"y": 2}]},
        {"maxLength": 3, "minimum": 2},
        {},
    ]
)


def _grow(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, required, additional: {
            "type": "object",
            "properties": properties,
            "required": sorted(required),
            "additionalProperties": additional,
        },
        st.dictionaries(_NAMES, children, max_size=3),
        st.sets(_NAMES, max_size=2),
        st.one_of(st.booleans(), children),
    )
    arrays = st.builds(
        lambda items, prefix, least: {
            "type": "array",
            "prefixItems": prefix,
            "items": items,
            "minItems": least,
            "maxItems": least + 2,
        },
        children,
        st.lists(children, min_size=1, max_size=2),
        st.integers(0, 2),
    )
    several = st.lists(children, min_size=1, max_size=3)
    combined = st.builds(
        lambda word, options, more: {word: options, **more},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        several,
        st.sampled_from([{}, {"minLength": 1}, {"required": ["a"]}, {"maximum": 7}]),
    )
    return st.one_of(objects, arrays, combined)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=st.recursive(_LEAVES, _grow, max_leaves=6), seed=st.integers(0, 2**32))
def test_generated_schemas_validate_or_are_refused(
    schema: Any, seed: int, compiler: GrammarCompiler, info: TokenizerInfo
) -> None:
    try:
        grammar = compiler.compile(StructuredOutput.json(schema))
    except GrammarError:
        return
    rng = random.Random(seed)
    for _ in range(2):
        tokens = walk(grammar.matcher(), info, rng, limit=250)
        if tokens is not None:
            _validate(json.loads(text_of(tokens, info)), schema)
