"""Routes that release the memory of the engine, and restore it. Their parameters are vLLM's."""

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import ConfigError, RequestError
from specserve.exchange.sleep import MODES, SLEEP_TAGS, SleepState, check_sleep, checked_tags
from specserve.server.completion import Service
from specserve.server.protocol import SleepStatus
from specserve.server.refusal import StatusError, cut, json_response

log = logging.getLogger("specserve")

# OpenAPI's schemas and descriptions of query parameters, by name
ONE_TAG = {"type": "string", "enum": [*SLEEP_TAGS]}
OF_SLEEP: dict[str, tuple[dict[str, Any], str]] = {
    "level": (
        {"type": "integer", "enum": [1, 2], "default": 1},
        "1 keeps the weights in host memory; 2 drops them, and wake-up reads them again",
    ),
    "mode": (
        {"type": "string", "enum": [*MODES], "default": "abort"},
        "running requests: abort ends them with an error, wait waits for their end, keep continues "
        "them after the wake-up",
    ),
}
OF_WAKE_UP: dict[str, tuple[dict[str, Any], str]] = {
    "tags": (
        {"type": "array", "items": ONE_TAG, "minItems": 1},
        "the parts to wake up; can be repeated; both by default",
    ),
}


async def sleep(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    query = await query_of(request, OF_SLEEP)
    for name, values in query.items():
        if len(values) > 1:
            raise RequestError(f"{name}: sent {len(values)} times. Send it once", name)
    [level], [mode] = query.get("level", ["1"]), query.get("mode", ["abort"])
    check_sleep(int(level) if level in ("1", "2") else level, mode)
    try:
        state = await service.sleep_control.sleep(int(level), mode)
    except ConfigError as e:
        raise StatusError(409, str(e), "cannot_sleep") from e
    log.info("sleep: level %d, mode %s", state.level, mode)
    return status_of_sleep(state)


async def wake_up(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    query = await query_of(request, OF_WAKE_UP)
    tags = checked_tags(query.get("tags"))
    try:
        state = await service.sleep_control.wake_up(tags)
    except ConfigError as e:
        log.error("wake-up failed: %s", e)
        raise StatusError(409, str(e), "cannot_wake_up") from e
    log.info("wake-up: %s", f"{' and '.join(state.tags)} still asleep" if state.tags else "awake")
    return status_of_sleep(state)


async def is_sleeping(request: Request) -> Response:
    service: Service = request.app.state.service
    return status_of_sleep(service.engine.sleep_state)


def status_of_sleep(state: SleepState) -> Response:
    return json_response(SleepStatus(state.level > 0, state.level, [*state.tags]))


async def query_of(request: Request, known: dict[str, Any]) -> dict[str, list[str]]:
    """Return the query parameters. RequestError for an unknown one, or for a body."""
    service: Service = request.app.state.service
    if await service.bodies.read(request):
        raise RequestError(f"this route takes no body. Send {', '.join(known)} in the URL's query")
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{cut(name)}: unknown. The parameters are {', '.join(known)}", name)
    return {name: request.query_params.getlist(name) for name in request.query_params}
