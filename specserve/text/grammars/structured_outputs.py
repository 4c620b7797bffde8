"""Structured output parameters, and the grammars that they define.

Grammars are in llguidance's format. Lark means its dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.patterns import without_look_around
from specserve.text.grammars.schemas import simplified

FIELD = "structured_outputs"
KINDS = "json", "regex", "choice", "grammar", "json_object", "structural_tag"
MAX_BYTES = 1 << 18  # maximum size of a grammar; larger ones take more than a second to compile
MAX_DEPTH = 64  # maximum nesting of a schema; llguidance's JSON parser allows 127
# JSON on one line, as Python's json.dumps writes it. Models know this form, and fixed spaces let
# the grammar force whole keys and separators.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Linear in the text: a failed match ends before the next possible start.
START = re.compile(r"^[?!]?start\b[^:=\n]*:(?!:)", re.MULTILINE)
WITHOUT_EFFECT = re.compile(r"[\w-][ \t]*\[[^][]*\b(max_tokens|stop|temperature)\s*=")
ESCAPED = re.compile(r"\\?\n|\\.|/")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The required form of a text: exactly one of the first six fields, named as in vLLM.

    json                a JSON schema, as an object or as JSON text
    regex               a regex in llguidance's syntax that the whole text matches
    choice              1 to 4096 allowed texts
    grammar             a grammar in llguidance's dialect of Lark
    json_object         true: any JSON object
    structural_tag      text with structured parts, as an object or as JSON text
    strict              with json; true: all objects are closed, and an open object is an error
    whitespace_pattern  with json and json_object; a regex of the whitespace within JSON
    disable_any_whitespace  with json and json_object; true: no whitespace within JSON
    """

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Annotated[tuple[str, ...], Meta(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    strict: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    @property
    def kinds(self) -> list[str]:
        """The set fields among the first six."""
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        return [kind for kind in given if kind != "json_object" or self.json_object]

    @property
    def field(self) -> str:
        """The path of the set field in a request body."""
        return f"{FIELD}.{self.kinds[0]}"

    @property
    def whitespace(self) -> str | None:
        return "" if self.disable_any_whitespace else self.whitespace_pattern


def grammar_of(asked: StructuredOutputsParams, field: str | None = None) -> str:
    """Write the grammar for llguidance. RequestError if the parameters are invalid.

    Errors name `field` if the caller sent the parameters in another field.
    """
    if len(asked.kinds) != 1:
        given = " and ".join(asked.kinds) or "none"
        raise RequestError(
            f"{FIELD}: exactly one of {', '.join(KINDS)} is required, not {given}", FIELD
        )
    check_options(asked, asked.kinds[0])
    path = field or asked.field
    try:
        return written(asked, asked.kinds[0])
    except GrammarError as e:
        raise RequestError(f"{path}: {e}", path) from e


def json_form(asked: StructuredOutputsParams) -> str:
    """Write the requested JSON as a part of a Lark rule."""
    schema = {"type": "object"} if asked.json is None else read_schema(asked.json)
    return json_part(schema, asked.whitespace, asked.strict)


def written(asked: StructuredOutputsParams, kind: str) -> str:
    value = getattr(asked, kind)
    match kind:
        case "json":
            return json_schema(read_schema(value), asked.whitespace, asked.strict)
        case "json_object":
            return json_schema({"type": "object"}, asked.whitespace)
        case "regex":  # it matches the whole text
            escaped = ESCAPED.sub(escape, without_look_around(checked(value)))
            return lark(f"start: /{escaped}/" if value else 'start: ""')
        case "choice":
            # A terminal, in capitals, is one automaton. A rule would track each text separately.
            return lark("start: ONE\nONE: " + " | ".join(json.dumps(text) for text in value))
        case "grammar":
            return lark(own_text(value))
        case _:
            return lark(structural_tag(value))


def read_schema(given: Any) -> Mapping[str, Any] | bool:
    schema = read_json(given) if isinstance(given, str) else given
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("a schema is a JSON object")
    return schema


def check_options(asked: StructuredOutputsParams, kind: str) -> None:
    """Check that all options have an effect; else RequestError."""
    if asked.strict and kind != "json":
        name, why = "strict", f"it applies only to json, not to {kind}. Omit it."
    elif asked.disable_any_whitespace and asked.whitespace_pattern is not None:
        name = "whitespace_pattern"
        why = "it conflicts with disable_any_whitespace. Send only one of the two."
    elif kind in ("json", "json_object"):
        return
    else:
        name = "disable_any_whitespace" if asked.disable_any_whitespace else "whitespace_pattern"
        why = f"it applies only to json and json_object, not to {kind}. Omit it."
    if getattr(asked, name):
        raise RequestError(f"{FIELD}.{name}: {why}", f"{FIELD}.{name}")


def lark(text: str) -> str:
    """Return the grammar of a Lark text, which begins at the rule `start`.

    `json_part` and `quoted` write parts of Lark texts. GrammarError if the text is too large.
    """
    return checked(json.dumps({"grammars": [{"lark_grammar": text}]}))


def json_schema(
    schema: Mapping[str, Any] | bool, whitespace: str | None = None, is_strict: bool = False
) -> str:
    """Return the grammar of JSON values that match a schema with closed objects (`schemas.py`).

    `whitespace` is a regex of the text allowed after `{`, `[`, `,` and `:`, and before `}` and `]`.
    It may match once per place. "" means no whitespace; None means one space after `,` and `:`.
    GrammarError for a schema that is not JSON, too deep, or, if `is_strict`, open.
    """
    return checked(
        f'{{"grammars": [{{"json_schema": {schema_json(schema, whitespace, is_strict)}}}]}}'
    )


def json_part(
    schema: Mapping[str, Any] | bool, whitespace: str | None = None, is_strict: bool = False
) -> str:
    """Same as `json_schema`, as a part of a Lark rule."""
    return f"%json {schema_json(schema, whitespace, is_strict)}"


def quoted(text: str) -> str:
    """Return a text as a part of a Lark rule; "" for an empty text."""
    return json.dumps(text) if text else ""


def escape(found: re.Match[str]) -> str:
    """Escape a slash or line break of a regex between slashes in Lark."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])


def schema_json(schema: Mapping[str, Any] | bool, whitespace: str | None, is_strict: bool) -> str:
    """Return the schema as JSON, with llguidance's options for whitespace."""
    if schema is False:
        raise GrammarError("the schema false allows no value")
    given = {} if schema is True else schema
    if "x-guidance" in given:
        raise GrammarError("x-guidance is reserved. Omit it.")
    check_depth(given)
    checked(as_json(given))
    form: dict[str, Any] = {"whitespace_pattern": whitespace}
    if not whitespace:
        form = ONE_LINE if whitespace is None else {"whitespace_flexible": False}
    return as_json({**simplified(given, is_strict), "x-guidance": form})


def as_json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as e:
        raise GrammarError(f"it is not JSON: {e!s:.200}") from e


def check_depth(value: Any) -> None:
    """Check the nesting of objects and lists; GrammarError if it exceeds MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [v for v in level if isinstance(v, Mapping | list | tuple)]
        if not containers:
            return
        level = [v for c in containers for v in (c.values() if isinstance(c, Mapping) else c)]
    if any(isinstance(v, Mapping | list | tuple) for v in level):
        raise GrammarError(f"nested more than {MAX_DEPTH} deep. Use fewer levels, or $ref.")


def read_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as e:
        raise GrammarError(f"it is not valid JSON: {e!s:.200}") from e
    except RecursionError as e:
        raise GrammarError("it is nested too deeply") from e


def checked(grammar: str) -> str:
    if len(grammar) > MAX_BYTES:
        raise GrammarError(
            f"the grammar has {len(grammar)} bytes, but only {MAX_BYTES} are allowed. Send "
            "a smaller one."
        )
    return grammar


def own_text(lark: str) -> str:
    """Check a caller's Lark text. GrammarError for other notations and unsupported options."""
    checked(lark)
    if "::=" in lark and not START.search(lark):
        raise GrammarError('::= is GBNF or EBNF. Send Lark, for example start: "yes" | "no"')
    if option := WITHOUT_EFFECT.search(lark):
        raise GrammarError(f"the option {option[1]} is not supported. Omit it.")
    return lark


TagText = Annotated[str, Meta(min_length=1, max_length=1024)]


class BaseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(BaseFormat, frozen=True, tag="const_string"):
    value: TagText


class SchemaFormat(BaseFormat, frozen=True, tag="json_schema"):
    json_schema: dict[str, Any] | bool


class AnyText(BaseFormat, frozen=True, tag="any_text"):
    pass


class InOrder(BaseFormat, frozen=True, tag="sequence"):
    elements: Annotated[tuple["TagFormat", ...], Meta(min_length=1, max_length=256)]


class Tag(BaseFormat, frozen=True, tag="tag"):
    begin: TagText
    content: "TagFormat"
    end: Annotated[str, Meta(max_length=1024)]


Tags = Annotated[tuple[Tag, ...], Meta(min_length=1, max_length=256)]
Triggers = Annotated[tuple[TagText, ...], Meta(min_length=1, max_length=256)]


class TriggeredTags(BaseFormat, frozen=True, tag="triggered_tags"):
    """Free text in which every trigger begins one of the tags.

    at_least_one      the text begins with a tag
    stop_after_first  the text ends after the first tag
    """

    triggers: Triggers
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False


TagFormat = ConstString | SchemaFormat | AnyText | InOrder | Tag | TriggeredTags


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TagFormat
    type: Literal["structural_tag"] = "structural_tag"


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: TagText
    schema: dict[str, Any] | bool
    end: Annotated[str, Meta(max_length=1024)]


class Structures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The older format: free text in which every trigger begins one of the structures."""

    structures: Annotated[tuple[Structure, ...], Meta(min_length=1, max_length=256)]
    triggers: Triggers
    type: Literal["structural_tag"] = "structural_tag"

    @property
    def format(self) -> TagFormat:
        tags = (Tag(s.begin, SchemaFormat(s.schema), s.end) for s in self.structures)
        return TriggeredTags(self.triggers, tuple(tags))


def structural_tag(given: dict[str, Any] | str) -> str:
    """Write the Lark text. GrammarError if the tag is invalid, unsupported, too deep or large."""
    value = read_json(given) if isinstance(given, str) else given
    check_depth(value)
    is_older = isinstance(value, dict) and "structures" in value
    kind: type[Structures] | type[StructuralTag] = Structures if is_older else StructuralTag
    try:
        asked = msgspec.convert(value, kind)
    except ValueError as e:  # msgspec's ValidationError is one
        formats = sorted(kind.__struct_config__.tag for kind in get_args(TagFormat))
        raise GrammarError(f"{e!s:.300}. Formats are {', '.join(formats)}.") from e
    writer = LarkWriter()
    start = writer.part(asked.format, is_last=True)
    return "\n".join([f"start: {start}", "TEXT: /(.|\\n)*/", *writer.rules])


class LarkWriter:
    """Writes formats as parts of Lark rules. `rules` holds the additional rules."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self.size = 0

    def rule(self, body: str, option: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{option}: {body}")
        return self.counted(name)

    def quoted(self, text: str) -> str:
        return self.counted(quoted(text))

    def counted(self, text: str) -> str:
        """Return the text; GrammarError if the total size exceeds MAX_BYTES."""
        self.size += len(text)
        if self.size > MAX_BYTES:
            raise GrammarError(
                f"the grammar has more than the {MAX_BYTES} bytes that are allowed. Send a smaller "
                "one."
            )
        return text

    def part(self, format: TagFormat, is_last: bool) -> str:
        """Write a format. `is_last`: the text ends with it, so free text is allowed."""
        match format:
            case ConstString(value):
                return self.quoted(value)
            case SchemaFormat(schema):
                return self.rule(self.counted(json_part(schema)))
            case InOrder(elements):
                *others, last = elements
                parts = [*(self.part(e, False) for e in others), self.part(last, is_last)]
                return " ".join(parts)
            case Tag(begin, content, end):
                return f"{self.quoted(begin)} {self.content(content, end, is_last)}"
        if not is_last:
            name = format.__struct_config__.tag
            raise GrammarError(
                f"{name}: it may only end a text, or be the any_text content of a tag with an end"
            )
        return "TEXT" if isinstance(format, AnyText) else self.triggered(format)

    def content(self, content: TagFormat, end: str, is_last: bool) -> str:
        """Write the content of a tag, and its end."""
        if isinstance(content, AnyText) and end:
            return self.rule(f"TEXT {self.quoted(end)}", "[lazy]")
        return f"{self.part(content, is_last and not end)} {self.quoted(end)}"

    def triggered(self, asked: TriggeredTags) -> str:
        for tag in asked.tags:
            if not any(tag.begin.startswith(trigger) for trigger in asked.triggers):
                raise GrammarError(f"the tag {tag.begin!r:.100} begins with none of the triggers")
        for trigger in asked.triggers:
            if not any(tag.begin.startswith(trigger) for tag in asked.tags):
                raise GrammarError(f"no tag begins with the trigger {trigger!r:.100}")
        contents = [self.rule(self.content(t.content, t.end, is_last=False)) for t in asked.tags]
        tags = [*zip((tag.begin for tag in asked.tags), contents, strict=True)]
        first = self.one_of(tags) if asked.at_least_one else ""
        if first and asked.stop_after_first:
            return first
        later = self.rule(" | ".join(self.after_triggers(asked.triggers, tags)))
        return f"({later} | TEXT)" if asked.stop_after_first else f"{first} {later}* TEXT"

    def after_triggers(
        self, triggers: Sequence[str], tags: Sequence[tuple[str, str]]
    ) -> Iterator[str]:
        """Write free text that ends with a trigger, then the rest of one of its tags."""
        for trigger in triggers:
            rests = [(b.removeprefix(trigger), rule) for b, rule in tags if b.startswith(trigger)]
            begin = self.rule(f"TEXT {self.quoted(trigger)}", "[lazy]")
            yield f"{begin} {self.one_of(rests)}"

    def one_of(self, tags: Sequence[tuple[str, str]]) -> str:
        """Write a rule of alternatives: each tag's begin and the rule of its rest."""
        return self.rule(
            " | ".join(f"{self.quoted(begin)} {self.counted(rule)}" for begin, rule in tags)
        )
