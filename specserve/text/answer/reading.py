"""Reading text that comes in pieces: parsers are generators that yield where they need more of it.

What was read is never read again, so that time grows with the text's length and no faster.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Generator
from contextlib import suppress

from specserve.text.answer.events import CallArguments, CallBegin, Content, Event, joined

Steps = Generator[None, None, None]
SPACES = re.compile(r"[ \t\r\n]+")
OUTSIDE, INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')  # of a string: what matters there
SCALAR_END = re.compile(r"[,\]}\s]")
# The keys of a call: a JSON object that has another one before it is known to be a call is none.
ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "id", "type", "tool_call_id", *ARGUMENTS)


class End(Exception):
    """The text has ended."""


class NoCall(Exception):
    """What looked like a call is none."""


class TextParser:
    """An `AnswerParser`; subclasses define `read`, which ends by `End` where the text does."""

    def __init__(self) -> None:
        self.text, self.at, self.is_over = "", 0, False  # text[:at] has been read
        self.events: list[Event] = []
        self.steps = self.read()

    def read(self) -> Steps:
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
        """The next character."""
        while self.at == len(self.text):
            if self.is_over:
                raise End
            yield
        return self.text[self.at]

    def spaces(self) -> Generator[None, None, str]:
        """White space, which is read."""
        found = list[str]()
        while True:
            while self.at == len(self.text) and not self.is_over:
                yield
            match = SPACES.match(self.text, self.at)
            if match is None:
                return "".join(found)
            found.append(self.take(match.end() - self.at))

    def space(self) -> Generator[None, None, str]:
        """The next character after white space, which is read."""
        yield from self.spaces()
        return (yield from self.peek())

    def follows(self, literal: str) -> Generator[None, None, bool]:
        """Whether the text goes on with the literal, which is read then."""
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
        """Events of the text up to a marker, which is read. Returns the white space before it and
        the marker, of which there are no events.
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
        """Where the text ends without a suffix that may begin the marker."""
        if self.is_over:
            return len(self.text)
        for size in range(min(len(marker) - 1, len(self.text) - self.at), 0, -1):
            if marker.startswith(self.text[-size:]):
                return len(self.text) - size
        return len(self.text)


class CallParser(TextParser):
    """A parser of a model's tool calls.

    From the beginning of what may be a call until it is known to be one, what is read is kept in
    `kept`: it is content if it is no call after all, or if the text ends before that is known.
    """

    name_key = "name"  # of a call's JSON

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] | None = None
        self.num_calls = 0

    def read(self) -> Steps:
        try:
            while True:
                try:
                    yield from self.read_part()
                except NoCall:
                    self.give_back()
        except End:
            self.give_back()
            raise

    def read_part(self) -> Steps:
        """Read content and calls; NoCall where something else than a call follows."""
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

    def call(self, names: Collection[str] | None = None) -> Steps:
        """A call as a JSON object with a name, of these if they are given, and arguments. Its
        arguments are streamed if they come after its name.
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
            elif self.is_begun or key in KEYS:
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

    def expect(self, character: str) -> Steps:
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

    def value(self, sink: Callable[[str], None]) -> Steps:
        """Pass a JSON value on, as it is written; where it ends is seen from its brackets and
        strings alone.
        """
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

    def scalar(self, sink: Callable[[str], None]) -> Steps:
        while True:
            yield from self.peek()
            stop = SCALAR_END.search(self.text, self.at)
            sink(self.take((len(self.text) if stop is None else stop.start()) - self.at))
            if stop is not None:
                return


def ignored(text: str) -> None:
    pass


def is_name(name: str) -> bool:
    """Whether clients can be told a name of a function, whether or not there is such a function."""
    return bool(name) and len(name) <= 256 and name.isprintable()


def object_in(value: str) -> str:
    """A call's arguments, as written: an object, one in a string, or null, which is an empty one;
    NoCall for others.
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
