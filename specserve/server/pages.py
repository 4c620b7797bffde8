"""Serves the web pages: the files of the folders in `page`, without comments and indentation."""

import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
UNSENT = re.compile(rb"^[ \t]*(?://.*)?", re.MULTILINE)
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def headers(allowed: str) -> dict[str, str]:
    """Return headers of a page that only loads `allowed` content, and that pages cannot frame."""
    return {
        "Content-Security-Policy": f"default-src 'none'; {allowed}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


HEADERS = headers("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")


def redirected(request: Request) -> Response | None:
    """Return a redirect to the page without trailing slashes, because its links are relative.

    The redirect is relative, so that it cannot lead to another server.
    """
    given: str = request.scope.get("raw_path", b"").decode()  # optional in ASGI
    bare = given.rstrip("/")
    up = "../" * (len(given) - len(bare))
    return RedirectResponse(up + bare.rpartition("/")[2]) if up and bare else None


def sent(name: str) -> bytes:
    """Return a file without indentation and comment lines. The numbers of lines stay the same."""
    return UNSENT.sub(b"", (FOLDER / name).read_bytes())


def serving(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = sent(name)  # at start-up, so that all files have the same version
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def send(request: Request) -> Response:
        if (away := redirected(request)) is not None:
            return away
        added = HEADERS | {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):  # also in W/"..." and in lists
            return Response(status_code=304, headers=added)
        return Response(body, headers=added, media_type=TYPES[Path(name).suffix])

    return send


PAGES = {"/": "chat/index.html", "/dashboard": "dashboard/index.html"}
FILES = sorted(path for path in FOLDER.rglob("*.*") if path.suffix in TYPES)
NAMES = [path.relative_to(FOLDER).as_posix() for path in FILES]
PARTS = {f"/page/{name}": name for name in NAMES if name not in PAGES.values()}
ROUTES = [Route(path, serving(name)) for path, name in (PAGES | PARTS).items()]
