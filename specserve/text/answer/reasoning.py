"""Reasoning: what a model writes in <think>...</think> before its answer."""

from specserve.text.answer.events import AnswerParser, Event, Reasoning
from specserve.text.answer.reading import End, Steps, TextParser

BEGIN, END = "<think>", "</think>"


class ThinkParser(TextParser):
    """Separates the reasoning that an answer begins with; another parser reads the rest."""

    def __init__(self, rest: AnswerParser, is_inside: bool) -> None:
        """`is_inside`: the prompt ends with <think>."""
        super().__init__()
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

    def read(self) -> Steps:
        spaces = "" if self.is_inside else (yield from self.spaces())
        if self.is_inside or (yield from self.follows(BEGIN)):
            self.has_reasoned = True
            yield from self.spaces()
            yield from self.until(END, as_event=Reasoning)
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
