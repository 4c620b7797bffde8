"""Calls of Command R, a JSON list after `Action:` or, of newer models, after <|START_ACTION|>:
[{"tool_name": ..., "parameters": {...}}]
"""

from specserve.text.answer.reading import CallParser, NoCall, Steps

ACTION, FENCE = "Action:", "```"
BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
NO_CALL = "directly_answer", "directly-answer"  # names that the templates add to the tools


class CommandRParser(CallParser):
    name_key = "tool_name"

    def __init__(self, has_tokens: bool) -> None:
        """`has_tokens`: the calls are between the two special tokens."""
        super().__init__()
        self.marker, self.end = (BEGIN, END) if has_tokens else (ACTION, FENCE)
        self.is_call = True

    def read_part(self) -> Steps:
        self.kept = [(yield from self.until(self.marker))]
        yield from self.space()
        if self.marker == ACTION and not (yield from self.follows(f"{FENCE}json")):
            raise NoCall
        separator = yield from self.space()
        if separator != "[":
            raise NoCall
        while separator != "]":
            self.take(1)
            yield from self.call()
            separator = yield from self.space()
            if separator not in ",]":
                raise NoCall
            self.kept = [] if separator == "," else None
        self.take(1)
        yield from self.space()
        yield from self.follows(self.end)
        yield from self.space()

    def begin(self, name: str, id: str | None = None) -> None:
        self.is_call = name not in NO_CALL
        if self.is_call:
            super().begin(name, id)
        else:
            self.kept = None

    def argue(self, text: str) -> None:
        if self.is_call:
            super().argue(text)
