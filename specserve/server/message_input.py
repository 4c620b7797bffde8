"""Converts the content and tools of /v1/messages to the messages and tools of a chat."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.server.body import convert, fields, from_fields, refuse_unknown
from specserve.server.refusal import cut
from specserve.server.tools import MAX_DEPTH, FunctionName, ToolsAsked, check_depth, read_tools

# Lines that clients add to the system text, that change with each request, and that have no
# meaning for a model. They would make the prefix cache useless, so the server removes them.
VOLATILE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE | re.IGNORECASE)
FAILED = "Error: "  # precedes the result of a failed call, because templates have no field for it
PARALLEL = "disable_parallel_tool_use"


class Block(msgspec.Struct, frozen=True, kw_only=True):
    type: str


class TextPart(Block, frozen=True, kw_only=True):
    """A text."""

    text: str


class ThinkingPart(Block, frozen=True, kw_only=True):
    """Reasoning of an earlier response. The signature is ignored."""

    thinking: str
    signature: str | None = None


class ToolUsePart(Block, frozen=True, kw_only=True):
    """A call of a tool, as in a response."""

    id: str
    name: FunctionName
    input: dict[str, Any]


class ToolResultPart(Block, frozen=True, kw_only=True):
    """The result of a call: a text, or text blocks."""

    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False


BLOCKS: dict[str, dict[str, type[Block]]] = {  # role -> types of blocks
    "user": {"text": TextPart, "tool_result": ToolResultPart},
    "assistant": {"text": TextPart, "thinking": ThinkingPart, "tool_use": ToolUsePart},
    "system": {"text": TextPart},
}
PARTS = TextPart, ThinkingPart, ToolUsePart, ToolResultPart
AnyBlock = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in PARTS]
        }
    ),
]


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message. Its content is a text, or blocks.

    Users send the blocks text and tool_result, assistants text, thinking and tool_use.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


def read_conversation(
    system: str | Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conversation as messages of a chat. Errors name the block."""
    if not given:
        raise RequestError("messages: empty. Send at least one message", "messages")
    text = VOLATILE.sub("", text_of(system, "system", "\n\n"))
    messages = [{"role": "system", "content": text}] if text else []
    for i, raw in enumerate(given):
        path = f"messages[{i}]"
        message: InputMessage = convert(raw, InputMessage, path)
        parts = blocks_of(message.content, message.role, f"{path}.content")
        if not parts:
            raise RequestError(f"{path}.content: empty. Send a text or a block", f"{path}.content")
        if message.role == "assistant":
            messages.append(answer_of(parts))
        for part in parts if message.role != "assistant" else ():
            add(messages, message.role, part)
    return messages


def blocks_of(content: str | Sequence[Mapping[str, Any]], role: str, path: str) -> list[Block]:
    if isinstance(content, str):
        return [TextPart(type="text", text=content)]
    return [read_block(raw, BLOCKS[role], f"{path}[{i}]") for i, raw in enumerate(content)]


def read_block(raw: Mapping[str, Any], kinds: Mapping[str, type[Block]], path: str) -> Any:
    name = raw.get("type")
    if not isinstance(name, str) or name not in kinds:
        raise RequestError(
            f"{path}.type: {cut(str(name))!r} is not supported here; specserve reads text only. "
            f"Send {' or '.join(kinds)}",
            f"{path}.type",
        )
    kind = kinds[name]
    for key in raw:
        if key not in fields(kind):
            refuse_unknown(key, [*fields(kind)], f"{path}.")
    for field in msgspec.structs.fields(kind):
        if field.required and raw.get(field.name) is None:
            where = f"{path}.{field.name}"
            raise RequestError(f"{where}: missing. Blocks of type {name} need it", where)
    block = from_fields(dict(raw), kind, f"{path}.")
    if isinstance(block, ToolUsePart):
        check_depth(block.input, MAX_DEPTH, f"{path}.input")
    if isinstance(block, ToolResultPart):
        text = text_of(block.content, f"{path}.content", "\n")
        block = msgspec.structs.replace(block, content=text)
    return block


def text_of(content: str | Sequence[Mapping[str, Any]], path: str, separator: str) -> str:
    """Return a text, or the joined texts of blocks."""
    if isinstance(content, str):
        return content
    kinds = BLOCKS["system"]
    texts = (read_block(raw, kinds, f"{path}[{i}]").text for i, raw in enumerate(content))
    return separator.join(texts)


def answer_of(parts: Sequence[Block]) -> dict[str, Any]:
    """Return an assistant's message. Templates write reasoning, text and calls in this order."""
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    thoughts = "\n".join(part.thinking for part in parts if isinstance(part, ThinkingPart))
    calls = [
        {"id": p.id, "type": "function", "function": {"name": p.name, "arguments": p.input}}
        for p in parts
        if isinstance(p, ToolUsePart)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def add(messages: list[dict[str, Any]], role: str, part: Block) -> None:
    """Append a block of a user or the system. Adjacent texts of a role are one message, because
    templates expect roles to alternate.
    """
    if isinstance(part, ToolResultPart):
        text = f"{FAILED * part.is_error}{part.content}"
        messages.append({"role": "tool", "tool_call_id": part.tool_use_id, "content": text})
    elif isinstance(part, TextPart):
        text = VOLATILE.sub("", part.text) if role == "system" else part.text
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model can call.

    input_schema    a JSON schema of the input, an object
    strict          true enforces the schema
    """

    name: FunctionName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of a tool: any of the tools, or the tool of a name.

    disable_parallel_tool_use  true: at most one call
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def __post_init__(self) -> None:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: required for the type tool, and only there")


AnyMessageTool = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Tool"})
]


def read_message_tools(
    given: Sequence[Mapping[str, Any]] | None, choice: ToolChoice | None
) -> ToolsAsked:
    """Read the tools and their choice."""
    functions = [as_function(tool, f"tools[{i}]") for i, tool in enumerate(given or ())]
    asked: Any = None if choice is None else choice.type
    if choice is not None and choice.type == "any":
        asked = "required"
    elif choice is not None and choice.type == "tool":
        asked = {"type": "function", "function": {"name": choice.name}}
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    try:
        return read_tools(functions, asked, is_parallel)
    except RequestError as e:  # its path is a chat's
        names = {".function.parameters": ".input_schema", ".function": ""}
        message, param = str(e), e.param or ""
        for theirs, ours in names.items():
            message, param = message.replace(theirs, ours), param.replace(theirs, ours)
        raise RequestError(message, param or None) from e


def as_function(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    if given.get("type") not in (None, "custom"):
        raise RequestError(
            f"{path}.type: {cut(str(given.get('type')))!r} is a tool of Anthropic's servers. Send "
            "custom, with a name and an input_schema",
            f"{path}.type",
        )
    tool: Tool = convert(given, Tool, path)
    function = {"name": tool.name, "parameters": tool.input_schema}
    more = {"description": tool.description, "strict": tool.strict}
    return {
        "type": "function",
        "function": function | {name: value for name, value in more.items() if value is not None},
    }
