"""Grammars as llguidance reads them, made of JSON schemas, regexes, choices and Lark.

Lark here is llguidance's dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.patterns import without_look_around
from specserve.text.grammars.simplify import simplified

MAX_BYTES = 1 << 18  # of a grammar; larger ones take more than a second to compile
MAX_DEPTH = 64  # of objects and lists in a schema; llguidance's reader of JSON ends at 127
# JSON on one line, as Python's json.dumps writes it: models have learnt it, and as there is no
# choice of spaces, a grammar forces whole keys and what is between them.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMPACT = {"whitespace_flexible": False}
# Linear in the text: a try at one place ends before the next place where a match may begin.
START = re.compile(r"^[?!]?start\b[^:=\n]*:(?!:)", re.MULTILINE)
WITHOUT_EFFECT = re.compile(r"[\w-][ \t]*\[[^][]*\b(max_tokens|stop|temperature)\s*=")
ESCAPED = re.compile(r"\\?\n|\\.|/")


def lark(text: str) -> str:
    """The grammar of a Lark text, which begins at the rule `start`.

    `json_part` and `quoted` write parts of it. GrammarError for a text that is too large.
    """
    return checked(json.dumps({"grammars": [{"lark_grammar": text}]}))


def json_schema(
    schema: Mapping[str, Any] | bool, whitespace: str | None = None, is_strict: bool = False
) -> str:
    """The grammar of JSON values that obey a schema, whose objects are closed (`simplify.py`).

    `whitespace` is a regex of what may stand behind `{`, `[`, `,` and `:`, and before `}` and `]`,
    once in each place; "" is none, and None a space behind `,` and `:`. GrammarError for a schema
    that is no JSON, too deep, or, if `is_strict`, open.
    """
    return checked(f'{{"grammars": [{{"json_schema": {written(schema, whitespace, is_strict)}}}]}}')


def json_part(
    schema: Mapping[str, Any] | bool, whitespace: str | None = None, is_strict: bool = False
) -> str:
    """The same as a part of a Lark rule."""
    return f"%json {written(schema, whitespace, is_strict)}"


def quoted(text: str) -> str:
    """A Lark rule's part that is this text; nothing where the text is empty."""
    return json.dumps(text) if text else ""


def regex(pattern: str) -> str:
    """The grammar of texts that match from their beginning to their end."""
    escaped = ESCAPED.sub(escape, without_look_around(checked(pattern)))
    return lark(f"start: /{escaped}/" if pattern else 'start: ""')


def choice(texts: Sequence[str]) -> str:
    """The grammar of one of these texts."""
    # A terminal, in capitals, is one automaton; of a rule every text would be followed by itself.
    return lark("start: ONE\nONE: " + " | ".join(json.dumps(text) for text in texts))


def escape(found: re.Match[str]) -> str:
    """A slash or line break of a regex, as Lark can have it between slashes."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])


def written(schema: Mapping[str, Any] | bool, whitespace: str | None, is_strict: bool) -> str:
    """The schema's JSON, with what llguidance has to know of the text's form."""
    if schema is False:
        raise GrammarError("false allows no value")
    given = {} if schema is True else schema
    if "x-guidance" in given:
        raise GrammarError("x-guidance is not for callers: leave it out")
    check_depth(given)
    checked(as_json(given))
    form = {None: ONE_LINE, "": COMPACT}.get(whitespace, {"whitespace_pattern": whitespace})
    return as_json({**simplified(given, is_strict), "x-guidance": form})


def as_json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as e:
        raise GrammarError(f"no JSON: {e!s:.200}") from e


def check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in items(value)]
        if not level:
            return
    raise GrammarError(f"nested more than {MAX_DEPTH} deep: use fewer levels, or $ref")


def items(value: Any) -> Sequence[Any]:
    """Objects and lists right within a value."""
    within = value.values() if isinstance(value, Mapping) else value
    is_container = isinstance(value, Mapping | list | tuple)
    return [v for v in within if isinstance(v, Mapping | list | tuple)] if is_container else ()


def read_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as e:
        raise GrammarError(f"no valid JSON: {e!s:.200}") from e
    except RecursionError as e:
        raise GrammarError("nested too deeply") from e


def checked(grammar: str) -> str:
    if len(grammar) > MAX_BYTES:
        raise GrammarError(
            f"{len(grammar)} bytes as a grammar, and {MAX_BYTES} are allowed: send a smaller one"
        )
    return grammar


def own_text(lark: str) -> str:
    """A caller's Lark; GrammarError for another notation, and for options without effect here."""
    checked(lark)
    if "::=" in lark and not START.search(lark):
        raise GrammarError('::= is of GBNF or EBNF: send Lark, as in start: "yes" | "no"')
    if option := WITHOUT_EFFECT.search(lark):
        raise GrammarError(f"the option {option[1]} is not supported: leave it out")
    return lark
