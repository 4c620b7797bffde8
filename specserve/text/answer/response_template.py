"""A tokenizer's response template, as defined by transformers: delimiters of a message's fields.

Texts are streamed. A tool call is emitted at its end, because a template may rewrite it. See
https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import regex  # unlike re, it finds partial matches

from specserve.text.answer.events import Content, Event, Reasoning
from specserve.text.answer.parsers import CallParser, End, NoCall, ParseSteps, ignored, is_name
from specserve.text.answer.pythonic import as_pythonic

FIELD_KINDS = {  # message field -> kind
    "content": "content",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "thinking": "reasoning",
    "tool_calls": "tool_calls",
}
SLICE = 4096  # characters that are searched at once, so that time is linear
MAX_HELD = 4096  # maximum characters of a possible delimiter
SPACE = " \t\r\n"
SECONDS = 0.1  # maximum time of a template's expression on a call
# A JSON string, complete or not, or a key without quotes.
UNQUOTED = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|(?<=[{,])(\s*)([A-Za-z_][\w.-]*)(?=\s*:)', re.S)
TYPES: dict[str, Any] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
}


class TemplateError(ValueError):
    """A response template cannot be used. The message states the reason."""


class Delimiter(NamedTuple):
    field: str
    pattern: Any
    is_literal: bool  # and not a prefix of the field's other literals, so a match cannot grow


class TemplateField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of a message. Its delimiters are literals or regular expressions."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False

    @property
    def has_bare_arguments(self) -> bool:
        """Whether the content is a call's arguments as JSON, so that they can be streamed."""
        is_json = self.content == "json" and not self.content_args and not self.transform_each
        function = self.transform.get("function") if isinstance(self.transform, dict) else None
        return is_json and function == {"name": "{name}", "arguments": "{content}"}


class ResponseTemplate(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    fields: dict[str, TemplateField]
    version: Literal[1] = 1
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None

    @cached_property
    def opening(self) -> dict[str, Delimiter]:
        found = {name: delimiter(name, f.open, f.open_pattern) for name, f in self.fields.items()}
        return {name: one for name, one in found.items() if one is not None}

    @cached_property
    def closing(self) -> dict[str, Delimiter]:
        found = {name: delimiter(name, f.close, f.close_pattern) for name, f in self.fields.items()}
        return {name: one for name, one in found.items() if one is not None}

    @cached_property
    def default_field(self) -> str | None:
        """The field of text outside delimiters."""
        return next((name for name in self.fields if name not in self.opening), None)

    @cached_property
    def anchor(self) -> Delimiter | None:
        return delimiter("", self.start_anchor, self.start_anchor_pattern)

    def of_kinds(self, kinds: Collection[str]) -> "ResponseTemplate":
        """Keep only content and fields of these kinds. The text of other fields becomes content."""
        fields = {n: f for n, f in self.fields.items() if FIELD_KINDS[n] in ("content", *kinds)}
        return (
            self
            if len(fields) == len(self.fields)
            else msgspec.structs.replace(self, fields=fields)
        )

    def prefilled(self, prompt: str) -> str:
        """Return the part of a response that the prompt already contains."""
        assert self.anchor is not None, "checked by read_template"
        ends = [match.end() for match in self.anchor.pattern.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""


def delimiter(
    field: str, literals: str | list[str] | None, pattern: str | None
) -> Delimiter | None:
    """Compile a delimiter; None if there is none. TemplateError if it is invalid."""
    if not literals and not pattern:
        return None
    given = sorted([literals] if isinstance(literals, str) else literals or (), key=len)
    has_longer = any(b.startswith(a) for i, a in enumerate(given) for b in given[i + 1 :])
    written = pattern or "|".join(map(regex.escape, reversed(given)))
    try:
        compiled = regex.compile(written, regex.DOTALL)
    except regex.error as e:
        raise TemplateError(f"the expression {pattern!r:.100} is invalid: {e}") from e
    return Delimiter(field, compiled, bool(given) and not has_longer)


def read_template(written: Any) -> ResponseTemplate:
    """Read and check a template. TemplateError if it is invalid or not supported."""
    try:
        template = msgspec.convert(written, ResponseTemplate)
    except msgspec.ValidationError as e:
        raise TemplateError(str(e)) from e
    for name, field in template.fields.items():
        if name not in FIELD_KINDS:
            raise TemplateError(f"the message field {name!r:.50} is not supported")
        if field.content not in PARSERS:
            raise TemplateError(f"field {name}: content {field.content!r:.50} is unknown")
        if FIELD_KINDS[name] != "tool_calls" and field.content != "text":
            raise TemplateError(
                f"field {name}: its content can only be text, not {field.content!r:.50}"
            )
    if len(template.fields) - len(template.opening) > 1:
        raise TemplateError("two fields have no opening delimiter")
    if FIELD_KINDS.get(template.default_field or "") == "tool_calls":
        raise TemplateError("tool_calls has no opening delimiter")
    if template.anchor is None:
        raise TemplateError("it has neither start_anchor nor start_anchor_pattern")
    return template


class TemplateParser(CallParser):
    def __init__(
        self,
        template: ResponseTemplate,
        prefilled: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Parse `prefilled` first, the part of the response that the prompt already contains.

        The schemas of `tools`, as in a request, give the types of arguments that the model writes
        without a type.
        """
        super().__init__()
        self.template = template
        self.schemas = {
            tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties")
            for tool in tools
        }
        self.begun_fields = set[str]()  # fields with text so far
        self.is_reasoning, self.num_read, self.reasoned_to = False, 0, 0
        super().push(prefilled)
        self.num_calls = self.num_read = self.reasoned_to = 0  # the response begins here

    @property
    def num_reasoning(self) -> int:
        return self.num_read if self.is_reasoning else self.reasoned_to

    def push(self, text: str) -> list[Event]:
        events = list[Event]()
        for start in range(0, max(1, len(text)), SLICE):
            events += super().push(text[start : start + SLICE])
        return events

    def take(self, size: int) -> str:
        self.num_read += size
        return super().take(size)

    def read_part(self) -> ParseSteps:
        """Read text outside fields or of the default field, then another field."""
        template, default = self.template, self.template.default_field
        closing = [template.closing[default]] if default in template.closing else []
        found = yield from self.field_until(default, [*template.opening.values(), *closing])
        name, opening = found
        if name == default:
            return
        closing = [template.closing[name]] if name in template.closing else []
        if FIELD_KINDS[name] == "tool_calls" and template.fields[name].has_bare_arguments:
            yield from self.streamed_call(opening, closing)
        elif FIELD_KINDS[name] == "tool_calls":
            yield from self.tool_calls(name, opening, closing)
        else:
            yield from self.field_until(name, closing)

    def field_until(
        self, name: str | None, delimiters: list[Delimiter]
    ) -> Generator[None, None, tuple[str, Any]]:
        """Read a field's text up to a delimiter, and return the delimiter. Drop text outside
        fields.
        """
        sink = ignored if name is None else self.sink(name)
        self.is_reasoning = name is not None and FIELD_KINDS[name] == "reasoning"
        found = yield from self.up_to(delimiters, sink)
        if self.is_reasoning:
            self.is_reasoning, self.reasoned_to = False, self.num_read
        if found is None:
            raise End
        return found

    def sink(self, name: str) -> Callable[[str], None]:
        """Return a function that emits events of a field's text without surrounding whitespace."""
        field, kind = self.template.fields[name], FIELD_KINDS[name]
        strips, spaces, has_begun = field.content_args.get("strip", True), list[str](), False

        def sink(piece: str) -> None:
            nonlocal has_begun
            bare = piece.rstrip(SPACE) if strips else piece
            if bare and not has_begun:
                bare = bare.lstrip(SPACE) if strips else bare
                spaces[:] = [field.join or ""] if name in self.begun_fields else []
                self.begun_fields.add(name)
                has_begun = True
                text = "".join([*spaces, bare])
            elif bare:
                text = "".join([*spaces, bare])
            else:
                spaces.append(piece)
                return
            self.events.append(Reasoning(text) if kind == "reasoning" else Content(text))
            spaces[:] = [piece[len(piece.rstrip(SPACE)) :]] if strips else []

        return sink

    def streamed_call(self, opening: Any, delimiters: list[Delimiter]) -> ParseSteps:
        """Read a call whose content is its arguments. NoCall if they are no object."""
        self.kept = [opening[0]]
        captures = opening.groupdict()
        if not is_name(captures["name"]) or (yield from self.space()) != "{":
            raise NoCall
        self.begin(captures["name"], captures.get("id"))
        yield from self.value(self.argue)
        if (yield from self.up_to(delimiters, ignored)) is None:
            raise End

    def tool_calls(self, name: str, opening: Any, delimiters: list[Delimiter]) -> ParseSteps:
        body = list[str]()
        end = yield from self.up_to(delimiters, body.append)
        try:
            if end is None and delimiters:  # max_tokens cut it, so that arguments may lack
                raise NoCall
            field = self.template.fields[name]
            for called, arguments in [*self.calls(field, "".join(body), opening.groupdict())]:
                self.begin(called)
                self.argue(arguments)
        except (ValueError, KeyError, TypeError, RecursionError, TimeoutError, NoCall):
            written = opening[0], *body, "" if end is None else end[1][0]
            self.events.append(Content("".join(written)))
        if end is None:
            raise End

    def up_to(
        self, delimiters: list[Delimiter], sink: Callable[[str], None]
    ) -> Generator[None, None, tuple[str, Any] | None]:
        """Pass text to `sink` up to the first delimiter; read and return the delimiter.

        Return None if the text ends first.
        """
        while True:
            found, end = self.first(delimiters)
            sink(self.take(end - self.at))
            if found is not None:
                self.take(len(found[1][0]))
                return found
            if self.is_over:
                return None
            yield

    def first(self, delimiters: list[Delimiter]) -> tuple[tuple[str, Any] | None, int]:
        """Return the first delimiter and its begin; without one, None and where one may begin."""
        end, matches = len(self.text), []
        for name, pattern, is_literal in delimiters:
            match = pattern.search(self.text, self.at, partial=not self.is_over)
            if match is None or match.start() == match.end():
                continue
            is_at_end = not self.is_over and match.end() == len(self.text)
            if match.partial or (is_at_end and not is_literal):
                if match.end() - match.start() <= MAX_HELD:
                    end = min(end, match.start())
            else:
                matches.append((match.start(), -match.end(), name, match))
        if matches:
            start, _, name, match = min(matches, key=lambda found: found[:3])
            if start < end:
                return (name, match), start
        return None, end

    def calls(
        self, field: TemplateField, body: str, captures: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield the names and arguments of the calls in a field's text. Raise an error if it has
        none.
        """
        value = parsed(body, field.content, field.content_args)
        if field.transform_each:
            value = [transformed(field.transform, {**captures, **item}) for item in value]
        elif field.transform is not None:
            value = transformed(field.transform, {**captures, "content": value})
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call)
            name, arguments = function["name"], function.get("arguments", {})
            if not is_name(name) or not isinstance(arguments, dict):
                raise NoCall
            known = self.schemas.get(name)
            known = known if isinstance(known, dict) else {}
            typed = {key: of_type(item, known.get(key)) for key, item in arguments.items()}
            yield name, json.dumps(typed, ensure_ascii=False)


def parsed(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    """Parse a text as a value of this kind; ValueError if it is not one."""
    return PARSERS[kind](text, args)


def as_text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def as_json(text: str, args: Mapping[str, Any]) -> Any:
    """Parse JSON, or a dialect with other string delimiters or unquoted keys."""
    written = with_json_strings(text, dict(args.get("string_delims", ())))
    if args.get("unquoted_keys"):
        written = UNQUOTED.sub(lambda m: m[0] if m[2] is None else f'{m[1]}"{m[2]}"', written)
    try:
        return msgspec.json.decode(written.strip())
    except msgspec.DecodeError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def with_json_strings(text: str, delimiters: Mapping[str, str]) -> str:
    """Convert strings in other delimiters to JSON strings."""
    if not delimiters:
        return text
    opening, pieces, at = re.compile("|".join(map(re.escape, delimiters))), list[str](), 0
    while (found := opening.search(text, at)) is not None:
        end = text.index(delimiters[found[0]], found.end())
        pieces += text[at : found.start()], json.dumps(text[found.end() : end])
        at = end + len(delimiters[found[0]])
    return "".join([*pieces, text[at:]])


def as_xml(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Parse tags with an expression that has the groups key and value."""
    found = dict[str, Any]()
    for match in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=SECONDS):
        groups = match.groupdict()
        key, value = groups["key"], inner(groups.get("value") or "", args)
        if key in found and args.get("merge_duplicates"):
            before = found[key]
            value = [*before, value] if isinstance(before, list) else [before, value]
        found[key] = value
    return found


def as_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a key and a value per line."""
    found = dict[str, Any]()
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = as_text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            found[as_text(key, args)] = inner(as_text(value, args), args)
    return found


def inner(text: str, args: Mapping[str, Any]) -> Any:
    its = args.get("value_parser")
    return text if its is None else parsed(text, its.get("name", "text"), its.get("args", {}))


PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "bool": lambda text, args: as_text(text, args).lower() in ("true", "1"),
    "float": lambda text, args: float(text),
    "int": lambda text, args: int(text),
    "json": as_json,
    "kv-lines": as_lines,
    "pythonic": as_pythonic,
    "text": as_text,
    "xml-inline": as_xml,
}


def transformed(form: Any, values: Mapping[str, Any]) -> Any:
    """Replace each string {name} or {name.key} in a form by its value.

    KeyError or TypeError if there is no such value.
    """
    if isinstance(form, dict):
        return {key: transformed(item, values) for key, item in form.items()}
    if isinstance(form, list):
        return [transformed(item, values) for item in form]
    named = re.fullmatch(r"\{(\w+(?:\.\w+)*)\}", form) if isinstance(form, str) else None
    if named is None:
        return form
    value: Any = values
    for key in named[1].split("."):
        value = value[key]
    return value


def of_type(value: Any, schema: Any) -> Any:
    """Convert an untyped value to its schema's type, or return it unchanged if it does not fit."""
    if not isinstance(value, str):
        return value
    for name in types_in(schema):
        given = value.strip()
        given = {"True": "true", "False": "false", "None": "null"}.get(given, given)
        try:
            read = msgspec.json.decode(given)
        except (ValueError, RecursionError):
            continue
        is_number = name in ("integer", "number")
        if isinstance(read, TYPES.get(name, ())) and not (is_number and isinstance(read, bool)):
            return read
    return value


def types_in(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    own = schema.get("type", [])
    types = [own] if isinstance(own, str) else [*own] if isinstance(own, list) else []
    for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types += types_in(each)
    return [*types, *(["null"] if schema.get("nullable") else [])]
