"""Converts the input and tools of /v1/responses to the messages and tools of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.server.body import convert, fields, from_fields, refuse_unknown
from specserve.server.refusal import cut
from specserve.server.tools import FunctionName, ToolsAsked, read_tools

State = Literal["in_progress", "completed", "incomplete"]
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text")
PART_FIELDS = ["type", "text"]
NULL_ONLY = "async", "caller", "encrypted_content", "namespace"  # OpenAI's fields; must be null


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that items have in responses, and that are ignored in an input."""

    type: str | None = None
    id: str | None = None
    status: State | None = None


class MessageItem(Item, frozen=True, kw_only=True):
    """A message. Its content is a text, or parts of type input_text or output_text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Item, frozen=True, kw_only=True):
    """A call of a function, as in a response."""

    call_id: str
    name: FunctionName
    arguments: str


class CallOutputItem(Item, frozen=True, kw_only=True):
    """The result of a call: a text, or parts of type input_text."""

    call_id: str
    output: str | list[dict[str, Any]]
    name: str | None = None


class ReasoningItem(Item, frozen=True, kw_only=True):
    """Reasoning of the model before the next item. The summary is only used without content."""

    content: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []


ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


AnyItem = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in ITEMS.values()]
        }
    ),
]


def read_input(
    given: str | Sequence[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Return the conversation as messages of a chat. Errors name the item."""
    messages = list[dict[str, Any]]()
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise RequestError("input: empty. Send a text or at least one item", "input")
    for i, raw in enumerate(given):
        add(messages, read_item(raw, f"input[{i}]"), f"input[{i}]")
    return messages


def read_item(raw: dict[str, Any], path: str) -> Item:
    name = raw.get("type")
    name = "message" if name is None else name
    if not isinstance(name, str) or name not in ITEMS:
        raise RequestError(
            f"{path}.type: {cut(str(name))!r} is not supported. Send one of {', '.join(ITEMS)}",
            f"{path}.type",
        )
    kind = ITEMS[name]
    for key, value in raw.items():
        if key not in fields(kind) and (key not in NULL_ONLY or value is not None):
            refuse_unknown(key, [*fields(kind)], f"{path}.")
    for field in msgspec.structs.fields(kind):
        if field.required and raw.get(field.name) is None:
            where = f"{path}.{field.name}"
            raise RequestError(f"{where}: missing. Items of type {name} need it", where)
    known = {key: value for key, value in raw.items() if key in fields(kind)}
    return from_fields(known, kind, f"{path}.")


def add(messages: list[dict[str, Any]], item: Item, path: str) -> None:
    """Append the message of an item, or add the item to the last message of the assistant."""
    match item:
        case MessageItem(role="assistant", content=content):
            answer = unfinished(messages, "content", "tool_calls")
            answer["content"] = text_of(content, f"{path}.content")
        case MessageItem(role=role, content=content):
            text = text_of(content, f"{path}.content")
            if role != "user" and [m["role"] for m in messages] == ["system"]:
                messages[0]["content"] += f"\n\n{text}"  # templates allow one system message
            else:
                messages.append({"role": role, "content": text})
        case CallItem(call_id=id, name=name, arguments=arguments):
            function = {"name": name, "arguments": arguments}
            calls = unfinished(messages).setdefault("tool_calls", [])
            calls.append({"id": id, "type": "function", "function": function})
        case CallOutputItem(call_id=id, output=output):
            text = text_of(output, f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": id, "content": text})
        case ReasoningItem(content=content, summary=summary):
            answer = unfinished(messages, "content", "tool_calls", "reasoning_content")
            where = f"{path}.{'content' if content else 'summary'}"
            answer["reasoning_content"] = text_of(content or summary, where)


def unfinished(messages: list[dict[str, Any]], *lacking: str) -> dict[str, Any]:
    """Return the last message if it is an assistant's without these fields; else append one."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & {*lacking}:
        messages.append({"role": "assistant"})
    return messages[-1]


def text_of(content: str | Sequence[dict[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(read_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def read_part(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind not in TEXTS:
        raise RequestError(
            f"{path}.type: {cut(str(kind))!r} is not supported: models read only text. Send text",
            f"{path}.type",
        )
    for key in part:
        if key not in PART_FIELDS:
            refuse_unknown(key, PART_FIELDS, f"{path}.")
    return str(convert(part.get("text"), str, f"{path}.text"))


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model can call.

    parameters      a JSON schema of the arguments, an object
    strict          true enforces the schema
    """

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


AnyTool = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/FunctionTool"})
]


def read_flat_tools(
    tools: Sequence[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    is_parallel: bool | None,
) -> ToolsAsked:
    """Read the three fields of tools. A function's fields are directly in the tool."""
    given = [as_in_chats(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    if isinstance(choice, dict):
        choice = choice_in_chats(choice)
    try:
        return read_tools(given, choice, is_parallel)
    except RequestError as e:  # its path is a chat's
        param = (e.param or "").replace(".function", "") or None
        raise RequestError(str(e).replace(".function", ""), param) from e


def as_in_chats(given: dict[str, Any], path: str) -> dict[str, Any]:
    if given.get("type") != "function":
        raise RequestError(
            f"{path}.type: {cut(str(given.get('type')))!r} is not supported. Send function",
            f"{path}.type",
        )
    tool = convert(given, FunctionTool, path)
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {n: v for n, v in fields.items() if v is not None}}


def choice_in_chats(given: dict[str, Any]) -> dict[str, Any]:
    if given.keys() != {"type", "name"} or given["type"] != "function":
        raise RequestError(
            'tool_choice: send none, auto, required or {"type": "function", "name": ...}',
            "tool_choice",
        )
    return {"type": "function", "function": {"name": given["name"]}}
