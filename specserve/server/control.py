"""Who guesses: told, and changed while requests run."""

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specserve.config import Config
from specserve.errors import ConfigError, RequestError, SpecserveError
from specserve.exchange.guessing import Change, Guesses, Guessing, differences
from specserve.logs import escaped
from specserve.models import preflight
from specserve.models.folder import name_of
from specserve.server.body import read_fields
from specserve.server.live_completion import tenant_of
from specserve.server.refusal import cut
from specserve.server.response import json_response
from specserve.server.service import Service

log = logging.getLogger("specserve")

Asked = Callable[[Guessing], Config]  # ConfigError for what cannot be


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
    chosen: dict[str, Any] = {
        "drafter": config.drafter.name,
        "draft_model": draft_model,
        "draft_head": None if served.draft_head is None else served.draft_head.name,
        "options": options,
    }
    if served.row_invariant is not None:
        chosen["row_invariant"] = served.row_invariant
    if served.row_invariant is False:  # whoever was to guess does not
        chosen |= {"drafter": "none", "options": {}}
    targets = {"ttft_ms": config.scheduler.ttft_ms, "tpot_ms": config.scheduler.tpot_ms}
    targets["min_tpot_ms"] = config.min_tpot_ms
    return json_response({"object": "speculation"} | chosen | state | {"slo": targets})


async def change_speculation(request: Request) -> Response:
    return await changed(request, change_asked)


async def load_draft_model(request: Request) -> Response:
    return await changed(request, draft_model_asked)


async def remove_draft_model(request: Request) -> Response:
    return await changed(request, lambda _: Guessing.without_draft_model)


def change_asked(raw: bytes) -> Asked:
    change = read_fields(raw, Change)
    return lambda guessing: guessing.changed(change)


def draft_model_asked(raw: bytes) -> Asked:
    asked = read_fields(raw, DraftModelBody)
    model = asked.model
    if model is None:
        raise RequestError(
            "model: name the draft model: a folder, a .gguf file or a hub id", "model"
        )
    return lambda guessing: guessing.with_draft_model(model, asked.quantize)


async def changed(request: Request, read: Callable[[bytes], Asked]) -> Response:
    """Have the engine guess as the body asks; the state of speculation then. The log tells what
    differs, or why nothing does.
    """
    service: Service = request.app.state.service
    service.check_open()
    try:
        before, after = await change(service, read(await service.bodies.read(request)))
    except (SpecserveError, OSError) as e:
        log.info("speculation stays as it is: %s", escaped(cut(str(e))))
        if isinstance(e, ConfigError | OSError):  # a path may be one that the system refuses
            raise RequestError(str(e)) from e
        raise
    log.info("speculation is changed: %s", differences(before, after))
    return await told(request)


async def change(service: Service, asked: Asked) -> tuple[Guesses, Guesses]:
    """By what the engine guessed, and guesses from the next step on."""
    before: list[Guesses] = []

    def find() -> Config:
        config = asked(service.guessing)
        preflight.check(config)
        return config

    async def checked() -> Config:
        config = await asyncio.to_thread(find)
        before.append(service.guesses)  # once the changes before it are done
        return config

    await service.engine.change(checked)
    return before[0], service.guesses
