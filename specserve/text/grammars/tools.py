"""Grammars of tool calls in a model's format."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from specserve.text.answer.formats import HERMES, MARKERS, Formats
from specserve.text.answer.parsers import ARGS, PYTHON_TAG, TOOL_CALLS
from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.structured_outputs import json_part, lark, quoted
from specserve.text.tokenizer import Tokenizer

TERMINALS = r"""
TEXT: /(.|\n)*/
OTHER: /[^{ \t\r\n](.|\n)*/
GAP: /\n{0,2}/
"""


class CallGrammar(msgspec.Struct, frozen=True):
    """The format of calls of some tools, as Lark rules.

    strict       names of tools whose schemas are strict
    special      ids of tokens that llguidance does not treat as text, by their texts
    thinks       reasoning may precede the response
    is_inside    the prompt already contains the beginning of the reasoning
    """

    formats: Formats
    tools: Sequence[Mapping[str, Any]]
    special: Mapping[str, int]
    thinks: bool = False
    is_inside: bool = False
    strict: frozenset[str] = frozenset()

    def enforced(self, is_parallel: bool = True) -> str:
        """Return a grammar of one or, if `is_parallel`, more calls, with optional reasoning before.

        GrammarError if schemas are too large or too deep.
        """
        return self.lark(f"start: {self.thought} {self.only_calls(is_parallel)}", *self.calls())

    def or_form(self, form: str, is_parallel: bool = True) -> str:
        """Return a grammar of calls, as in `enforced`, or of a text of a form.

        `form` is a part of a rule. Arguments of tools that are not strict are any object.
        """
        start = f"start: {self.thought} ({self.only_calls(is_parallel)} | form)"
        return self.lark(start, f"form: {form}", *self.calls(is_free=True))

    def form_alone(self, form: str) -> str:
        """Return a grammar of a text of a form, without calls."""
        return self.lark(f"start: {self.thought} form", f"form: {form}")

    def only_calls(self, is_parallel: bool) -> str:
        """Return one call, or one or more calls, as a part of a rule."""
        begin, separator, end = self.around
        # The calls of a family end the response, or are in a section of their own.
        has_more = is_parallel and not self.formats.family
        more = f"({self.literal(separator)} call)*" if has_more else ""
        return f"{begin} call {more} {end}"

    def triggered(self) -> str:
        """Return a grammar of any text with calls of these tools. Errors as in `enforced`.

        Arguments of strict tools match their schemas.
        """
        begin, separator, end = self.around
        more = f"({self.literal(separator)} call)*"
        match self.formats.enforced:
            case "llama3_json":
                has_tag = PYTHON_TAG in self.special
                tagged = f"({self.literal(PYTHON_TAG)} calls)?" if has_tag else ""
                start = f"start: {self.thought} (calls | OTHER? {tagged})"
                return self.lark(start, f"calls: call {more}", *self.calls(is_free=True))
            case "mistral" if not self.formats.has_args:
                trigger = TOOL_CALLS
                calls = f"{begin.removeprefix(self.literal(trigger))} call {more} {end}"
            case "mistral":
                trigger, calls = TOOL_CALLS, "call"
            case _:
                trigger, calls = self.pieces(self.frame[0])[0].rstrip(), "call"
        start = f"start: {self.thought} (triggered {calls})* TEXT"
        return self.lark(start, *self.up_to("triggered", trigger), *self.calls(True, trigger))

    def lark(self, *rules: str) -> str:
        thoughts = self.up_to("thought", self.formats.thinking[1]) if self.thinks else ()
        return lark("\n".join([*rules, *thoughts, TERMINALS]))

    @property
    def frame(self) -> tuple[str, str]:
        return self.formats.frame or HERMES

    @property
    def around(self) -> tuple[str, str, str]:
        """Rule parts before the first call and after the last call, and the text between calls."""
        match self.formats.enforced:
            case "llama3_json":
                return "", "; ", ""
            case "mistral" if self.formats.has_args:
                return "", "", ""
            case "mistral":
                return f"{self.literal(TOOL_CALLS)} / ?\\[/", ", ", '"]"'
        return "", "\n", ""

    def calls(self, is_free: bool = False, trigger: str = "") -> Iterator[str]:
        """Write the rule of a call and the rule of each tool, without the trigger.

        `is_free`: the arguments of tools that are not strict are any object.
        """
        names = [f"call_{i}" for i in range(len(self.tools))]
        yield f"call: {' | '.join(names)}"
        for rule, tool in zip(names, self.tools, strict=True):
            function = tool["function"]
            is_strict = function["name"] in self.strict
            arguments = self.arguments(function, is_strict or not is_free, is_strict)
            before, after = self.written(function["name"])
            before = self.literal(before.removeprefix(trigger))
            yield f"{rule}: {before} {arguments} {self.literal(after)}"

    def arguments(self, function: Mapping[str, Any], is_held: bool, is_strict: bool) -> str:
        """Write any object, or if `is_held` an object that matches the function's schema."""
        schema: dict[str, Any] = {"type": "object"}
        if is_held and function.get("parameters"):
            schema |= function["parameters"]
        elif is_held:
            schema |= {"properties": {}, "additionalProperties": False}
        try:
            return json_part(schema, is_strict=is_strict)
        except GrammarError as e:
            raise GrammarError(f"parameters of {function['name']}: {e}") from e

    def written(self, name: str) -> tuple[str, str]:
        """Return the text before and after a call's arguments."""
        match self.formats.enforced:
            case "llama3_json":
                return f'{{"name": "{name}", "parameters": ', "}"
            case "mistral" if self.formats.has_args:
                return f"{TOOL_CALLS}{name}{ARGS}", ""
            case "mistral":
                return f'{{"name": "{name}", "arguments": ', "}"
        return self.formats.around(name)

    @property
    def thought(self) -> str:
        """The rule parts of reasoning before the response."""
        if not self.thinks:
            return ""
        if self.is_inside:
            return "thought GAP"
        return f"({self.literal(self.formats.thinking[0])} thought GAP)?"

    def up_to(self, rule: str, marker: str) -> Iterator[str]:
        """Write a rule of any text up to and including a marker."""
        if marker in self.special:
            yield f"{rule}: TEXT {self.literal(marker)}"
        else:
            yield f"{rule}[lazy]: TEXT {quoted(marker)}"

    def literal(self, text: str) -> str:
        """Write a text that may contain special tokens as parts of a rule."""
        parts = (
            f"<[{self.special[p]}]>" if p in self.special else quoted(p) for p in self.pieces(text)
        )
        return " ".join(parts)

    def pieces(self, text: str) -> list[str]:
        """Split a text at special tokens."""
        found = [re.escape(special) for special in self.special if special in text]
        return [*filter(None, re.split(f"({'|'.join(found)})", text))] if found else [text]


def special_tokens(tokenizer: Tokenizer, formats: Formats) -> dict[str, int]:
    """Find the tokens in the model's markers that llguidance does not treat as text.

    They are special tokens, and other added tokens in angle brackets.
    """
    markers = [*(m for each in MARKERS.values() for m in each), *formats.around("")]
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        token.content: id
        for id, token in added.items()
        if (token.special or (token.content.startswith("<") and token.content.endswith(">")))
        and any(token.content in marker for marker in markers)
    }
