"""The events that a chat model's text turns into, and the parsers that find them in it."""

from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins; its arguments follow before the next call begins."""

    index: int  # 0, 1, ... in the order of the text
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments: all of them together are what the model wrote, usually a JSON
    object.
    """

    index: int
    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Reads one answer. However its text is cut into pieces, the events are the same but for where
    their texts are cut (see `joined`); text is held back only while it may be part of a marker, or
    of the head of a call.
    """

    def push(self, text: str) -> list[Event]:
        """The events that the next piece of text completes."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, after the last piece. To be called once."""
        ...

    @property
    def num_reasoning(self) -> int:
        """Characters from the beginning of the answer to the end of its reasoning, markers
        included; 0 without reasoning.
        """
        ...


class ParsedCall(msgspec.Struct):
    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct):
    """An answer as a whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = []


def joined(events: Iterable[Event]) -> list[Event]:
    """The events with neighboring texts of one kind joined, and empty ones left out."""
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
