"""Structured output as a caller asks for it, and the grammar that it means.

Grammars are as llguidance reads them. Lark here is its dialect:
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
MAX_BYTES = 1 << 18  # of a grammar; larger ones take more than a second to compile
MAX_DEPTH = 64  # of objects and lists in a schema; llguidance's reader of JSON ends at 127
# JSON on one line, as Python's json.dumps writes it: models have learnt it, and as there is no
# choice of spaces, a grammar forces whole keys and what is between them.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Linear in the text: a try at one place ends before the next place where a match may begin.
START = re.compile(r"^[?!]?start\b[^:=\n]*:(?!:)", re.MULTILINE)
WITHOUT_EFFECT = re.compile(r"[\w-][ \t]*\[[^][]*\b(max_tokens|stop|temperature)\s*=")
ESCAPED = re.compile(r"\\?\n|\\.|/")


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
    choice: Annotated[tuple[str, ...], Meta(min_length=1, max_length=4096)] | None = None
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
            # A terminal, in capitals, is one automaton. A rule would follow each text by itself.
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


def lark(text: str) -> str:
    """The grammar of a Lark text, which begins at the rule `start`.

    `json_part` and `quoted` write parts of it. GrammarError for a text that is too large.
    """
    return checked(json.dumps({"grammars": [{"lark_grammar": text}]}))


def json_schema(
    schema: Mapping[str, Any] | bool, whitespace: str | None = None, is_strict: bool = False
) -> str:
    """The grammar of JSON values that obey a schema, whose objects are closed (`schemas.py`).

    `whitespace` is a regex of what may stand behind `{`, `[`, `,` and `:`, and before `}` and `]`,
    once in each place; "" is none, and None a space behind `,` and `:`. GrammarError for a schema
    that is no JSON, too deep, or, if `is_strict`, open.
    """
    return checked(
        f'{{"grammars": [{{"json_schema": {schema_json(schema, whitespace, is_strict)}}}]}}'
    )


def json_part(
    schema: Mapping[str, Any] | bool, whitespace: str | None = None, is_strict: bool = False
) -> str:
    """The same as a part of a Lark rule."""
    return f"%json {schema_json(schema, whitespace, is_strict)}"


def quoted(text: str) -> str:
    """A Lark rule's part that is this text; nothing where the text is empty."""
    return json.dumps(text) if text else ""


def escape(found: re.Match[str]) -> str:
    """A slash or line break of a regex, as Lark can have it between slashes."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])


def schema_json(schema: Mapping[str, Any] | bool, whitespace: str | None, is_strict: bool) -> str:
    """The schema's JSON, with what llguidance has to know of the text's form."""
    if schema is False:
        raise GrammarError("false allows no value")
    given = {} if schema is True else schema
    if "x-guidance" in given:
        raise GrammarError("x-guidance is not for callers: leave it out")
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
        raise GrammarError(f"no JSON: {e!s:.200}") from e


def check_depth(value: Any) -> None:
    """GrammarError for objects and lists that are nested too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [v for v in level if isinstance(v, Mapping | list | tuple)]
        if not containers:
            return
        level = [v for c in containers for v in (c.values() if isinstance(c, Mapping) else c)]
    if any(isinstance(v, Mapping | list | tuple) for v in level):
        raise GrammarError(f"nested more than {MAX_DEPTH} deep: use fewer levels, or $ref")


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
    """Free text, in which every trigger begins one of the tags.

    at_least_one      the text begins with a tag
    stop_after_first  and ends with the first one
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
    """The older form: free text, in which every trigger begins one of the structures."""

    structures: Annotated[tuple[Structure, ...], Meta(min_length=1, max_length=256)]
    triggers: Triggers
    type: Literal["structural_tag"] = "structural_tag"

    @property
    def format(self) -> TagFormat:
        tags = (Tag(s.begin, SchemaFormat(s.schema), s.end) for s in self.structures)
        return TriggeredTags(self.triggers, tuple(tags))


def structural_tag(given: dict[str, Any] | str) -> str:
    """The Lark text; GrammarError for what is wrong, not supported, too deep or too large."""
    value = read_json(given) if isinstance(given, str) else given
    check_depth(value)
    is_older = isinstance(value, dict) and "structures" in value
    kind: type[Structures] | type[StructuralTag] = Structures if is_older else StructuralTag
    try:
        asked = msgspec.convert(value, kind)
    except ValueError as e:  # msgspec's ValidationError is one
        formats = sorted(kind.__struct_config__.tag for kind in get_args(TagFormat))
        raise GrammarError(f"{e!s:.300}; formats are {', '.join(formats)}") from e
    writer = LarkWriter()
    start = writer.part(asked.format, is_last=True)
    return "\n".join([f"start: {start}", "TEXT: /(.|\\n)*/", *writer.rules])


class LarkWriter:
    """Writes formats as parts of Lark rules; what needs a rule of its own is in `rules`."""

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
        """The text; GrammarError where all of them are larger than a grammar may be."""
        self.size += len(text)
        if self.size > MAX_BYTES:
            raise GrammarError(
                f"more bytes as a grammar than the {MAX_BYTES} that are allowed: send a smaller one"
            )
        return text

    def part(self, format: TagFormat, is_last: bool) -> str:
        """`is_last`: the text ends with it, so that it may be free."""
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
            raise GrammarError(f"{name}: it may only end a text, or be any_text of a tag with end")
        return "TEXT" if isinstance(format, AnyText) else self.triggered(format)

    def content(self, content: TagFormat, end: str, is_last: bool) -> str:
        """What is within a tag, and its end."""
        if isinstance(content, AnyText) and end:
            return self.rule(f"TEXT {self.quoted(end)}", "[lazy]")
        return f"{self.part(content, is_last and not end)} {self.quoted(end)}"

    def triggered(self, asked: TriggeredTags) -> str:
        for tag in asked.tags:
            if not any(tag.begin.startswith(trigger) for trigger in asked.triggers):
                raise GrammarError(f"{tag.begin!r:.100} begins with none of the triggers")
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
        """Free text that ends with a trigger, and the rest of one of its tags."""
        for trigger in triggers:
            rests = [(b.removeprefix(trigger), rule) for b, rule in tags if b.startswith(trigger)]
            begin = self.rule(f"TEXT {self.quoted(trigger)}", "[lazy]")
            yield f"{begin} {self.one_of(rests)}"

    def one_of(self, tags: Sequence[tuple[str, str]]) -> str:
        """A rule of tags: what each begins with, and the rule of the rest of it."""
        return self.rule(
            " | ".join(f"{self.quoted(begin)} {self.counted(rule)}" for begin, rule in tags)
        )
