"""Converting chat messages to the form that a template expects."""

import hashlib
import itertools
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import msgspec

from specserve.errors import RequestError

Message = Mapping[str, Any]
Fields = dict[str, Any]  # a message's fields in JSON types
ARGUMENTS = "arguments"


class Needs(NamedTuple):
    """Properties of a template that decide how messages are converted."""

    null_content: bool = False  # the template tests whether content is null
    short_ids: bool = False  # the template only accepts call ids of nine characters


class WrittenArguments(str):
    """A call's arguments as the text that the model wrote.

    Templates print this text unchanged, also with tojson. A template that iterates over arguments
    gets this text as the only argument.
    """

    def keys(self) -> Iterator[str]:
        return iter(self)

    def items(self) -> list[tuple[str, str]]:
        return [(ARGUMENTS, str(self))]

    def __iter__(self) -> Iterator[str]:
        return iter([ARGUMENTS])

    def __getitem__(self, key: Any) -> str:
        return str(self) if key == ARGUMENTS else super().__getitem__(key)


def read_message(message: Any) -> Fields:
    """Drop null fields except content, and set reasoning under both usual names."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages: a message is a mapping with role and content, not {message!r:.50}"
        )
    given = {k: v for k, v in message.items() if v is not None or k == "content"}
    fields = {key: plain(value) for key, value in given.items()}
    names = "reasoning_content", "thinking", "reasoning"  # accepted names, the first one wins
    reasoning = next((fields[name] for name in names if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning} | fields | {"reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """Convert a value to JSON types. The sandbox does not restrict methods of other types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # also converts subclasses
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


def fitted(chat: Sequence[Fields], needs: Needs) -> list[Fields]:
    """Convert contents, ids and arguments of messages as the template needs them."""
    found = [with_arguments(with_content(message, needs), as_written) for message in chat]
    return with_short_ids(found) if needs.short_ids else found


def with_content(message: Fields, needs: Needs) -> Fields:
    """Set an empty content to null if the template tests for null, else to an empty string.

    Clients differ in what they send with tool calls: null, an empty string or no content.
    """
    has_calls = bool(message.get("tool_calls"))
    content = message.get("content")
    if content or not ("content" in message or has_calls):
        return message
    is_null = needs.null_content and (content is None or has_calls)
    return message | {"content": None if is_null else ""}


def with_arguments(message: Fields, change: Callable[[Any], Any]) -> Fields:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [with_changed_arguments(call, change) for call in calls]}


def with_changed_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": with_changed_arguments(call["function"], change)}
    return call | {ARGUMENTS: change(call[ARGUMENTS])} if ARGUMENTS in call else call


def as_written(arguments: Any) -> Any:
    """Keep arguments that are not a JSON object, as in truncated calls, as text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return WrittenArguments(arguments)
    return arguments


def with_written_arguments(chat: Sequence[Fields]) -> list[Fields]:
    """Convert arguments to text, for templates that concatenate them without tojson."""

    def change(arguments: Any) -> Any:
        if not isinstance(arguments, dict):
            return arguments
        return WrittenArguments(json.dumps(arguments, ensure_ascii=False))

    return [with_arguments(message, change) for message in chat]


def with_short_ids(chat: Sequence[Fields]) -> list[Fields]:
    """Replace other ids by nine letters and digits.

    Equal ids get equal replacements in all turns; different ids get different replacements.
    """
    ids = [*ids_of(chat)]
    short = {id: id for id in ids if re.fullmatch("[a-zA-Z0-9]{9}", id)}
    taken = {*short}
    for id in ids:
        if id not in short:
            tried = (short_id(f"{n} {id}") for n in itertools.count())
            short[id] = next(each for each in tried if each not in taken)
            taken.add(short[id])

    def with_ids(message: Fields) -> Fields:
        if isinstance(id := message.get("tool_call_id"), str):
            message = message | {"tool_call_id": short[id]}
        if not (calls := message.get("tool_calls")):
            return message
        changed = [
            call | {"id": short[call["id"]]} if isinstance(call.get("id"), str) else call
            for call in calls
        ]
        return message | {"tool_calls": changed}

    return [with_ids(message) for message in chat]


def ids_of(chat: Sequence[Fields]) -> Iterator[str]:
    for message in chat:
        calls = message.get("tool_calls")
        owners = [message.get("tool_call_id")]
        owners += [c.get("id") for c in calls if isinstance(c, dict)] if calls else []
        yield from (id for id in owners if isinstance(id, str))


def short_id(text: str) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest())
    letters = string.ascii_letters + string.digits
    return "".join(letters[number // len(letters) ** i % len(letters)] for i in range(9))
