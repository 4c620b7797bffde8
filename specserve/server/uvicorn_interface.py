"""Imports undocumented parts of uvicorn and httptools, and checks them for changes.

Releases can change them without notice. The check fails at start-up, not during a request.
"""

import dis
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain

from specserve.errors import ConfigError

REMEDY = "pip install 'uvicorn>=0.54,<0.55' 'httptools>=0.9,<0.10'"  # as in pyproject.toml


def changed(what: str) -> ConfigError:
    versions = f"uvicorn {version('uvicorn')} with httptools {version('httptools')}"
    return ConfigError(f"{versions} cannot be used, because {what} changed. Run {REMEDY}")


try:
    from httptools import HttpParserUpgrade, HttpRequestParser
    from uvicorn.protocols.http.flow_control import FlowControl as FlowControl
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpToolsProtocol
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as RequestResponseCycle
    from uvicorn.server import Server, ServerState
except ImportError as e:
    raise changed(str(e)) from e

# Methods that are called or overridden, with their parameters.
METHODS: dict[type, dict[str, str]] = {
    HttpToolsProtocol: {
        "__init__": "self config server_state app_state _loop",
        "connection_made": "self transport",
        "connection_lost": "self exc",
        "data_received": "self data",
        "pause_writing": "self",
        "resume_writing": "self",
        "on_message_begin": "self",
        "on_url": "self url",
        "on_header": "self name value",
        "on_headers_complete": "self",
        "on_body": "self body",
        "on_message_complete": "self",
        "on_response_complete": "self",
        "_start_asgi_task": "self cycle app",
        "_unset_keepalive_if_required": "self",
    },
    FlowControl: {
        "__init__": "self transport",
        "pause_writing": "self",
        "resume_writing": "self",
    },
    Server: {
        "serve": "self sockets",
        "startup": "self sockets",
        "handle_exit": "self sig frame",
    },
}

# Attributes of their objects, which their methods set.
ATTRIBUTES: dict[type, str] = {
    HttpToolsProtocol: (
        "client connections cycle expect_100_continue flow headers loop parser pipeline scope "
        "transport url"
    ),
    FlowControl: "_is_writable_event _transport read_paused write_paused",
    RequestResponseCycle: (
        "body chunked_encoding disconnected keep_alive message_event response_complete "
        "response_started"
    ),
    Server: "force_exit lifespan server_state servers should_exit started",
    ServerState: "connections",
}


def changes() -> Iterator[str]:
    """Yield the names of all parts that differ from the expected ones."""
    for owner, methods in METHODS.items():
        for name, parameters in methods.items():
            method = vars(owner).get(name)
            if method is None or " ".join(inspect.signature(method).parameters) != parameters:
                yield f"{owner.__name__}.{name}"
    for owner, names in ATTRIBUTES.items():
        assigned = assigned_by(owner)
        yield from (f"{owner.__name__}.{name}" for name in names.split() if name not in assigned)
    if not reports_end_of_upgrade():
        yield "httptools.HttpParserUpgrade"


def assigned_by(owner: type) -> set[str]:
    """Return the names of attributes that its methods assign."""
    methods = filter(inspect.isfunction, vars(owner).values())
    steps = chain.from_iterable(map(dis.get_instructions, methods))
    return {step.argval for step in steps if step.opname == "STORE_ATTR"}


def reports_end_of_upgrade() -> bool:
    head = b"CONNECT a:1 HTTP/1.1\r\n\r\n"
    try:
        HttpRequestParser(object()).feed_data(head + b"rest")
    except HttpParserUpgrade as upgrade:
        return upgrade.args == (len(head),)
    return False


def check() -> None:
    """ConfigError if any part has changed."""
    if found := list(changes()):
        raise changed(", ".join(found))


check()
