"""Routes that save, load and pin the KV of conversations."""

import logging
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.logs import escaped
from specserve.server.body import read_fields
from specserve.server.completion import Service
from specserve.server.protocol import SessionStatus
from specserve.server.refusal import StatusError, cut, json_response

log = logging.getLogger("specserve")

SessionName = Annotated[str, msgspec.Meta(min_length=1)]


class SessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation: all requests with one `prompt_cache_key`, of all API keys.

    prompt_cache_key  the field of these requests
    """

    prompt_cache_key: SessionName | None = None


class PinBody(SessionBody, frozen=True, kw_only=True):
    """A conversation to pin, or to unpin.

    prompt_cache_key  the field of its requests
    pinned          false: its blocks may be evicted again
    """

    pinned: bool = True


async def save_session(request: Request) -> Response:
    return await run(request, "save")


async def load_session(request: Request) -> Response:
    return await run(request, "load")


async def pin_session(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked = read_fields(await service.bodies.read(request), PinBody)
    return await done(service, "pin" if asked.pinned else "unpin", asked.prompt_cache_key)


async def run(request: Request, action: Literal["save", "load"]) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked = read_fields(await service.bodies.read(request), SessionBody)
    return await done(service, action, asked.prompt_cache_key)


async def done(
    service: Service, action: Literal["save", "load", "pin", "unpin"], session: str | None
) -> Response:
    """Run a task of the engine, and report the blocks of the conversation."""
    if session is None:
        raise RequestError("prompt_cache_key is missing. Send it", "prompt_cache_key")
    report = await service.engine.session(action, session)
    if report.refusal:
        raise StatusError(409, report.refusal)
    if report.num_blocks == 0:
        message = (
            f"prompt_cache_key: no conversation {cut(session)!r} is known. Send its text first"
        )
        raise StatusError(404, message, param="prompt_cache_key")
    log.info("conversation %s: %s", escaped(cut(session)), action)
    counts = report.num_blocks, report.num_in_memory, report.num_on_disk
    return json_response(SessionStatus(session, *counts))
