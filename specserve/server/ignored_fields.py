"""Fields of messages, parts, calls and tools that clients send for other servers."""

from collections.abc import Iterator, Sequence
from typing import Any

OF_ANY = {"cache_control", "providerMetadata", "providerOptions", "provider_options"}
OF_MESSAGES = OF_ANY | {
    *("annotations", "channel", "citations", "created", "createdAt", "created_at", "done"),
    *("end_turn", "executed_tools", "extra_content", "id", "index", "info", "messageId"),
    *("message_id", "metadata", "model", "parentId", "partial", "prefix", "reasoning_details"),
    *("reasoning_items", "reasoning_opaque", "reasoning_signature", "recipient", "refusal"),
    *("response_metadata", "search_results", "signature", "sources", "status"),
    *("thinking_blocks", "thought_signature", "timestamp", "ts", "type", "updatedAt", "usage"),
    *("usage_metadata", "weight"),
}
OF_PARTS = OF_ANY | {
    *("annotations", "citations", "id", "index", "logprobs", "signature", "thought_signature")
}
OF_CALLS = OF_ANY | {
    *("extra_content", "provider_specific_fields", "signature", "thought_signature")
}
OF_TOOLS = OF_ANY | {"defer_loading", "eager_input_streaming"}

IGNORED = {  # path of objects in a body -> their fields without effect
    "messages": OF_MESSAGES,
    "messages.content": OF_PARTS,
    "messages.tool_calls": OF_CALLS,
    "messages.tool_calls.function": OF_CALLS,
    "tools": OF_TOOLS,
    "tools.function": OF_TOOLS,
    "input": OF_MESSAGES - {"id", "status", "type"},
    "input.content": OF_PARTS,
    "input.output": OF_PARTS,
    "input.summary": OF_PARTS,
}
EMPTY: tuple[Any, ...] = None, False, "", [], {}
CONTINUE = "partial", "prefix"  # in the last message, at DeepSeek, Mistral, Moonshot and Alibaba


def drop_ignored(body: dict[str, Any]) -> tuple[str, ...]:
    """Remove the fields without effect; the paths of those that have a value, each once."""
    continue_last(body)
    found = dict[str, None]()
    for path, names in IGNORED.items():
        for each in objects(body, path.split(".")):
            for name in names & each.keys():
                if each.pop(name) not in EMPTY:
                    found[f"{path}.{name}"] = None
    return tuple(sorted(found))


def continue_last(body: dict[str, Any]) -> None:
    """Set continue_final_message if the last message asks for it, by another server's field."""
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        asked = [name for name in CONTINUE if last.get(name) is True]
        for name in asked:
            del last[name]
        if asked:
            body["continue_final_message"] = True


def objects(value: Any, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects at a path, through the lists on the way."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and keys:
            yield from objects(each.get(keys[0]), keys[1:])
        elif isinstance(each, dict):
            yield each
