"""The path that routes, guards and logs see, whatever slashes a client sends."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from specserve.server.service import Service

SLASHES = re.compile("/+")
MODEL = re.compile("/+v1/+models/(.+)", re.DOTALL)  # a name may begin with a slash or end with one


def canonical(path: str) -> str:
    """Without empty segments, and without a slash at the end."""
    return SLASHES.sub("/", path).rstrip("/") or "/"


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
