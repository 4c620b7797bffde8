"""Who guesses: told, and changed while requests run."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specserve import preflight
from specserve.config import Config
from specserve.errors import ConfigError, RequestError
from specserve.guessing import Change
from specserve.models.folder import name_of
from specserve.server.body import read_fields
from specserve.server.live_completion import tenant_of
from specserve.server.response import json_response
from specserve.server.service import Service


class DraftModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which draft model guesses from now on.

    model     a local folder of the server, a .gguf file or a hub id
    quantize  w8a8, w8 or w4: its weights are rounded as they are loaded
    """

    model: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    quantize: Literal["w8a8", "w8", "w4"] | None = None


async def speculation(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    return await told(request)


async def told(request: Request) -> Response:
    service: Service = request.app.state.service
    state = msgspec.structs.asdict(await service.engine.speculation(tenant_of(request.scope)))
    del state["tenant"]
    config, served = service.guessing.config, service.served
    draft_model = None if served.draft_weights is None else name_of(str(config.draft))
    options = {k: v for k, v in config.drafter.options.items() if k != "sources"}
    chosen = {"drafter": config.drafter.name, "draft_model": draft_model, "options": options}
    targets = {"ttft_ms": config.scheduler.ttft_ms, "tpot_ms": config.scheduler.tpot_ms}
    targets["min_tpot_ms"] = config.min_tpot_ms
    return json_response({"object": "speculation"} | chosen | state | {"slo": targets})


async def change_speculation(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    change = read_fields(await service.bodies.read(request), Change)
    return await changed(request, lambda: service.guessing.changed(change))


async def load_draft_model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked = read_fields(await service.bodies.read(request), DraftModelBody)
    model = asked.model
    if model is None:
        raise RequestError(
            "model: name the draft model: a folder, a .gguf file or a hub id", "model"
        )
    return await changed(request, lambda: service.guessing.with_draft_model(model, asked.quantize))


async def remove_draft_model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    return await changed(request, service.guessing.without_draft_model)


async def changed(request: Request, find: Callable[[], Config]) -> Response:
    """Have the engine guess as the config says that is found; the state of speculation then."""

    service: Service = request.app.state.service

    async def checked() -> Config:
        config = find()
        await asyncio.to_thread(preflight.check, config)
        return config

    try:
        await service.engine.change(checked)
    except (ConfigError, OSError) as e:  # a path may be one that the system refuses
        raise RequestError(str(e)) from e
    return await told(request)
