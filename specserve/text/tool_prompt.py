"""Tools in a conversation for chat templates that do not show tools: all of it becomes text."""

import json
from collections.abc import Sequence
from typing import Any

from specserve.text.template_messages import Fields

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
PROMPT = """\
You can call these functions:
{tools}
To call a function, write:
{call}
Its result follows in <tool_response>. Call a function only if it helps."""
RESULT = "<tool_response>\n{}\n</tool_response>"


def with_tools_as_text(
    chat: Sequence[Fields], tools: Sequence[Any], call: str = CALL
) -> list[Fields]:
    """Return the messages with tools, calls and results as text.

    The system text describes the tools. Results are messages of the user, because roles alternate
    in many templates. `call` has the places of a call's name and arguments.
    """
    lines = "\n".join(as_json(tool.get("function", tool)) for tool in tools)
    prompt = PROMPT.format(tools=lines, call=call % ("NAME", "{...}"))
    messages: list[Fields] = [{"role": "system", "content": prompt}]
    for message in chat:
        match message.get("role"):
            case "system" if len(messages) == 1:
                messages[0]["content"] = f"{text_of(message)}\n\n{prompt}"
            case "tool":
                add(messages, RESULT.format(text_of(message)))
            case "user" if messages[-1]["role"] == "user":
                add(messages, text_of(message))
            case _:
                messages.append(with_written_calls(message, call))
    return messages


def add(messages: list[Fields], text: str) -> None:
    """Append a text of the user to the last message, if that is the user's, too."""
    if messages[-1]["role"] == "user":
        messages[-1] = messages[-1] | {"content": f"{text_of(messages[-1])}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def with_written_calls(message: Fields, form: str) -> Fields:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    written = [form % (c.get("name"), as_json(c.get("arguments", {}))) for c in calls]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": "\n".join(filter(None, [text_of(message), *written]))}


def as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def text_of(message: Fields) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def without_system(chat: Sequence[Fields]) -> list[Fields]:
    """Return the messages with the system text in the first message of the user, for templates
    that reject a system message.
    """
    system, *rest = chat
    for i, message in enumerate(rest):
        if message.get("role") == "user":
            text = f"{text_of(system)}\n\n{text_of(message)}"
            return [*rest[:i], message | {"content": text}, *rest[i + 1 :]]
    return [{"role": "user", "content": text_of(system)}, *rest]
