"""Tool calls that are written as calls of Python functions: [get_weather(city="Paris"), now()]"""

import ast
import json
from collections.abc import Mapping
from typing import Any

import regex  # unlike re, it finds partial matches

from specserve.text.answer.events import Content
from specserve.text.answer.parsers import CallParser, NoCall, ParseSteps, is_name

BEGIN = regex.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
MOST = 1 << 18  # characters of calls, because parsing takes time and memory for each
WRONG = ValueError, TypeError, SyntaxError, RecursionError, MemoryError


def as_pythonic(text: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parse a call or a list of calls, whose arguments are literals with names.

    ValueError for any other text.
    """
    if len(text) > MOST:
        raise ValueError("too long")
    try:
        code = ast.parse(text.strip(), mode="eval").body
        return [call_in(call) for call in (code.elts if isinstance(code, ast.List) else [code])]
    except WRONG as e:
        raise ValueError("not a list of calls of Python functions") from e


def call_in(call: ast.expr) -> dict[str, Any]:
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and len(call.args) == 1:
        call = call.args[0]  # Gemma may print a result
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


class PythonicParser(CallParser):
    """Parses a list of calls that is the whole response. The calls are emitted at its end."""

    def read_part(self) -> ParseSteps:
        while not self.is_over and self.may_begin():
            yield
        self.kept = []
        if BEGIN.match(self.text):
            while not self.is_over:
                self.take(len(self.text) - self.at)
                yield
            self.emit("".join(self.kept))
        self.give_back()
        while True:
            self.events.append(Content(self.take(len(self.text) - self.at)))
            yield from self.peek()

    def may_begin(self) -> bool:
        """Whether the text so far may become a list of calls, but is not yet one."""
        found = BEGIN.match(self.text, partial=True)
        return found is not None and found.partial

    def emit(self, text: str) -> None:
        try:
            calls = as_pythonic(text, {})
            written = [(c["name"], json.dumps(c["arguments"], ensure_ascii=False)) for c in calls]
        except (ValueError, TypeError) as e:
            raise NoCall from e
        if not written or not all(is_name(name) for name, _ in written):
            raise NoCall
        for name, arguments in written:
            self.begin(name)
            self.argue(arguments)
