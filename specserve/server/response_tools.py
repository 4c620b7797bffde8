"""Tools in the body of /v1/responses, where a function's fields are the tool's own."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from specserve.errors import RequestError
from specserve.server.body import convert
from specserve.server.refusal import cut
from specserve.server.tools import FunctionName, ToolsAsked, read_tools


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call.

    parameters      a JSON schema of its arguments, an object
    strict          true: the arguments fit it
    """

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


AnyTool = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/FunctionTool"})
]


class Asked(Protocol):
    @property
    def tools(self) -> Sequence[dict[str, Any]] | None: ...

    @property
    def tool_choice(self) -> str | dict[str, Any] | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None: ...


def read_flat_tools(asked: Asked) -> ToolsAsked:
    """The three fields of tools, as a chat has them."""
    tools = [as_in_chats(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())]
    choice = asked.tool_choice
    if isinstance(choice, dict):
        choice = choice_in_chats(choice)
    try:
        return read_tools(tools, choice, asked.parallel_tool_calls)
    except RequestError as e:  # with a chat's paths
        param = (e.param or "").replace(".function", "") or None
        raise RequestError(str(e).replace(".function", ""), param) from e


def as_in_chats(given: dict[str, Any], path: str) -> dict[str, Any]:
    if given.get("type") != "function":
        raise RequestError(
            f"{path}.type: only functions can be called, not {cut(str(given.get('type')))!r}",
            f"{path}.type",
        )
    tool = convert(given, FunctionTool, path)
    fields = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {n: v for n, v in fields.items() if v is not None}}


def choice_in_chats(given: dict[str, Any]) -> dict[str, Any]:
    if given.keys() != {"type", "name"} or given["type"] != "function":
        raise RequestError(
            'tool_choice: none, auto, required or {"type": "function", "name": ...}', "tool_choice"
        )
    return {"type": "function", "function": {"name": given["name"]}}
