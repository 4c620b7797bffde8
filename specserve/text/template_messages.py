"""The messages of a chat as a template expects them."""

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
Fields = dict[str, Any]  # of a message, as JSON has them
ARGUMENTS = "arguments"


class Needs(NamedTuple):
    """Properties of a template that decide how messages are written."""

    null_content: bool = False  # it tests whether a content is null
    short_ids: bool = False  # it refuses ids of calls that have other than nine characters


class WrittenArguments(str):
    """Arguments of a call as the model wrote them. A template prints them unchanged, also as JSON;
    one that iterates over arguments finds this text as the only one.
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
    """Without null fields except a content, and with reasoning under both usual names."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message is a mapping with role and content, not {message!r:.50}")
    given = {k: v for k, v in message.items() if v is not None or k == "content"}
    fields = {key: plain(value) for key, value in given.items()}
    names = "reasoning_content", "thinking", "reasoning"  # clients use any; the first one is taken
    reasoning = next((fields[name] for name in names if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning} | fields | {"reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """The value in JSON's types: the sandbox does not restrict methods of other types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # also of a subclass, only the characters
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
    """The messages with contents, ids and arguments as the template needs them."""
    found = [with_arguments(with_content(message, needs), as_written) for message in chat]
    return with_short_ids(found) if needs.short_ids else found


def with_content(message: Fields, needs: Needs) -> Fields:
    """A message of calls alone has a null content, if the template tests for it, else an empty
    one. Some clients send the other of them, or none.
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
    """Arguments that are no object, as a call has them that was cut, stay what they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return WrittenArguments(arguments)
    return arguments


def with_written_arguments(chat: Sequence[Fields]) -> list[Fields]:
    """For templates that add arguments to text, without tojson."""

    def change(arguments: Any) -> Any:
        if not isinstance(arguments, dict):
            return arguments
        return WrittenArguments(json.dumps(arguments, ensure_ascii=False))

    return [with_arguments(message, change) for message in chat]


def with_short_ids(chat: Sequence[Fields]) -> list[Fields]:
    """Ids of another form become nine letters and digits: the same ids everywhere in the chat, and
    in each later turn, and others for other ids.
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
