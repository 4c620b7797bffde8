"""Tools in the body of a chat: the functions that a model can or must call."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.server.body import convert, refuse_unknown
from specserve.server.refusal import cut

MAX_TOOLS = 128  # per request
MAX_BYTES = 1 << 18  # of all tools of a request, as JSON
MAX_DEPTH = 64  # of a function's parameters and arguments

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]


class Function(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A call that a client sends back, with arguments as text; some add the parsed arguments."""

    name: FunctionName
    arguments: str | dict[str, Any] = ""
    parsed_arguments: Any = None


class ToolsAsked(msgspec.Struct, frozen=True):
    """A request's tools, as templates expect them, and the choice of a tool.

    choice    "auto", "required" or a function's name
    """

    tools: tuple[dict[str, Any], ...] = ()
    strict: frozenset[str] = frozenset()  # names of functions whose arguments fit their schemas
    choice: str = "auto"
    is_named: bool = False
    is_parallel: bool = True

    @property
    def is_enforced(self) -> bool:
        """Whether the response must be a call."""
        return bool(self.tools) and (self.is_named or self.choice == "required")

    @property
    def callable(self) -> tuple[dict[str, Any], ...]:
        """The tools that the choice allows."""
        if not self.is_named:
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == self.choice)


NO_TOOLS = ToolsAsked()


def read_tools(tools: Sequence[Any] | None, choice: Any, is_parallel: bool | None) -> ToolsAsked:
    """Check the fields `tools`, `tool_choice` and `parallel_tool_calls`.

    Return NO_TOOLS without tools, or for the choice "none".
    """
    given = tools or ()
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools: {len(given)} tools. At most {MAX_TOOLS} are allowed", "tools")
    functions = [read_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(
                f"tools[{i}].function.name: {name!r} occurs twice. Rename one",
                f"tools[{i}].function.name",
            )
    described = tuple(as_described(function) for function in functions)
    if (size := len(msgspec.json.encode(described))) > MAX_BYTES:
        raise RequestError(f"tools: {size} bytes. At most {MAX_BYTES} are allowed", "tools")
    chosen, is_named = read_choice(choice, names)
    if chosen == "none":
        return NO_TOOLS
    strict = frozenset(f.name for f in functions if f.strict)
    return ToolsAsked(described, strict, chosen, is_named, is_parallel is not False)


def read_tool(tool: Any, path: str) -> Function:
    given: dict[str, Any] = convert(tool, dict[str, Any], path)
    check_type(given, path)
    for key in given:
        if key not in ("type", "function"):
            refuse_unknown(key, ["type", "function"], f"{path}.")
    function: Function = convert(given.get("function"), Function, f"{path}.function")
    where = f"{path}.function.parameters"
    parameters = function.parameters or {}
    if parameters.get("type", "object") != "object":
        raise RequestError(f"{where}.type: not object. Send object", f"{where}.type")
    check_depth(parameters, MAX_DEPTH, where)
    return function


def check_type(given: Mapping[str, Any], path: str) -> None:
    if given.get("type", "function") != "function" or not isinstance(given.get("function"), dict):
        kind = cut(str(given.get("type")))
        is_flat = kind == "function" and "function" not in given
        why = "the fields belong under function" if is_flat else f"{kind!r} is not supported"
        raise RequestError(
            f'{path}: {why}. Send {{"type": "function", "function": {{"name": ...}}}}', path
        )


def check_keys(given: Mapping[str, Any], known: list[str], path: str) -> None:
    for key in given:
        if key not in known:
            refuse_unknown(key, known, path)


def check_depth(value: Any, most: int, path: str, depth: int = 0) -> None:
    if depth == most:
        raise RequestError(f"{path}: nested more than {most} levels deep. Flatten it", path)
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, most, path, depth + 1)


def as_described(function: Function) -> dict[str, Any]:
    """Return the tool for a template: as sent, without `strict`."""
    fields = msgspec.structs.asdict(function)
    del fields["strict"]
    return {"type": "function", "function": {k: v for k, v in fields.items() if v is not None}}


def read_choice(choice: Any, names: Sequence[str]) -> tuple[str, bool]:
    """Return the choice, and whether it is the name of a function."""
    if choice is None or choice in ("none", "auto"):
        return ("auto" if names else "none") if choice is None else choice, False
    if choice == "required":
        if not names:
            raise RequestError("tool_choice: needs tools. Send tools, too", "tool_choice")
        return "required", False
    if not isinstance(choice, dict):
        raise RequestError(
            f"tool_choice: unknown choice {cut(str(choice))!r}. Send none, auto, required or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    check_type(choice, "tool_choice")
    check_keys(choice, ["type", "function"], "tool_choice.")
    check_keys(choice["function"], ["name"], "tool_choice.function.")
    name = choice["function"].get("name")
    if name not in names:
        known = ", ".join(names) or "none"
        raise RequestError(
            f"tool_choice.function.name: unknown tool {cut(str(name))!r}. The tools are "
            f"{known:.500}",
            "tool_choice.function.name",
        )
    return str(name), True


def read_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message, for a template.

    Arguments are objects, or the original text if that is not a JSON object.
    """
    each = convert(calls, list[dict[str, Any]], path)
    return [read_call(call, f"{path}[{i}]") for i, call in enumerate(each)]


def read_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    check_type(call, path)
    # Clients copy the index of calls from streams.
    check_keys(call, ["id", "type", "function", "index"], f"{path}.")
    function: CalledFunction = convert(call["function"], CalledFunction, f"{path}.function")
    where = f"{path}.function.arguments"
    arguments = function.arguments
    if isinstance(arguments, str):
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):  # max_tokens may cut it
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    check_depth(arguments, MAX_DEPTH, where)
    id = {"id": convert(call["id"], str, f"{path}.id")} if call.get("id") is not None else {}
    named = {"name": function.name, "arguments": arguments}
    return {**id, "type": "function", "function": named}
