"""Builds the OpenAPI document from the table of routes and the types of bodies and responses."""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specserve.server.body import UNSET, Body, passed_over
from specserve.server.protocol import Error
from specserve.version import VERSION

REF = "#/components/schemas/{name}"
INTRODUCTION = (
    "An LLM inference server whose speculation changes how fast text comes, never which text. "
    "The routes under /v1 follow OpenAI's API, and /v1/messages Anthropic's. Unknown and "
    "unsupported fields return an error with their name. null means that a field is unset."
)
STATUSES = {
    400: "Invalid HTTP or JSON, or an invalid, unknown or unsupported field",
    401: "No valid API key, if the server needs one",
    403: "A web page whose origin is not allowed, or a key without the required scope",
    404: "Unknown model, adapter or conversation",
    408: "Headers or body took too long to arrive, or the request's deadline has passed",
    409: "The server cannot do this, and nothing has changed; the message says why",
    413: "The body is too large",
    429: "The API key has too many concurrent requests or tokens per minute; see Retry-After",
    431: "The headers are too large",
    500: "The engine ended before the response was complete",
    503: "The server is loading, shutting down or overloaded; see Retry-After",
}
ALWAYS = 400, 401, 403, 408, 431
WITH_ENGINE = 500, 503
GENERATING = *WITH_ENGINE, 429
WITH_BODY = 404, 413
LINE = re.compile(r" *(\w+)  +(\S.*)")  # of a docstring: a field and its description


class Operation(NamedTuple):
    """A route with one method.

    answer      the type of the response's JSON, or a media type
    chunk       the type of a stream's events, if the route can stream
    required    fields of the body without a default
    statuses    error statuses, in addition to ALWAYS
    """

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    answer: Any
    body: type[msgspec.Struct] | None = None
    chunk: Any = None
    required: Sequence[str] = ()
    statuses: Sequence[int] = ()
    error: Any = Error  # the type of an error's JSON
    unavailable: Any = None  # the type of a 503's JSON; None: the same
    is_open: bool = False  # whether clients without a key can use it
    scope: str = ""  # the required scope of an admin key
    # Parameters of the URL's query: schema and description, by name
    query: Mapping[str, tuple[dict[str, Any], str]] = {}

    @property
    def route(self) -> Route:
        return Route(self.path, self.endpoint, methods=[self.method])

    @property
    def key(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")

    @property
    def types(self) -> list[Any]:
        answer = [] if isinstance(self.answer, str) else [self.answer]
        others = self.body, self.chunk, self.error, self.unavailable
        return [t for t in (*answer, *others) if t is not None]


def document(operations: Sequence[Operation], more: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the OpenAPI document. `more` are types to describe in addition to those in use."""
    types = [*dict.fromkeys(t for operation in operations for t in operation.types)]
    types += [t for t in (*more, Error) if t not in types]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    for kind in structs(types):
        describe(components[kind.__name__], kind)
    for operation in operations:
        if operation.body is not None:
            close(components[operation.body.__name__], operation.body, operation.required)
    named = dict(zip(types, schemas, strict=True))
    paths = dict[str, dict[str, Any]]()
    for operation in operations:
        its = paths.setdefault(operation.key, {})
        its[operation.method.lower()] = describe_operation(operation, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "specserve", "version": VERSION, "description": INTRODUCTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # The operator decides whether a key is needed.
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def describe_operation(operation: Operation, named: dict[Any, Any]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", operation.key)
    described: dict[str, Any] = {
        "operationId": operation.endpoint.__name__,
        "summary": operation.summary,
        "responses": responses(operation, named),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    for name, (schema, words) in operation.query.items():
        parameters.append({"name": name, "in": "query", "schema": schema, "description": words})
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": json_of(named[operation.body])}
    if operation.is_open:
        described["security"] = []
    return described


def responses(operation: Operation, named: dict[Any, Any]) -> dict[str, Any]:
    content = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "string"}}
    else:
        content = json_of(named[operation.answer])
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": event_of(named[operation.chunk])}
    statuses = {*ALWAYS, *operation.statuses, *(WITH_BODY if operation.body else ())}
    refused = {str(s): refusal(s, operation, named) for s in sorted(statuses)}
    return {"200": {"description": "The response", "content": content}} | refused


def event_of(chunk: Any) -> dict[str, Any]:
    """Return the schema of a stream, which tools apply to each event."""
    data = {"type": "string", "description": "JSON, or [DONE]", "contentSchema": chunk}
    return {
        "type": "object",
        "description": "A server-sent event, if stream = true.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def refusal(status: int, operation: Operation, named: dict[Any, Any]) -> dict[str, Any]:
    kind = (operation.unavailable if status == 503 else None) or operation.error
    response: dict[str, Any] = {"description": STATUSES[status], "content": json_of(named[kind])}
    if status == 503:
        schema = {"type": "integer", "description": "seconds"}
        response["headers"] = {"Retry-After": {"schema": schema}}
    return response


def json_of(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def close(component: dict[str, Any], kind: type[msgspec.Struct], required: Sequence[str]) -> None:
    """Allow null for optional fields of a body, and forbid unknown fields."""
    fields = component["properties"]
    fields.pop("read_past", None)
    passed = passed_over(kind) if issubclass(kind, Body) else {}
    own = {name: field for name, field in fields.items() if name not in passed}
    needed = {name: not_null(own.pop(name)) for name in required}
    others = {name: or_null(field) for name, field in own.items()}
    for name in UNSET.keys() & others.keys() if passed else ():
        others[name]["anyOf"].append({"const": UNSET[name]})
    component["properties"] = needed | others | passed
    component["required"] = list(required)
    component["additionalProperties"] = False


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    notes = {name: value for name, value in schema.items() if name in ("default", "description")}
    of_type = {name: value for name, value in schema.items() if name not in notes}
    if notes.get("default", ...) is None:
        del notes["default"]
    either = of_type.get("anyOf", [of_type])
    null = {"type": "null"}
    return {"anyOf": either if null in either else [*either, null]} | notes


def not_null(schema: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    either = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    return rest | ({"anyOf": either} if len(either) > 1 else dict(*either))


def structs(types: Sequence[Any]) -> list[type[msgspec.Struct]]:
    """Return all structs among the types and inside them."""
    found = dict[type[msgspec.Struct], None]()

    def visit(value: Any) -> None:
        if isinstance(value, tuple):
            for inner in value:
                visit(inner)
        elif isinstance(value, msgspec.inspect.Type | msgspec.inspect.Field):
            if isinstance(value, msgspec.inspect.StructType):
                if value.cls in found:
                    return
                found[value.cls] = None
            visit(msgspec.structs.astuple(value))

    visit(msgspec.inspect.multi_type_info(types))
    return [*found]


def describe(component: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Add descriptions from docstrings: the first paragraph, and the table of fields."""
    component.pop("description", None)
    about = prose(kind)
    if about:
        component["description"] = about
    lines = dict[str, str]()
    for base in reversed(kind.__mro__):
        lines |= field_lines(base)
    for name, field in component["properties"].items():
        if name in lines:
            field["description"] = lines[name]


def prose(kind: type) -> str:
    own = kind.__dict__.get("__doc__") or ""
    return " ".join(inspect.cleandoc(own).partition("\n\n")[0].split())


def field_lines(kind: type) -> dict[str, str]:
    """Return the table of fields in a docstring.

    A line is a name, two or more spaces and a text. Indented lines continue the text.
    """
    lines, name = dict[str, str](), None
    for line in inspect.cleandoc(kind.__dict__.get("__doc__") or "").splitlines():
        if (found := LINE.fullmatch(line)) and not line.startswith(" "):
            name = found[1]
            lines[name] = found[2]
        elif name is not None and line.startswith("  "):
            lines[name] += f" {line.strip()}"
        else:
            name = None
    return lines
