"""The pages of people: the files of the folder `page`, as they are."""

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def headers(allowed: str) -> dict[str, str]:
    """Of a page that loads and runs nothing but what is `allowed`, and that no other one frames."""
    return {
        "Content-Security-Policy": f"default-src 'none'; {allowed}; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


HEADERS = headers("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")


def redirected(request: Request) -> Response | None:
    """To the same page without slashes at its end, as its links are relative. So is this one: it
    leads to no other server.
    """
    given: str = request.scope.get("raw_path", b"").decode()  # optional in ASGI
    bare = given.rstrip("/")
    up = "../" * (len(given) - len(bare))
    return RedirectResponse(up + bare.rpartition("/")[2]) if up and bare else None


def serving(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = (FOLDER / name).read_bytes()  # at start: all files are of one version
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def send(request: Request) -> Response:
        if (away := redirected(request)) is not None:
            return away
        told = HEADERS | {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):  # W/"..." too, and in a list
            return Response(status_code=304, headers=told)
        return Response(body, headers=told, media_type=TYPES[Path(name).suffix])

    return send


PAGES = {"/": "index.html", "/dashboard": "dashboard.html"}
PARTS = {f"/page/{p.name}": p.name for p in sorted(FOLDER.iterdir()) if p.suffix in TYPES}
ROUTES = [Route(path, serving(name)) for path, name in (PAGES | PARTS).items()]
