"""Structural tags: text that is free but for parts, each of which has a beginning and a form."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.forms import MAX_BYTES, check_depth, json_part, quoted, read_json

Text = Annotated[str, Meta(min_length=1, max_length=1024)]
Schema = dict[str, Any] | bool
FREE = "TEXT: /(.|\\n)*/"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(Part, frozen=True, tag="const_string"):
    value: Text


class JsonSchema(Part, frozen=True, tag="json_schema"):
    json_schema: Schema


class AnyText(Part, frozen=True, tag="any_text"):
    pass


class InOrder(Part, frozen=True, tag="sequence"):
    elements: Annotated[tuple["Format", ...], Meta(min_length=1, max_length=256)]


class Tag(Part, frozen=True, tag="tag"):
    begin: Text
    content: "Format"
    end: Annotated[str, Meta(max_length=1024)]


Tags = Annotated[tuple[Tag, ...], Meta(min_length=1, max_length=256)]
Triggers = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=256)]


class TriggeredTags(Part, frozen=True, tag="triggered_tags"):
    """Free text, in which every trigger begins one of the tags.

    at_least_one      the text begins with a tag
    stop_after_first  and ends with the first one
    """

    triggers: Triggers
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JsonSchema | AnyText | InOrder | Tag | TriggeredTags


FORMATS = sorted(kind.__struct_config__.tag for kind in get_args(Format))


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: Text
    schema: Schema
    end: Annotated[str, Meta(max_length=1024)]


class Structures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The older form: free text, in which every trigger begins one of the structures."""

    structures: Annotated[tuple[Structure, ...], Meta(min_length=1, max_length=256)]
    triggers: Triggers
    type: Literal["structural_tag"] = "structural_tag"

    @property
    def format(self) -> Format:
        tags = (Tag(s.begin, JsonSchema(s.schema), s.end) for s in self.structures)
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
        raise GrammarError(f"{e!s:.300}; formats are {', '.join(FORMATS)}") from e
    writer = Writer()
    start = writer.part(asked.format, is_last=True)
    return "\n".join([f"start: {start}", FREE, *writer.rules])


class Writer:
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

    def part(self, format: Format, is_last: bool) -> str:
        """`is_last`: the text ends with it, so that it may be free."""
        match format:
            case ConstString(value):
                return self.quoted(value)
            case JsonSchema(schema):
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

    def content(self, content: Format, end: str, is_last: bool) -> str:
        """What is within a tag, and its end."""
        if isinstance(content, AnyText) and end:
            return self.rule(f"TEXT {self.quoted(end)}", "[lazy]")
        return f"{self.part(content, is_last and not end)} {self.quoted(end)}"

    def triggered(self, asked: TriggeredTags) -> str:
        check_triggers(asked)
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


def check_triggers(asked: TriggeredTags) -> None:
    """GrammarError for a tag without a trigger, or a trigger without a tag."""
    for tag in asked.tags:
        if not any(tag.begin.startswith(trigger) for trigger in asked.triggers):
            raise GrammarError(f"{tag.begin!r:.100} begins with none of the triggers")
    for trigger in asked.triggers:
        if not any(tag.begin.startswith(trigger) for tag in asked.tags):
            raise GrammarError(f"no tag begins with the trigger {trigger!r:.100}")
