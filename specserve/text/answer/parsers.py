"""Parsers of tool calls and reasoning in streamed text.

Parsers are generators that yield when they need more text. They never read text twice, so that the
total time is linear in the length of the text.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator
from contextlib import suppress

from specserve.text.answer.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    joined,
)

ParseSteps = Generator[None, None, None]
# Markers around tool calls and reasoning.
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ACTION, START_ACTION, END_ACTION = "Action:", "<|START_ACTION|>", "<|END_ACTION|>"
THINK, END_THINK = "<think>", "</think>"
NAME = re.compile(r"[\w.:/-]+")  # a function name or an id
SPACES = re.compile(r"[ \t\r\n]+")
# Relevant characters outside and inside a JSON string.
OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
SCALAR_END = re.compile(r"[,\]}\s]")
ARGUMENTS = ("arguments", "parameters")
# Keys of a call. Before a call is recognized, any other key means that the object is not a call.
CALL_KEYS = ("name", "id", "type", "tool_call_id", *ARGUMENTS)


class End(Exception):
    """The end of the text."""


class NoCall(Exception):
    """The text is not a call, although it looked like one."""


class TextParser:
    """An `AnswerParser`. Subclasses define `read`, which raises `End` at the end of the text."""

    def __init__(self) -> None:
        self.text, self.at, self.is_over = "", 0, False  # text[:at] is read
        self.events: list[Event] = []
        self.steps = self.read()

    def read(self) -> ParseSteps:
        raise NotImplementedError

    @property
    def num_reasoning(self) -> int:
        return 0

    def push(self, text: str) -> list[Event]:
        self.text, self.at = self.text[self.at :] + text, 0
        with suppress(End):
            next(self.steps, None)
        events, self.events = self.events, []
        return joined(events)

    def finish(self) -> list[Event]:
        self.is_over = True
        return self.push("")

    def take(self, size: int) -> str:
        piece = self.text[self.at : self.at + size]
        self.at += size
        return piece

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it."""
        while self.at == len(self.text):
            if self.is_over:
                raise End
            yield
        return self.text[self.at]

    def spaces(self) -> Generator[None, None, str]:
        """Read whitespace, and return it."""
        found = list[str]()
        while True:
            while self.at == len(self.text) and not self.is_over:
                yield
            match = SPACES.match(self.text, self.at)
            if match is None:
                return "".join(found)
            found.append(self.take(match.end() - self.at))

    def space(self) -> Generator[None, None, str]:
        """Read whitespace, and return the next character without reading it."""
        yield from self.spaces()
        return (yield from self.peek())

    def follows(self, literal: str) -> Generator[None, None, bool]:
        """Read the literal if the text continues with it; return whether it does."""
        while not self.is_over and 0 <= len(self.text) - self.at < len(literal):
            if not literal.startswith(self.text[self.at :]):
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.take(len(literal))
        return True

    def until(
        self, marker: str, as_event: Callable[[str], Event] = Content
    ) -> Generator[None, None, str]:
        """Read text up to and including a marker, and emit events of the text.

        Return the marker with the whitespace before it. They produce no events.
        """
        spaces = list[str]()
        while True:
            found = self.text.find(marker, self.at)
            piece = self.take((self.sure_end(marker) if found < 0 else found) - self.at)
            bare = piece.rstrip(" \t\r\n")
            if bare:
                self.events.append(as_event("".join([*spaces, bare])))
                spaces.clear()
            spaces.append(piece[len(bare) :])
            if found >= 0:
                return "".join(spaces) + self.take(len(marker))
            if self.is_over:
                self.events.append(as_event("".join(spaces)))
                raise End
            yield

    def sure_end(self, marker: str) -> int:
        """Return the end of the text without a suffix that may begin the marker."""
        if self.is_over:
            return len(self.text)
        for size in range(min(len(marker) - 1, len(self.text) - self.at), 0, -1):
            if marker.startswith(self.text[-size:]):
                return len(self.text) - size
        return len(self.text)


class CallParser(TextParser):
    """A parser of a model's tool calls.

    `kept` stores text that may begin a call until the call is recognized. The stored text becomes
    content if it is not a call, or if the text ends first.
    """

    name_key = "name"  # key of the function's name in a call's JSON

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] | None = None
        self.num_calls = 0

    def read(self) -> ParseSteps:
        try:
            while True:
                try:
                    yield from self.read_part()
                except NoCall:
                    self.give_back()
        except End:
            self.give_back()
            raise

    def read_part(self) -> ParseSteps:
        """Read content and calls. NoCall if text that looks like a call is none."""
        raise NotImplementedError

    def take(self, size: int) -> str:
        piece = super().take(size)
        if self.kept is not None:
            self.kept.append(piece)
        return piece

    def give_back(self) -> None:
        if self.kept is not None:
            self.events.append(Content("".join(self.kept)))
            self.kept = None

    def begin(self, name: str, id: str | None = None) -> None:
        self.kept = None
        id = self.new_id() if id is None else id
        self.events.append(CallBegin(self.num_calls, id, name))
        self.num_calls += 1

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def argue(self, text: str) -> None:
        self.events.append(CallArguments(self.num_calls - 1, text))

    @property
    def is_begun(self) -> bool:
        return self.kept is None

    def call(self, names: Collection[str] | None = None) -> ParseSteps:
        """Read a call: a JSON object with a name and arguments. `names`, if given, limits the name.

        Arguments after the name are streamed.
        """
        name = arguments = None
        yield from self.expect("{")
        while (yield from self.space()) != "}":
            key = yield from self.string()
            yield from self.expect(":")
            yield from self.space()
            if key == self.name_key and name is None:
                name = yield from self.string()
                if not is_name(name) or (names is not None and name not in names):
                    raise NoCall
            elif key in ARGUMENTS and not self.is_begun and arguments is None:
                if name is not None and self.text[self.at] == "{":
                    self.begin(name)
                    yield from self.value(self.argue)
                else:
                    arguments = yield from self.held_value()
            elif self.is_begun or key in CALL_KEYS:
                yield from self.value(ignored)
            else:
                raise NoCall
            if (yield from self.space()) not in ",}":
                raise NoCall
            if self.text[self.at] == ",":
                self.take(1)
        if name is None and not self.is_begun:
            raise NoCall
        given = "{}" if arguments is None else object_in(arguments)
        self.take(1)
        if name is not None and not self.is_begun:
            self.begin(name)
            self.argue(given)

    def list_of_calls(self) -> ParseSteps:
        separator = "["
        while separator != "]":
            self.take(1)
            yield from self.call()
            separator = yield from self.space()
            if separator not in ",]":
                raise NoCall
            self.kept = [] if separator == "," else None
        self.take(1)

    def expect(self, character: str) -> ParseSteps:
        if (yield from self.space()) != character:
            raise NoCall
        self.take(1)

    def string(self) -> Generator[None, None, str]:
        if (yield from self.space()) != '"':
            raise NoCall
        try:
            text: str = json.loads((yield from self.held_value()))
        except ValueError:
            raise NoCall from None
        return text

    def held_value(self) -> Generator[None, None, str]:
        pieces = list[str]()
        yield from self.value(pieces.append)
        return "".join(pieces)

    def value(self, sink: Callable[[str], None]) -> ParseSteps:
        """Pass a JSON value's text to `sink`. Its brackets and strings decide where it ends."""
        if (yield from self.peek()) not in '{["':
            yield from self.scalar(sink)
            return
        depth, is_inside, is_escaped = 0, False, False
        while True:
            yield from self.peek()
            end = self.at
            while end < len(self.text):
                if is_escaped:
                    end, is_escaped = end + 1, False
                    continue
                stop = (INSIDE if is_inside else OUTSIDE).search(self.text, end)
                end = len(self.text) if stop is None else stop.end()
                if stop is None:
                    break
                match stop[0]:
                    case '"':
                        is_inside = not is_inside
                    case "\\":
                        is_escaped = True
                    case "{" | "[":
                        depth += 1
                    case _:
                        depth -= 1
                if depth <= 0 and not is_inside:
                    sink(self.take(end - self.at))
                    return
            sink(self.take(end - self.at))

    def scalar(self, sink: Callable[[str], None]) -> ParseSteps:
        while True:
            yield from self.peek()
            stop = SCALAR_END.search(self.text, self.at)
            sink(self.take((len(self.text) if stop is None else stop.start()) - self.at))
            if stop is not None:
                return


def ignored(text: str) -> None:
    pass


def is_name(name: str) -> bool:
    """Whether a text can be sent to clients as a function's name. The function need not exist."""
    return bool(name) and len(name) <= 256 and name.isprintable()


def object_in(value: str) -> str:
    """Return the JSON object of a call's arguments as text; NoCall if there is none.

    Accepted are an object, an object in a string, and null, which means an empty object.
    """
    if value.startswith('"'):
        try:
            value = json.loads(value).strip()
            value.encode()
        except ValueError:
            raise NoCall from None
    if value in ("null", ""):
        return "{}"
    if not value.startswith("{"):
        raise NoCall
    return value


class HermesParser(CallParser):
    """Parses calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    def read_part(self) -> ParseSteps:
        self.kept = [(yield from self.until(CALL_BEGIN))]
        yield from self.call()
        yield from self.space()
        yield from self.follows(CALL_END)  # optional, because models may omit it
        yield from self.space()


class Llama3Parser(CallParser):
    """Parses calls of Llama 3: {"name": ..., "parameters": {...}}, separated by semicolons.

    Calls are the whole response, or follow <|python_tag|>.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the only functions that are recognized without the tag."""
        super().__init__()
        self.names = names
        self.is_at_start = True

    def read_part(self) -> ParseSteps:
        if self.is_at_start:
            self.is_at_start, self.kept = False, []
            if (yield from self.space()) == "{":
                yield from self.calls(self.names)
            elif not (yield from self.follows(PYTHON_TAG)):
                self.give_back()
            else:
                yield from self.calls(None)
        self.kept = [(yield from self.until(PYTHON_TAG))]
        yield from self.calls(None)

    def calls(self, names: Collection[str] | None) -> ParseSteps:
        yield from self.call(names)
        while (yield from self.space()) == ";":
            self.kept = []
            self.take(1)
            yield from self.call(names)


class MistralParser(CallParser):
    """Parses calls of Mistral.

    Older models write [TOOL_CALLS][{"name": ..., "arguments": {...}}]. Newer models write
    [TOOL_CALLS]name[ARGS]{...}, optionally with [CALL_ID]id before [ARGS].
    """

    def read_part(self) -> ParseSteps:
        self.kept = [(yield from self.until(TOOL_CALLS))]
        match (yield from self.space()):
            case "[":
                yield from self.list_of_calls()
            case "{":
                yield from self.call()
            case _:
                yield from self.named_call()
        yield from self.space()

    def named_call(self) -> ParseSteps:
        name, id = (yield from self.word()), None
        if (yield from self.follows(CALL_ID)):
            id = yield from self.word()
        yield from self.follows(ARGS)
        if not name or (yield from self.space()) != "{":
            raise NoCall
        self.begin(name, id)
        yield from self.value(self.argue)

    def word(self) -> Generator[None, None, str]:
        pieces = list[str]()
        while True:
            yield from self.peek()
            found = NAME.match(self.text, self.at)
            if found is None:
                return "".join(pieces)
            pieces.append(self.take(found.end() - self.at))

    def new_id(self) -> str:
        """Return an id of the only form that Mistral's chat templates accept."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class CommandRParser(CallParser):
    """Parses calls of Command R: [{"tool_name": ..., "parameters": {...}}]

    The list follows `Action:`, or <|START_ACTION|> in newer models.
    """

    name_key = "tool_name"

    def __init__(self, has_tokens: bool) -> None:
        """`has_tokens`: calls are between the two special tokens."""
        super().__init__()
        self.marker, self.end = (START_ACTION, END_ACTION) if has_tokens else (ACTION, "```")
        self.is_call = True

    def read_part(self) -> ParseSteps:
        self.kept = [(yield from self.until(self.marker))]
        yield from self.space()
        if self.marker == ACTION and not (yield from self.follows("```json")):
            raise NoCall
        if (yield from self.space()) != "[":
            raise NoCall
        yield from self.list_of_calls()
        yield from self.space()
        yield from self.follows(self.end)
        yield from self.space()

    def begin(self, name: str, id: str | None = None) -> None:
        self.is_call = name not in ("directly_answer", "directly-answer")  # the templates add these
        if self.is_call:
            super().begin(name, id)
        else:
            self.kept = None

    def argue(self, text: str) -> None:
        if self.is_call:
            super().argue(text)


class ThinkParser(TextParser):
    """Separates the reasoning at the beginning of a response. Another parser reads the rest."""

    def __init__(
        self, rest: AnswerParser, is_inside: bool, markers: tuple[str, str] = (THINK, END_THINK)
    ) -> None:
        """`is_inside`: the prompt ends with the first of the markers around reasoning."""
        super().__init__()
        self.begin, self.end = markers
        self.rest, self.is_inside = rest, is_inside
        self.has_reasoned, self.closed_at = is_inside, -1
        self.num_pushed = 0

    @property
    def num_reasoning(self) -> int:
        if not self.has_reasoned:
            return 0
        return self.closed_at if self.closed_at >= 0 else self.num_pushed

    def push(self, text: str) -> list[Event]:
        self.num_pushed += len(text)
        return super().push(text)

    def read(self) -> ParseSteps:
        spaces = "" if self.is_inside else (yield from self.spaces())
        if self.is_inside or (yield from self.follows(self.begin)):
            self.has_reasoned = True
            yield from self.spaces()
            yield from self.until(self.end, as_event=Reasoning)
            self.closed_at = self.num_pushed - (len(self.text) - self.at)
            yield from self.spaces()
        else:
            self.events += self.rest.push(spaces)
        while True:
            self.events += self.rest.push(self.take(len(self.text) - self.at))
            if self.is_over:
                self.events += self.rest.finish()
                raise End
            yield
