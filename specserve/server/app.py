"""The ASGI application: observers, the checks of origin and API key, and error responses."""

import hashlib
import hmac
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.errors import RequestError, SpecserveError
from specserve.exchange.fair_queue import owner
from specserve.server.access_log import AccessLog, Ended, Observed
from specserve.server.connection import canonical
from specserve.server.key_limits import KeyLimits
from specserve.server.keys import read_admin_keys, read_keys
from specserve.server.live_completion import set_tenant
from specserve.server.pages import PAGES, PARTS, ROUTES
from specserve.server.refusal import (
    Foreign,
    NoRoute,
    NotAllowed,
    Unauthorized,
    cut,
    error_response,
)
from specserve.server.routes import LIVENESS, OPEN, OPERATIONS, SCOPES
from specserve.server.service import Service
from specserve.server.tracing import Tracer

NO_KEY = "no valid API key: send the header Authorization: Bearer KEY"
ADMIN_ONLY = "this is an admin key, which asks for no text: send a key of server.api_key_file"
PROBES = "/health", "/health/ready", LIVENESS, "/ping"
OPEN_SCOPES = ("cache",)  # to all clients of a server without admin keys
MODEL = re.compile("/+v1/+models/(.+)", re.DOTALL)  # a name may begin with a slash or end with one
POLLED = frozenset([*PROBES, "/metrics", "/v1/speculation", *PAGES, *PARTS])


def make_app(service: Service, tracer: Tracer | None = None) -> Starlette:
    app = Starlette(
        routes=[*(operation.route for operation in OPERATIONS), *ROUTES],
        middleware=list(guards(service, tracer)),
        exception_handlers={
            SpecserveError: refuse,
            HTTPException: refuse_route,
            ClientDisconnect: client_gone,
            Exception: refuse,  # a bug in specserve, which is logged as well
        },
    )
    app.state.service = service
    app.router.redirect_slashes = False  # redirects use the Host header, which clients choose
    return app


def guards(service: Service, tracer: Tracer | None) -> Iterable[Middleware]:
    """Middleware, outermost first: CORS before keys, as preflight requests carry no key."""
    limits = service.limits
    yield Middleware(CanonicalPath, service=service)
    observers: list[Callable[[Ended], None]] = [] if tracer is None else [tracer.record]
    if limits.access_log:
        observers.append(AccessLog(POLLED, limits.log_texts, lambda: service.loaded is None))
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
    keys = None if file is None else read_keys(Path(file))
    admins = {} if admin_file is None else read_admin_keys(Path(admin_file))
    yield Middleware(KeyGuard, keys=keys, admins=admins)
    if limits.max_requests_per_key is not None or limits.max_tokens_per_minute_per_key is not None:
        yield Middleware(KeyLimits, limits=limits, reject=service.reject)


class CanonicalPath:
    """Gives all layers below it one path. No redirect: it would use the client's Host header."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = self.path_of(scope["path"])
        await self.app(scope, receive, send)

    def path_of(self, given: str) -> str:
        model = MODEL.fullmatch(given)
        if model is not None and model[1] in (self.service.name, *self.service.adapters.known):
            return f"/v1/models/{model[1]}"
        return canonical(given)


class OriginGuard:
    """Refuses requests of web pages whose origin is not allowed.

    CORS headers alone do not: browsers send simple requests without a preflight.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], host: str) -> None:
        """`host` is the server's own name."""
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
        error = Foreign(
            f"pages of {cut(origin)} may not call this server: its operator can name them in "
            "server.cors_origins"
        )
        await error_response(error)(scope, receive, send)

    def is_own(self, origin: str, host: str) -> bool:
        """Whether it is one of the server's own pages, by its address or known name. Any other name
        that leads here may be somebody else's (DNS rebinding).
        """
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        return parts.netloc == host and (name in self.names or is_address(name))


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class KeyGuard:
    """Refuses requests without a valid key: what has a scope needs an admin key with it, all else
    an API key, where there are any. What only tells may be asked for with an admin key, too.

    The time that comparing takes does not depend on the key that was sent.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str] | None, admins: Mapping[str, Container[str]]
    ) -> None:
        """Without `keys` only scopes need any."""
        self.app, self.is_public = app, keys is None
        self.keys = [digest(key) for key in keys or ()]
        self.admins = [digest(key) for key in admins]
        self.scopes = [*admins.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.check(scope) if scope["type"] == "http" else None
        await (self.app if error is None else error_response(error))(scope, receive, send)

    def check(self, scope: Scope) -> RequestError | None:
        """Why a request is refused, if it is."""
        tenant, admin = place(scope, self.keys), place(scope, self.admins)
        if tenant is not None:
            set_tenant(scope, tenant)
        owner.set(scope.get("client") if tenant is None else tenant)
        needed = SCOPES.get((scope["method"], scope["path"]))
        if admin is not None and needed is not None:
            return None if needed in self.scopes[admin] else lacking(needed)
        is_reader = admin is not None and scope["method"] in ("GET", "HEAD")
        if not (tenant is not None or is_reader or self.is_public or scope["path"] in OPEN):
            return Unauthorized(ADMIN_ONLY if admin is not None else NO_KEY)
        if needed is None or (needed in OPEN_SCOPES and not self.admins):
            return None
        if not self.admins:
            return NotAllowed(
                "this server was started without admin keys: its operator can name a file of them "
                "in server.admin_key_file (--admin-key-file)"
            )
        return lacking(needed)


def lacking(scope: str) -> NotAllowed:
    return NotAllowed(f"this needs an admin key with the scope {scope}")


def place(scope: Scope, known: Sequence[bytes]) -> int | None:
    """The index of the request's key among those known; None without a valid key."""
    shown = Request(scope).headers.get("authorization", "")
    kind, _, key = shown.partition(" ")
    same = [hmac.compare_digest(digest(key.strip()), each) for each in known]
    return same.index(True) if kind.lower() == "bearer" and any(same) else None


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(error)


async def refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {cut(request.url.path)}"
    routes = ", ".join(dict.fromkeys(operation.route.path for operation in OPERATIONS))
    why = "; specserve generates text only" if error.status_code == 404 else ""
    refusal = NoRoute(f"{where}: {error.detail}{why}; the routes are {routes}")
    refusal.status = error.status_code
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
