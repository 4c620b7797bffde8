"""The ASGI application: the access log, checks of origin and API key, and error responses."""

import difflib
import hashlib
import hmac
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.config import ServerConfig
from specserve.errors import RequestError, SpecserveError
from specserve.exchange.fair_queue import owner
from specserve.logs import request_id
from specserve.server.completion import (
    ACCOUNT,
    ASKED,
    TENANT,
    EndedRequest,
    LiveCompletion,
    Service,
    at_end,
    tenant_of,
)
from specserve.server.connection import canonical, log_request
from specserve.server.keys import read_admin_keys, read_keys
from specserve.server.limits import Account
from specserve.server.pages import PAGES, PARTS, ROUTES
from specserve.server.refusal import (
    RateLimited,
    StatusError,
    cut,
    error_response,
)
from specserve.server.routes import DASHBOARD, LIVENESS, OPEN, OPERATIONS, SCOPES
from specserve.server.tracing import Tracer

LONGEST_TEXT = 2000  # maximum characters of a prompt or a response in the log
NO_TENANT = -1  # of clients without a key on open routes: no data of any API key
# Ollama's routes that change models on the server: an operator chooses the model at start-up.
OF_OLLAMA = {
    f"/api/{name}"
    for name in ("blobs", "copy", "create", "delete", "me", "pull", "push", "signout")
}
LIMITED_ROUTES = frozenset(o.path for o in OPERATIONS if 429 in o.statuses)


def make_app(
    service: Service, tracer: Tracer | None = None, keys: Sequence[str] | None = None
) -> Starlette:
    """`keys` are those of the file, if it was read already: each read may find other keys."""
    app = Starlette(
        routes=[*(operation.route for operation in OPERATIONS), *ROUTES],
        middleware=list(guards(service, tracer, keys)),
        exception_handlers={
            SpecserveError: refuse,
            HTTPException: refuse_route,
            ClientDisconnect: lambda request, error: Response(status_code=499),
            Exception: refuse,  # a bug in specserve, which is also logged
        },
    )
    app.state.service = service
    app.router.redirect_slashes = False  # redirects would use the client's Host header
    return app


def guards(
    service: Service, tracer: Tracer | None, keys: Sequence[str] | None
) -> Iterable[Middleware]:
    """Yield middleware, outermost first. CORS precedes keys: preflight requests have no key."""
    limits = service.limits
    yield Middleware(CanonicalPath, service=service)
    observers: list[Callable[[EndedRequest], None]] = [] if tracer is None else [tracer.record]
    if limits.access_log:
        probes = "/health", "/health/ready", LIVENESS, "/ping"
        state = "/metrics", "/metrics/history", "/v1/speculation", "/is_sleeping", "/api/ps"
        polled = frozenset([*probes, *state, *PAGES, *PARTS])
        observers.append(AccessLog(polled, limits.log_texts, lambda: service.loaded is None))
    if observers:
        yield Middleware(Observed, observers=observers)
    yield Middleware(OriginGuard, origins=limits.cors_origins, host=limits.host)
    if limits.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=limits.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    file, admin_file = limits.api_key_file, limits.admin_key_file
    if keys is None and file is not None:
        keys = read_keys(Path(file))
    admins = {} if admin_file is None else read_admin_keys(Path(admin_file))
    readable = DASHBOARD if limits.open_dashboard else frozenset[str]()
    yield Middleware(KeyGuard, keys=keys, admins=admins, readable=readable)
    if limits.max_requests_per_key is not None or limits.max_tokens_per_minute_per_key is not None:
        yield Middleware(KeyLimits, limits=limits, reject=service.reject)


class Observed:
    """Calls observers for each request that has ended."""

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[EndedRequest], None]]) -> None:
        self.app, self.observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ASKED] = []
        ended = EndedRequest({}, scope[ASKED], perf_counter(), request_id.get())

        async def send_noted(message: Message) -> None:
            ended.status = message.get("status", ended.status)
            await send(message)

        with at_end(scope, partial(self.notify, ended)):
            try:
                await self.app(scope, receive, send_noted)
            finally:
                kept = "type", "method", "path", "headers", "server", TENANT
                ended.scope = {key: scope[key] for key in kept if key in scope}

    def notify(self, ended: EndedRequest) -> None:
        for observe in self.observers:
            observe(ended)
        ended.asked.clear()  # frees completions: the scope lives until the next request


class AccessLog:
    """Logs a line for each request that has ended.

    Requests of polled paths are logged only if they failed. While the model loads, clients poll
    any route; then only the first 503 of each route is logged.
    """

    def __init__(
        self, polled: Collection[str], has_texts: bool, is_loading: Callable[[], bool]
    ) -> None:
        self.polled, self.has_texts, self.is_loading = polled, has_texts, is_loading
        self.waiting: set[tuple[str, str]] = set()  # methods and paths whose 503 was logged

    def __call__(self, ended: EndedRequest) -> None:
        path, status = ended.scope["path"], ended.status
        if path in self.polled and status in (200, 304):
            return
        if status == 503 and self.is_loading():
            route = ended.scope["method"], path
            if route in self.waiting:
                return
            self.waiting.add(route)
        tenant = ended.scope.get(TENANT)  # unset without keys, and without a valid key
        tenant = None if tenant == NO_TENANT else tenant
        fields: dict[str, Any] = {} if tenant is None else {"key": tenant + 1}
        for completion in ended.asked:
            fields |= completion.log_fields | (texts(completion) if self.has_texts else {})
        seconds = perf_counter() - ended.received_at
        log_request(ended.scope["method"], path, status, seconds, fields, ended.request_id)


def texts(completion: LiveCompletion) -> dict[str, str]:
    """Return the first characters of the prompts and of the choices' texts, one per line."""
    # A token has at least one byte, and a character at most four.
    prompts = [g.stream.tokenizer.decode(g.prompt[: 4 * LONGEST_TEXT]) for g in completion.firsts]
    outputs = [g.text for g in completion.generations]
    return {"prompt": "\n".join(prompts)[:LONGEST_TEXT], "text": "\n".join(outputs)[:LONGEST_TEXT]}


class CanonicalPath:
    """Normalizes the path for all layers below. A redirect would use the client's Host header."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = self.path_of(scope["path"])
        await self.app(scope, receive, send)

    def path_of(self, given: str) -> str:
        # The name of a model can begin or end with a slash.
        model = re.fullmatch("/+v1/+models/(.+)", given, re.DOTALL)
        if model is not None and model[1] in (self.service.name, *self.service.adapters.known):
            return f"/v1/models/{model[1]}"
        return canonical(given)


class OriginGuard:
    """Refuses requests of web pages whose origin is not allowed.

    CORS headers are not enough, because browsers send simple requests without a preflight.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], host: str) -> None:
        """Allow these origins, and pages of the server itself, whose name is `host`."""
        self.app, self.origins = app, origins
        self.names = {"localhost", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Request(scope).headers if scope["type"] == "http" else {}
        origin = headers.get("origin")
        if (
            origin is None
            or origin in self.origins
            or "*" in self.origins
            or self.is_own(origin, headers.get("host", ""))
        ):
            await self.app(scope, receive, send)
            return
        error = StatusError(
            403,
            f"web pages of {cut(origin)} may not call this server. Its operator can add the origin "
            "to server.cors_origins",
            "origin_not_allowed",
        )
        await error_response(error, scope["path"])(scope, receive, send)

    def is_own(self, origin: str, host: str) -> bool:
        """Whether the origin is the server itself, under an IP address or a known name.

        Another name that resolves to the server can belong to an attacker (DNS rebinding).
        """
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        if name not in self.names:
            try:
                ip_address(name)
            except ValueError:
                return False
        return parts.netloc == host


class KeyGuard:
    """Refuses requests without a valid key.

    Routes with a scope need an admin key with this scope. All other routes need an API key, if the
    server has API keys; GET and HEAD also accept an admin key. The time of a comparison does not
    depend on the key in the request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str] | None,
        admins: Mapping[str, Container[str]],
        readable: Container[str] = (),
    ) -> None:
        """If `keys` is None, only routes with a scope need a key.

        Clients without a key can read the paths of `readable`.
        """
        self.readable = readable
        self.app, self.is_public = app, keys is None
        self.keys = [digest(key) for key in keys or ()]
        self.admins = [digest(key) for key in admins]
        self.scopes = [*admins.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.check(scope) if scope["type"] == "http" else None
        app = self.app if error is None else error_response(error, scope["path"])
        await app(scope, receive, send)

    def check(self, scope: Scope) -> RequestError | None:
        """Return the error of a request without a sufficient key, else None."""
        tenant, admin = place(scope, self.keys), place(scope, self.admins)
        if tenant is not None:
            scope[TENANT] = tenant
        owner.set(scope.get("client") if tenant is None else tenant)
        needed = SCOPES.get((scope["method"], scope["path"]))
        if admin is not None and needed is not None:
            return None if needed in self.scopes[admin] else lacking(needed)
        is_read = scope["method"] in ("GET", "HEAD")
        is_open = scope["path"] in OPEN or (is_read and scope["path"] in self.readable)
        is_known = tenant is not None or self.is_public or (admin is not None and is_read)
        if is_open and not is_known:
            scope[TENANT] = NO_TENANT
        if not (is_known or is_open):
            why = "no valid API key. Send the header Authorization: Bearer KEY, or x-api-key: KEY"
            if admin is not None:
                why = "this is an admin key, which cannot generate text. Send a key of "
                why += "server.api_key_file"
            return StatusError(401, why, "invalid_api_key")
        # Without admin keys, all clients can reset the cache.
        if needed is None or (scope["path"] == "/v1/cache/reset" and not self.admins):
            return None
        if not self.admins:
            return StatusError(
                403,
                "this server has no admin keys. Its operator can set a file of admin keys in "
                "server.admin_key_file (--admin-key-file)",
                "admin_key_needed",
            )
        return lacking(needed)


class KeyLimits:
    """Limits the requests of each API key on generating routes, and sends x-ratelimit headers."""

    def __init__(self, app: ASGIApp, limits: ServerConfig, reject: Callable[[str], None]) -> None:
        self.app = app
        most = limits.max_requests_per_key, limits.max_tokens_per_minute_per_key
        self.accounts = defaultdict[int, Account](lambda: Account(*most, reject))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] not in LIMITED_ROUTES
            or scope["method"] != "POST"
        ):
            await self.app(scope, receive, send)
            return
        account = self.accounts[tenant_of(scope)]

        async def send_reported(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers)
            await send(message)

        try:
            account.enter()
        except RateLimited as e:
            await error_response(e, scope["path"])(scope, receive, send_reported)
            return
        with at_end(scope, account.leave):
            scope[ACCOUNT] = account
            await self.app(scope, receive, send_reported)


def lacking(scope: str) -> StatusError:
    message = f"this route needs an admin key with the scope {scope}. Send one"
    return StatusError(403, message, "admin_key_needed")


def place(scope: Scope, known: Sequence[bytes]) -> int | None:
    """Return the index of the request's key in `known`; None without a valid key.

    Clients of Anthropic's API send x-api-key. Some also send a token of another service as Bearer.
    """
    headers = Request(scope).headers
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    shown = [bearer] if kind.lower() == "bearer" else []
    shown += [key for key in [headers.get("x-api-key")] if key is not None]
    digests = [digest(key.strip()) for key in shown]
    same = [hmac.compare_digest(its, each) for its in digests for each in known]
    return same.index(True) % len(known) if any(same) else None


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


def methods_of(request: Request) -> list[str]:
    """Return the methods of all routes that match the request's path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [r for r in routes if r.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


async def refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {cut(request.url.path)}"
    routes = dict.fromkeys(operation.route.path for operation in OPERATIONS)
    near = difflib.get_close_matches(request.url.path[:100], routes, n=1, cutoff=0)
    message = f"{where}: not found. The nearest route is {near[0]}; /openapi.json has all routes"
    if error.status_code == 405:
        methods = methods_of(request)
        message = f"{where}: wrong method. Use {' or '.join(methods)}"
        error.headers = {"Allow": ", ".join(methods)}
    if any(f"{request.url.path}/".startswith(f"{path}/") for path in OF_OLLAMA):
        message = (
            f"{where}: not offered, because the server has one model, which it loads at start-up. "
            "Start `specserve serve MODEL` for another model. GET /api/tags lists the model"
        )
    if (meant := f"/v1{request.url.path}") in routes:
        message = f"{where}: not found. Use {meant}: the client's base URL must end with /v1"
    response = error_response(StatusError(error.status_code, message), request.url.path)
    response.headers.update(error.headers or {})
    return response
