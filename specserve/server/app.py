"""The ASGI application: its routes, the checks of origin and API key, and its error responses."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.errors import SpecserveError
from specserve.keys import read_keys
from specserve.server.chat import chat
from specserve.server.completions import completions
from specserve.server.live_completion import set_tenant
from specserve.server.refusal import Foreign, NoRoute, Unauthorized, cut, error_response
from specserve.server.response import json_response
from specserve.server.service import ServedModel, Service
from specserve.server.texts import detokenize, tokenize
from specserve.version import VERSION

LIVENESS = "/health/live"  # needs no API key: it reveals only whether the engine runs


def make_app(service: Service) -> Starlette:
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{id:path}", show_model),
        Route("/v1/speculation", speculation),
        Route("/v1/cache/reset", reset_cache, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", ready),
        Route("/health/ready", ready),
        Route(LIVENESS, live),
        Route("/metrics", metrics),
        Route("/version", version),
    ]
    app = Starlette(
        routes=routes,
        middleware=list(guards(service)),
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


def guards(service: Service) -> Iterable[Middleware]:
    """Middleware, outermost first: CORS before keys, as preflight requests carry no key."""
    limits = service.limits
    yield Middleware(OriginGuard, origins=limits.cors_origins)
    if limits.cors_origins:
        yield Middleware(
            CORSMiddleware,
            allow_origins=limits.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    if limits.api_key_file is not None:
        yield Middleware(KeyGuard, keys=read_keys(Path(limits.api_key_file)))


class OriginGuard:
    """Refuses requests of web pages whose origin is not allowed.

    CORS headers alone do not: browsers send simple requests without a preflight.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Request(scope).headers.get("origin") if scope["type"] == "http" else None
        if origin is None or origin in self.origins or "*" in self.origins:
            await self.app(scope, receive, send)
            return
        error = Foreign(
            f"pages of {cut(origin)} may not call this server: its operator can name them in "
            "server.cors_origins"
        )
        await error_response(error)(scope, receive, send)


class KeyGuard:
    """Refuses requests without a valid API key.

    The time that comparing takes does not depend on the key that was sent.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app, self.keys = app, [digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self.tenant(scope) if scope["type"] == "http" else None
        if tenant is not None:
            set_tenant(scope, tenant)
        if tenant is not None or scope["type"] != "http" or scope["path"] == LIVENESS:
            await self.app(scope, receive, send)
            return
        error = Unauthorized("no valid API key: send the header Authorization: Bearer KEY")
        await error_response(error)(scope, receive, send)

    def tenant(self, scope: Scope) -> int | None:
        """The index of the request's API key in the key file; None without a valid key."""
        shown = Request(scope).headers.get("authorization", "")
        kind, _, key = shown.partition(" ")
        same = [hmac.compare_digest(digest(key.strip()), known) for known in self.keys]
        return same.index(True) if kind.lower() == "bearer" and any(same) else None


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(error)


async def refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {cut(request.url.path)}"
    routes = ", ".join(route.path for route in request.app.routes)
    refusal = NoRoute(f"{where}: {error.detail}; the routes are {routes}")
    refusal.status = error.status_code
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"object": "list", "data": [card(service)]})


async def show_model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(request.path_params["id"])
    return json_response(card(service))


def card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "specserve",
        "root": service.name,
        "parent": None,
        "max_model_len": service.input_processor.max_model_len if service.loaded else None,
        **(details(service.served) if service.loaded else {}),
    }


def details(served: ServedModel) -> dict[str, Any]:
    """Fields that OpenAI lacks: the drafter, its limit and sources, the forms of weights and KV,
    how tool calls and reasoning are read, and which models are scaled demos.
    """
    kept = {"weights": served.weights, "kv_dtype": served.kv_dtype}
    fields = {"drafter": served.drafter, "max_nodes": served.max_nodes, **kept}
    fields["sources"] = served.sources
    fields["tool_parser"], fields["reasoning_parser"] = (
        served.formats.tools,
        served.formats.reasoning,
    )
    if served.draft_weights is not None:
        fields["draft_weights"] = served.draft_weights
    if served.scaled:
        fields["scaled"] = served.scaled
    return fields


async def speculation(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    state = msgspec.structs.asdict(await service.engine.speculation())
    config = service.config
    targets = {"ttft_ms": config.scheduler.ttft_ms, "tpot_ms": config.scheduler.tpot_ms}
    targets["min_tpot_ms"] = config.min_tpot_ms
    return json_response({"object": "speculation"} | state | {"slo": targets})


async def reset_cache(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    await service.engine.reset_cache()
    return json_response({"status": "reset"})


async def ready(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"status": "ready"}) if service.is_ready else unavailable("not ready")


async def live(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"status": "alive"}) if service.is_alive else unavailable("engine dead")


def unavailable(status: str) -> Response:
    return json_response({"status": status}, 503, {"Retry-After": "1"})


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    return json_response({"version": VERSION})
