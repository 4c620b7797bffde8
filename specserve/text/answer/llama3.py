"""Calls of Llama 3: {"name": ..., "parameters": {...}}, several separated by semicolons, either as
the whole answer or after <|python_tag|>.
"""

from collections.abc import Collection

from specserve.text.answer.reading import CallParser, Steps

TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    def __init__(self, names: Collection[str]) -> None:
        """Without the tag only calls of functions with these names are calls."""
        super().__init__()
        self.names = names
        self.is_at_start = True

    def read_part(self) -> Steps:
        if self.is_at_start:
            self.is_at_start, self.kept = False, []
            if (yield from self.space()) == "{":
                yield from self.calls(self.names)
            elif not (yield from self.follows(TAG)):
                self.give_back()
            else:
                yield from self.calls(None)
        self.kept = [(yield from self.until(TAG))]
        yield from self.calls(None)

    def calls(self, names: Collection[str] | None) -> Steps:
        yield from self.call(names)
        while (yield from self.space()) == ";":
            self.kept = []
            self.take(1)
            yield from self.call(names)
