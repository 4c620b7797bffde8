"""Routes that report and change speculation while requests run."""

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from specserve.config import Config
from specserve.errors import ConfigError, RequestError, SpecserveError
from specserve.exchange.speculation_control import (
    Change,
    SpeculationControl,
    SpeculationSettings,
    differences,
    settings_of,
)
from specserve.logs import escaped
from specserve.models import preflight
from specserve.models.folder import name_of
from specserve.server.body import read_fields
from specserve.server.completion import Service, tenant_of
from specserve.server.protocol import SpeculationStatus, Targets
from specserve.server.refusal import cut, json_response

log = logging.getLogger("specserve")


class DraftModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model to load.

    model     a folder on the server, a .gguf file or a hub id
    quantize  w8a8, w8 or w4: round the weights while loading
    """

    model: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    quantize: Literal["w8a8", "w8", "w4"] | None = None


async def speculation(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    return await status_of(request)


async def status_of(request: Request) -> Response:
    service: Service = request.app.state.service
    state = await service.engine.speculation(tenant_of(request.scope))
    config, served = service.speculation.config, service.served
    is_off = served.row_invariant is False  # then the engine ignores the configured drafter
    options = {k: v for k, v in config.drafter.options.items() if k != "sources"}
    ttft_ms, tpot_ms = config.scheduler.ttft_ms, config.scheduler.tpot_ms
    status = SpeculationStatus(
        drafter="none" if is_off else config.drafter.name,
        draft_model=None if served.draft_weights is None else name_of(str(config.draft)),
        draft_head=None if served.draft_head is None else served.draft_head.name,
        options={} if is_off else options,
        sources=[*state.sources],
        known_sources=[*state.known_sources],
        max_nodes=state.max_nodes,
        max_step_nodes=state.max_step_nodes,
        costs=state.costs,
        plain_steps=state.plain_steps,
        calibration=state.calibration,
        plan=state.plan,
        slo=Targets(ttft_ms, tpot_ms, config.min_tpot_ms),
        row_invariant=UNSET if served.row_invariant is None else served.row_invariant,
    )
    return json_response(status)


async def change_speculation(request: Request) -> Response:
    return await changed(request, change_asked)


async def load_draft_model(request: Request) -> Response:
    return await changed(request, draft_model_asked)


async def remove_draft_model(request: Request) -> Response:
    return await changed(request, lambda _: SpeculationControl.without_draft_model)


def change_asked(raw: bytes) -> Callable[[SpeculationControl], Config]:
    change = read_fields(raw, Change)
    return lambda control: control.changed(change)


def draft_model_asked(raw: bytes) -> Callable[[SpeculationControl], Config]:
    asked = read_fields(raw, DraftModelBody)
    model = asked.model
    if model is None:
        raise RequestError("model: missing. Send a folder, a .gguf file or a hub id", "model")
    return lambda control: control.with_draft_model(model, asked.quantize)


async def changed(
    request: Request, read: Callable[[bytes], Callable[[SpeculationControl], Config]]
) -> Response:
    """Change speculation as the body requests, and return its new state.

    Logs the differences, or the reason why nothing changed.
    """
    service: Service = request.app.state.service
    service.check_open()
    try:
        difference = await change(service, read(await service.bodies.read(request)))
    except (SpecserveError, OSError) as e:
        log.info("speculation is unchanged: %s", escaped(cut(str(e))))
        if isinstance(e, ConfigError | OSError):  # OSError: the system refuses a path
            raise RequestError(str(e)) from e
        raise
    log.info("speculation changed: %s", difference)
    return await status_of(request)


async def change(service: Service, asked: Callable[[SpeculationControl], Config]) -> str:
    """Change speculation from the next step on. Return the differences, in words."""
    before: list[SpeculationSettings] = []

    def settings() -> SpeculationSettings:
        served = service.served
        has_draft_model = served.draft_weights is not None
        return settings_of(service.speculation.config, served.sources, has_draft_model)

    def find() -> Config:
        config = asked(service.speculation)
        preflight.check(config)
        return config

    async def checked() -> Config:
        config = await asyncio.to_thread(find)
        before.append(settings())  # after earlier changes are complete
        return config

    await service.engine.change(checked)
    return differences(before[0], settings())
