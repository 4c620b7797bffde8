"""Calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}] of older models, and
[TOOL_CALLS]name[ARGS]{...} of newer ones, which may have [CALL_ID]id before [ARGS].
"""

import re
import secrets
import string
from collections.abc import Generator

from specserve.text.answer.reading import CallParser, NoCall, Steps

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
WORD = re.compile(r"[\w.:/-]+")
ID_CHARACTERS = string.ascii_letters + string.digits


class MistralParser(CallParser):
    def read_part(self) -> Steps:
        self.kept = [(yield from self.until(BEGIN))]
        match (yield from self.space()):
            case "[":
                yield from self.list_of_calls()
            case "{":
                yield from self.call()
            case _:
                yield from self.named_call()
        yield from self.space()

    def list_of_calls(self) -> Steps:
        separator = "["
        while separator != "]":
            self.take(1)
            yield from self.call()
            separator = yield from self.space()
            if separator not in ",]":
                raise NoCall
            self.kept = [] if separator == "," else None
        self.take(1)

    def named_call(self) -> Steps:
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
            found = WORD.match(self.text, self.at)
            if found is None:
                return "".join(pieces)
            pieces.append(self.take(found.end() - self.at))

    def new_id(self) -> str:
        """Mistral's chat templates accept no other form."""
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))
