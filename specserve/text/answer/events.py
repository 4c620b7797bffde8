"""Events of a chat model's text, and the interface of the parsers that produce them."""

from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """The beginning of a tool call. Its arguments precede the next call."""

    index: int  # 0, 1, ... in the order of the text
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. All pieces form the model's text, usually a JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Parses one response from pieces of text.

    The cuts between pieces only affect the cuts of texts in events (see `joined`). A parser holds
    text back only while it may be part of a marker or of the head of a call.
    """

    def push(self, text: str) -> list[Event]:
        """Return the events that the next piece of text completes."""
        ...

    def finish(self) -> list[Event]:
        """Return events of held-back text after the last piece. Call it once."""
        ...

    @property
    def num_reasoning(self) -> int:
        """Characters from the response's beginning to the end of its reasoning, including markers;
        0 without reasoning.
        """
        ...


class ParsedCall(msgspec.Struct):
    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct):
    """A complete response."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = []


def joined(events: Iterable[Event]) -> list[Event]:
    """Join adjacent texts of the same kind, and drop empty texts."""
    whole = list[Event]()
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        first, *others = group
        if isinstance(first, CallBegin):
            whole += first, *others
            continue
        text = "".join([first.text, *(e.text for e in others if not isinstance(e, CallBegin))])
        if text:
            whole.append(msgspec.structs.replace(first, text=text) if others else first)
    return whole


def answer_of(events: Iterable[Event]) -> Answer:
    content, reasoning, calls = list[str](), list[str](), dict[int, tuple[CallBegin, list[str]]]()
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(index):
                calls[index] = event, []
            case CallArguments(index, text):
                calls[index][1].append(text)
    made = [ParsedCall(begin.id, begin.name, "".join(texts)) for begin, texts in calls.values()]
    return Answer("".join(content), "".join(reasoning), made)
