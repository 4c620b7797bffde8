"""Fields of older APIs, whose effect other fields have: clients often cannot be changed."""

from collections.abc import Mapping
from typing import Any

import msgspec

from specserve.errors import RequestError
from specserve.server.protocol import (
    ChatChunkChoice,
    ChatCompletionChoice,
    FunctionCall,
    FunctionDelta,
)
from specserve.text.grammars.structured_outputs import FIELD

# vLLM's old fields -> keys of structured_outputs
GUIDED = {f"guided_{name}": name for name in ("choice", "grammar", "json", "json_object", "regex")}
FUNCTIONS, FUNCTION_CALL = "functions", "function_call"
# All old fields, and what replaces them, for /openapi.json.
REPLACED = {
    **{name: f"the same as {FIELD}.{key}" for name, key in GUIDED.items()},
    FUNCTIONS: "the same as tools, without parallel calls",
    FUNCTION_CALL: "the same as tool_choice",
}


def replace_guided(body: dict[str, Any]) -> tuple[str, ...]:
    """Replace vLLM's old fields for a format of the text, and return their names."""
    names = [name for name in GUIDED if body.get(name) is not None]
    for name in GUIDED.keys() & body.keys():
        value = body.pop(name)
        if value is None:
            continue
        if body.get(FIELD) is not None or len(names) > 1:
            other = FIELD if body.get(FIELD) is not None else " and ".join(names)
            message = f"{name} and {other} set the format of the text. Send only {FIELD}"
            raise RequestError(message, name)
        body[FIELD] = {GUIDED[name]: value}
    return tuple(names)


def replace_functions(body: dict[str, Any]) -> tuple[str, ...]:
    """Replace OpenAI's deprecated functions by tools, and return the names of old fields."""
    names = [name for name in (FUNCTIONS, FUNCTION_CALL) if body.get(name) is not None]
    functions, choice = body.pop(FUNCTIONS, None), body.pop(FUNCTION_CALL, None)
    for name, new in ((FUNCTIONS, "tools"), (FUNCTION_CALL, "tool_choice")):
        if name in names and body.get(new) is not None:
            raise RequestError(f"{name} and {new} have the same meaning. Send {new}", name)
    if isinstance(functions, list) and functions:
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        body["parallel_tool_calls"] = False
    elif functions is not None and functions != []:
        raise RequestError(f"{FUNCTIONS}: not a list. Send tools instead", FUNCTIONS)
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    if choice is not None:
        body["tool_choice"] = choice
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and replace_in_message(message):
            names.append(f"messages[{i}]")
    return tuple(names)


def replace_in_message(message: dict[str, Any]) -> bool:
    """Convert a call of a function, or its result, to one of a tool; return whether it was one."""
    call = message.get(FUNCTION_CALL)
    if isinstance(call, dict) and message.get("tool_calls") is None:
        del message[FUNCTION_CALL]
        id = f"call_{call.get('name')}"
        message["tool_calls"] = [{"type": "function", "id": id, "function": call}]
        return True
    if message.get("role") == "function" and message.get("name"):
        message |= {"role": "tool", "tool_call_id": f"call_{message.get('name')}"}
        return True
    return False


def with_function(choice: ChatCompletionChoice) -> ChatCompletionChoice:
    """Return a choice whose call is that of a function."""
    message = choice.message
    if isinstance(message.tool_calls, list) and message.tool_calls:
        called = message.tool_calls[0].function
        message.function_call = FunctionCall(called.name, called.arguments)
        message.tool_calls = msgspec.UNSET
    return choice


def with_function_delta(choice: ChatChunkChoice) -> ChatChunkChoice:
    """The same for a chunk."""
    delta = choice.delta
    if isinstance(delta.tool_calls, list) and delta.tool_calls:
        called = delta.tool_calls[0].function
        if isinstance(called, FunctionDelta):
            delta.function_call = FunctionDelta(called.name, called.arguments)
        delta.tool_calls = msgspec.UNSET
    return choice


def as_function(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a choice with the old finish reason of a call."""
    is_call = fields.get("finish_reason") == "tool_calls"
    return {**fields, "finish_reason": FUNCTION_CALL} if is_call else dict(fields)
