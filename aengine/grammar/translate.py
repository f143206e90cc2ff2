"""From a caller's StructuredOutput to the text that the grammar library compiles.

Every kind ends as one `GrammarSource`: a grammar in the library's notation, what it will not
enforce, and whether compiling it could be slow. Pure text work, no tokenizer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from aengine.errors import GrammarError
from aengine.grammar.schema_check import CheckedSchema, check_schema, check_size

if TYPE_CHECKING:
    from aengine.config import GrammarLimits
    from aengine.grammar.vocabulary import TokenizerInfo
    from aengine.request import StructuredOutput

# Keys that are not listed in `properties` may be spelled with any allowed escape, so with \uXXXX
# allowed the key "\u0061" would slip past the schema of "a". JSON never needs those escapes for
# text; control characters other than these five cannot be written then.
_ESCAPES = 'nrbtf\\"'

# Unbounded whitespace lets a small model fill its budget with blanks. Forty hold a line break and
# the indentation of any document within `max_depth` as tools print it.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"

# Where only one text can follow, the library would ask the tokenizer how to spell it while it fills
# a mask: a call into Python, and with 64 rows and a busy host 64 waits for the GIL (0.6 s).
# Without it the mask allows every spelling of that text, and `forced_tokens` still tells the right
# one. It stands at the end, so that line numbers in messages are the caller's.
_DIRECTIVE = '\n%llguidance {"no_forcing": true}\n'

_LIGHT_GRAMMAR = 8 * 1024
_LIGHT_REGEX = 2 * 1024
_MOST_TAGS = 256
_LONGEST_TAG = 1000

_LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"'  # strings, regexes and comments are passed over
    r"|//[^\n]*|\#[^\n]*"
    r"|/(?:\\.|[^/\\\n])+/"
    r"|(?P<json>%json\b\s*)"
    r"|(?P<operator>[&~])"
    r"|(?P<temperature>\btemperature\s*=)"
)
_GBNF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """A grammar as the library takes it.

    `spec` is what the caller wrote (for error messages), `heavy` that compiling could be slow,
    `is_lark` that the caller wrote Lark, so that the library's line numbers mean something.
    """

    text: str
    spec: str
    weakenings: tuple[str, ...] = ()
    heavy: bool = False
    is_lark: bool = False


def translate(
    structured: StructuredOutput, tokenizer: TokenizerInfo, limits: GrammarLimits
) -> GrammarSource:
    """Check the spec and write it in the library's notation.

    Raises:
        GrammarError: it is too large, malformed, or asks for what cannot be enforced.
    """
    spec = structured.spec
    check_size(spec, limits)
    match structured.kind:
        case "json":
            return _json(spec, check_schema(spec, limits))
        case "json_object":
            return _json(spec, check_schema('{"type": "object"}', limits))
        case "regex":
            return _regex(spec)
        case "choice":
            return _choice(spec)
        case "grammar":
            return _grammar(spec, limits)
        case "structural_tag":
            return _structural_tags(spec, tokenizer, limits)


def _error(message: str, spec: str) -> GrammarError:
    return GrammarError(message, param="structured", value=spec)


def _json(spec: str, checked: CheckedSchema) -> GrammarSource:
    return GrammarSource(
        text=f"start: %json {_with_options(checked.text)}{_DIRECTIVE}",
        spec=spec,
        weakenings=checked.weakenings,
        heavy=checked.heavy,
    )


def _with_options(schema: str) -> str:
    """The schema with this engine's rules for escapes and whitespace written into it."""
    document = json.loads(schema)
    asked = document.pop("x-guidance", {})
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if asked.get("whitespace_flexible", True):
        options["whitespace_pattern"] = _WHITESPACE
    else:
        options["whitespace_flexible"] = False
    return json.dumps({"x-guidance": options, **document}, ensure_ascii=False)


def _regex(spec: str) -> GrammarSource:
    if (len(spec) - len(spec.rstrip("\\"))) % 2:
        raise _error("invalid regex: it ends with a lone backslash", spec)
    text = f"start: /{_slashes(spec)}/{_DIRECTIVE}"
    return GrammarSource(text=text, spec=spec, heavy=len(spec) > _LIGHT_REGEX)


def _slashes(pattern: str) -> str:
    """The pattern as it stands between the slashes of a Lark terminal."""
    pattern = re.sub(r"\\.|/", lambda m: m[0] if m[0] != "/" else r"\/", pattern, flags=re.DOTALL)
    return re.sub(r"(\\?)\n", r"\\n", pattern)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _choice(spec: str) -> GrammarSource:
    options = json.loads(spec)
    # One terminal instead of a rule: the options become one automaton.
    text = "start: CHOICE\nCHOICE: " + "\n  | ".join(map(_literal, dict.fromkeys(options)))
    return GrammarSource(text=text + _DIRECTIVE, spec=spec, heavy=len(text) > _LIGHT_GRAMMAR)


def _grammar(spec: str, limits: GrammarLimits) -> GrammarSource:
    if is_lark_syntax(spec):
        return _lark(spec, limits)
    try:
        text = gbnf_to_lark(_GBNF_ESCAPE.sub(_gbnf_character, spec))
    except Exception as error:  # the converter raises whatever its parser happens to raise
        raise _error(
            f"invalid grammar: neither Lark (no 'start:' rule) nor GBNF: {error}", spec
        ) from error
    return GrammarSource(text=text + _DIRECTIVE, spec=spec, heavy=len(text) > _LIGHT_GRAMMAR)


def _gbnf_character(match: re.Match[str]) -> str:
    code = int(match[2] or match[3], 16)
    # ASCII stays escaped, since it could be a quote or a bracket; the library reads \xHH.
    return match[1] + (chr(code) if code >= 0xA0 else f"\\x{code:02x}")


def _lark(spec: str, limits: GrammarLimits) -> GrammarSource:
    """A Lark grammar: inline schemas are checked and given the engine's options."""
    parts: list[str] = []
    weakenings: list[str] = []
    heavy = len(spec) > _LIGHT_GRAMMAR
    at = 0
    while found := _LARK_PARTS.search(spec, at):
        parts.append(spec[at : found.end()])
        at = found.end()
        if found["temperature"]:
            raise _error("a rule's temperature is not supported: set it on the request", spec)
        heavy = heavy or found["operator"] is not None
        if found["json"]:
            try:
                _, end = json.JSONDecoder().raw_decode(spec, at)
            except (ValueError, RecursionError) as error:
                raise _error(f"%json needs a JSON schema: {error}", spec) from error
            checked = _inner_schema(spec[at:end], "%json", spec, limits)
            parts.append(_with_options(checked.text))
            weakenings += checked.weakenings
            heavy = heavy or checked.heavy
            at = end
    parts += [spec[at:], _DIRECTIVE]
    return GrammarSource(
        text="".join(parts),
        spec=spec,
        weakenings=tuple(weakenings),
        heavy=heavy,
        is_lark=True,
    )


def _structural_tags(spec: str, tokenizer: TokenizerInfo, limits: GrammarLimits) -> GrammarSource:
    """Free text and tags in turn. A tag's beginning ends the free text as soon as it is complete.

    A special token's name in `end`, or at the front of `begin`, stands for that token, since text
    never contains special tokens.
    """
    tags = json.loads(spec)
    if len(tags) > _MOST_TAGS:
        raise _error(f"{len(tags)} structural tags are more than {_MOST_TAGS}", spec)
    for i, tag in enumerate(tags):
        for part in ("begin", "end"):
            if not isinstance(tag[part], str):
                raise _error(f"tag {i}: {part} must be a string", spec)
            if len(tag[part]) > _LONGEST_TAG:
                raise _error(f"tag {i}: {part} is longer than {_LONGEST_TAG} characters", spec)
        if not tag["begin"]:
            raise _error(f"tag {i}: begin must not be empty", spec)
        hidden = [j for j, other in enumerate(tags) if j != i and tag["begin"] in other["begin"]]
        if hidden:
            raise _error(
                f"tag {hidden[0]} could never begin: its text contains the beginning of tag {i}",
                spec,
            )
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* rest", "rest: TEXT"]
    rules.append(r"TEXT: /(.|\n)*/")
    weakenings: list[str] = []
    heavy = False
    for i, tag in enumerate(tags):
        schema = tag["schema"]
        schema = schema if isinstance(schema, str) else json.dumps(schema)
        checked = _inner_schema(schema, f"tag {i}", spec, limits)
        weakenings += [f"tag {i}: {what}" for what in checked.weakenings]
        heavy = heavy or checked.heavy
        body = f"%json {_with_options(checked.text)} {_spelled(tag['end'], tokenizer)}"
        if _spelled(tag["begin"], tokenizer) == _literal(tag["begin"]):
            rules.append(f"begin_{i}[lazy]: TEXT {_literal(tag['begin'])}")
            rules.append(f"tag_{i}: begin_{i} {body}")
        elif tokenizer.special_token_starting(tag["begin"]) is None:
            raise _error(f"tag {i}: a special token must be at the front of begin", spec)
        else:
            rules.append(f"tag_{i}: TEXT {_spelled(tag['begin'], tokenizer)} {body}")
    text = "\n".join(rules)
    return GrammarSource(
        text=text + _DIRECTIVE,
        spec=spec,
        weakenings=tuple(weakenings),
        heavy=heavy or len(text) > _LIGHT_GRAMMAR,
    )


def _spelled(text: str, tokenizer: TokenizerInfo) -> str:
    """Text in Lark, with the special tokens it names written as tokens."""
    parts = []
    plain = ""
    while text:
        token = tokenizer.special_token_starting(text)
        if token is None:
            plain, text = plain + text[0], text[1:]
            continue
        if plain:
            parts.append(_literal(plain))
            plain = ""
        parts.append(f"<[{token}]>")
        text = text.encode()[len(tokenizer.tokens[token]) :].decode()
    if plain:
        parts.append(_literal(plain))
    return " ".join(parts)


def _inner_schema(text: str, where: str, spec: str, limits: GrammarLimits) -> CheckedSchema:
    """Check a schema inside another spec; an error names the place and carries the whole spec."""
    try:
        return check_schema(text, limits)
    except GrammarError as error:
        raise _error(f"{where}: {error}", spec) from error
