"""Routes that load and unload adapters while the server runs."""

import asyncio
import logging
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specserve.config import LoraConfig
from specserve.errors import ConfigError, RequestError
from specserve.exchange.messages import AdapterRef
from specserve.logs import escaped
from specserve.models.folder import download, name_of
from specserve.server.body import read_fields
from specserve.server.completion import Service
from specserve.server.protocol import AdapterDetails, Deleted, ModelCard
from specserve.server.refusal import StatusError, cut, json_response

log = logging.getLogger("specserve")

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
AdapterText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter in peft's format.

    lora_name     its name, which requests send as `model`
    lora_path     its folder below lora.folder of the server; also a hub id if lora.allow_hub is set
    load_inplace  true replaces the adapter with this name; running requests keep the old one
    """

    lora_name: AdapterText | None = None
    lora_path: AdapterText | None = None
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to unload. Running requests keep it; new requests cannot choose it."""

    lora_name: AdapterText | None = None


async def load_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_open()
    asked = read_fields(await service.bodies.read(request), LoadAdapterBody)
    name, path = given("lora_name", asked.lora_name), given("lora_path", asked.lora_path)
    field = "lora_name"
    try:
        async with service.adapter_changes:  # one at a time
            service.adapters.check_new(name, asked.load_inplace)
            field = "lora_path"
            folder = await asyncio.to_thread(find_folder, service.config.lora, path)
            ref = await service.engine.load_adapter(str(folder))
            service.check_open()
            service.name_adapter(name, ref)
    except (ConfigError, OSError) as e:  # OSError: the system refuses the path
        log.info("adapter not loaded: %s", escaped(cut(str(e))))
        raise RequestError(str(e), field) from e
    log.info("adapter %s loaded (SHA-256 %s)", escaped(cut(name)), ref.digest)
    return json_response(adapter_card(service, name, ref))


async def unload_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    asked = read_fields(await service.bodies.read(request), UnloadAdapterBody)
    name = given("lora_name", asked.lora_name)
    async with service.adapter_changes:
        if name not in service.adapters.known:
            message = f"lora_name: unknown adapter {cut(name)!r}. GET /v1/models lists all"
            raise StatusError(404, message, param="lora_name")
        service.forget_adapter(name)
    log.info("adapter %s unloaded", escaped(cut(name)))
    return json_response(Deleted(name, deleted=True))


def adapter_card(service: Service, name: str, ref: AdapterRef) -> ModelCard:
    """Return the adapter's entry in `/v1/models`."""
    return ModelCard(
        id=name,
        created=service.started_at,
        owned_by="specserve",
        root=name_of(ref.folder),
        parent=service.name,
        max_model_len=service.prompts.processor.max_model_len,
        adapter=AdapterDetails(ref.digest, ref.rank),
    )


def given(field: str, value: str | None) -> str:
    if value is None:
        raise RequestError(f"{field} is missing. Send it", field)
    return value


def find_folder(lora: LoraConfig, path: str) -> Path:
    """Return the folder of a caller's path.

    ConfigError for a path that the server may not read, whether it exists or not.
    """
    if lora.folder is not None and path.isprintable():
        home = Path(lora.folder).resolve()
        folder = Path(os.path.realpath(home / path))  # unlike resolve, takes links to themselves
        is_below = folder != home and folder.is_relative_to(home)
        if is_below and str(folder).isprintable() and folder.is_dir():
            return folder
    if lora.allow_hub and HUB_ID.fullmatch(path):
        return download(path)
    hub = " or a hub id" if lora.allow_hub else ""
    remedy = "Check the path" if lora.folder else "Ask the operator to set lora.folder"
    raise ConfigError(f"lora_path: {cut(path)!r} is not a folder below lora.folder{hub}. {remedy}")
