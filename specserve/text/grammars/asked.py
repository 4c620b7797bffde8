"""Structured output as a caller asks for it, and the grammar that it means."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.text.grammars import forms
from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.structural_tag import structural_tag

FIELD = "structured_outputs"
KINDS = "json", "regex", "choice", "grammar", "json_object", "structural_tag"
Choices = Annotated[tuple[str, ...], Meta(min_length=1, max_length=4096)]


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The form that a text has to have; exactly one of the first six, named as in vLLM.

    json                a JSON schema, as an object or as JSON
    regex               a regex of llguidance's, which the whole text matches
    choice              1 to 4096 texts, one of which it is
    grammar             a grammar in Lark, in llguidance's dialect
    json_object         true: any JSON object
    structural_tag      text with parts of a form, as an object or as JSON
    strict              of json; true: all objects are closed, and an open one is an error
    whitespace_pattern  of json and json_object; a regex of the space that may be within JSON
    disable_any_whitespace  of json and json_object; true: there is none
    """

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    strict: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    @property
    def kinds(self) -> list[str]:
        """Which of the six are given."""
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        return [kind for kind in given if kind != "json_object" or self.json_object]

    @property
    def field(self) -> str:
        """Where a body has what is asked for."""
        return f"{FIELD}.{self.kinds[0]}"

    @property
    def whitespace(self) -> str | None:
        return "" if self.disable_any_whitespace else self.whitespace_pattern


def grammar_of(asked: StructuredOutputsParams, field: str | None = None) -> str:
    """llguidance's grammar; RequestError for what is wrong by itself, which names `field` where the
    caller has sent it in another one.
    """
    if len(asked.kinds) != 1:
        given = " and ".join(asked.kinds) or "none"
        raise RequestError(f"{FIELD}: exactly one of {', '.join(KINDS)}, not {given}", FIELD)
    check_options(asked, asked.kinds[0])
    path = field or asked.field
    try:
        return written(asked, asked.kinds[0])
    except GrammarError as e:
        raise RequestError(f"{path}: {e}", path) from e


def json_form(asked: StructuredOutputsParams) -> str:
    """JSON that is asked for, as a part of a Lark rule."""
    schema = {"type": "object"} if asked.json is None else read_schema(asked.json)
    return forms.json_part(schema, asked.whitespace, asked.strict)


def written(asked: StructuredOutputsParams, kind: str) -> str:
    value = getattr(asked, kind)
    match kind:
        case "json":
            return forms.json_schema(read_schema(value), asked.whitespace, asked.strict)
        case "json_object":
            return forms.json_schema({"type": "object"}, asked.whitespace)
        case "regex":
            return forms.regex(value)
        case "choice":
            return forms.choice(value)
        case "grammar":
            return forms.lark(forms.own_text(value))
        case _:
            return forms.lark(structural_tag(value))


def read_schema(given: Any) -> Mapping[str, Any] | bool:
    schema = forms.read_json(given) if isinstance(given, str) else given
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("a schema is a JSON object")
    return schema


def check_options(asked: StructuredOutputsParams, kind: str) -> None:
    """RequestError for options that would have no effect."""
    if asked.strict and kind != "json":
        name, why = "strict", f"it is of json, not of {kind}: leave it out"
    elif asked.disable_any_whitespace and asked.whitespace_pattern is not None:
        name = "whitespace_pattern"
        why = "there is no whitespace with disable_any_whitespace: send one of the two"
    elif kind in ("json", "json_object"):
        return
    else:
        name = "disable_any_whitespace" if asked.disable_any_whitespace else "whitespace_pattern"
        why = f"it is of json and json_object, not of {kind}: leave it out"
    if getattr(asked, name):
        raise RequestError(f"{FIELD}.{name}: {why}", f"{FIELD}.{name}")
