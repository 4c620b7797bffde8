"""The routes, as a table, and the functions of those that tell what the server is and does."""

import asyncio
from functools import cache
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from specserve.exchange.guessing import Change
from specserve.server import answers
from specserve.server.adapters import (
    LoadAdapterBody,
    UnloadAdapterBody,
    adapter_card,
    load_adapter,
    unload_adapter,
)
from specserve.server.chat import ChatBody, Message, chat
from specserve.server.completions import CompletionBody, completions
from specserve.server.control import (
    DraftModelBody,
    change_speculation,
    load_draft_model,
    remove_draft_model,
    speculation,
)
from specserve.server.docs_page import HEADERS, page
from specserve.server.openapi import GENERATING, WITH_ENGINE, Operation, document
from specserve.server.pages import PAGES, PARTS, redirected
from specserve.server.response import json_response
from specserve.server.response_items import ITEMS
from specserve.server.response_tools import FunctionTool
from specserve.server.responses import ResponsesBody, responses
from specserve.server.service import ServedModel, Service
from specserve.server.texts import DetokenizeBody, TokenizeBody, detokenize, tokenize
from specserve.version import VERSION

LIVENESS = "/health/live"


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    adapters = [adapter_card(service, *each) for each in service.adapters.known.items()]
    return json_response({"object": "list", "data": [card(service), *adapters]})


async def show_model(request: Request) -> Response:
    service: Service = request.app.state.service
    adapter = service.check_model(request.path_params["id"])
    return json_response(card(service) if adapter is None else adapter_card(service, *adapter))


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
    """Fields that OpenAI lacks: whose code computes the model, the drafter, its limit and sources,
    the head, the forms of weights and KV, how tool calls and reasoning are read, and which models
    are scaled demos.
    """
    kept = {"weights": served.weights, "kv_dtype": served.kv_dtype}
    fields: dict[str, Any] = {"implementation": served.implementation}
    if served.row_invariant is not None:
        fields["row_invariant"] = served.row_invariant
    fields |= {"drafter": served.drafter, "max_nodes": served.max_nodes, **kept}
    fields["sources"] = served.sources
    fields["tool_parser"] = served.formats.tools
    fields["reasoning_parser"] = served.formats.reasoning
    if served.draft_weights is not None:
        fields["draft_weights"] = served.draft_weights
    if served.draft_head is not None:
        fields["draft_head"] = served.draft_head
    if served.scaled:
        fields["scaled"] = served.scaled
    return fields


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


@cache
def described() -> dict[str, Any]:
    return document(OPERATIONS, more=[Message, FunctionTool, *ITEMS.values()])


@cache
def documents() -> tuple[bytes, str]:
    """The OpenAPI document as JSON and as a page. To be called in a thread: it takes a while."""
    return msgspec.json.encode(described()), page(described())


async def openapi(request: Request) -> Response:
    json, _ = await asyncio.to_thread(documents)
    return Response(json, media_type="application/json")


async def docs(request: Request) -> Response:
    if (away := redirected(request)) is not None:
        return away
    _, html = await asyncio.to_thread(documents)
    return Response(html, headers=HEADERS, media_type="text/html")


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        chat,
        "Answer messages, through the model's own chat template",
        answers.ChatAnswer,
        ChatBody,
        chunk=answers.ChatChunk,
        required=["messages"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/completions",
        completions,
        "Continue one or several prompts",
        answers.CompletionAnswer,
        CompletionBody,
        chunk=answers.CompletionChunk,
        required=["prompt"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/responses",
        responses,
        "Answer a conversation in the form of OpenAI's Responses API; nothing is stored",
        answers.ResponseAnswer,
        ResponsesBody,
        chunk=answers.AnyEvent,
        required=["input"],
        statuses=GENERATING,
    ),
    Operation(
        "GET",
        "/v1/models",
        list_models,
        "The model that is served, and its adapters",
        answers.ModelList,
    ),
    Operation(
        "GET",
        "/v1/models/{id:path}",
        show_model,
        "One of them, by its name",
        answers.ModelCard,
        statuses=[404],
    ),
    Operation(
        "GET",
        "/v1/speculation",
        speculation,
        "What guesses are chosen by: sources, limits, costs, calibration and the last plan",
        answers.Speculation,
        statuses=WITH_ENGINE,
    ),
    Operation(
        "PATCH",
        "/v1/speculation",
        change_speculation,
        "Change who guesses, and how much, while requests run; their texts stay the same",
        answers.Speculation,
        Change,
        statuses=WITH_ENGINE,
        scope="speculation",
    ),
    Operation(
        "POST",
        "/v1/speculation/draft-model",
        load_draft_model,
        "Load a draft model beside the steps, and have it guess instead of the one there is",
        answers.Speculation,
        DraftModelBody,
        required=["model"],
        statuses=WITH_ENGINE,
        scope="speculation",
    ),
    Operation(
        "DELETE",
        "/v1/speculation/draft-model",
        remove_draft_model,
        "Go on without the draft model, whose memory is given back",
        answers.Speculation,
        statuses=WITH_ENGINE,
        scope="speculation",
    ),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        "Read a LoRA adapter beside the steps, and let requests choose it by name",
        answers.ModelCard,
        LoadAdapterBody,
        required=["lora_name", "lora_path"],
        statuses=WITH_ENGINE,
        scope="adapters",
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "Let no more requests choose a LoRA adapter; the last one that has it frees its memory",
        answers.Deleted,
        UnloadAdapterBody,
        required=["lora_name"],
        statuses=[*WITH_ENGINE, 404],
        scope="adapters",
    ),
    Operation(
        "POST",
        "/v1/cache/reset",
        reset_cache,
        "Empty the prefix cache",
        answers.Status,
        statuses=WITH_ENGINE,
        scope="cache",
    ),
    Operation(
        "POST",
        "/tokenize",
        tokenize,
        "Turn a prompt or messages into token ids",
        answers.Tokens,
        TokenizeBody,
        statuses=[503],
    ),
    Operation(
        "POST",
        "/detokenize",
        detokenize,
        "Turn token ids into text",
        answers.Text,
        DetokenizeBody,
        required=["tokens"],
        statuses=[503],
    ),
    Operation(
        "GET",
        "/health",
        ready,
        "Whether the model is loaded and the server does not drain",
        answers.Status,
        statuses=[503],
        unavailable=answers.Status,
    ),
    Operation(
        "GET",
        "/health/ready",
        ready,
        "The same as /health",
        answers.Status,
        statuses=[503],
        unavailable=answers.Status,
    ),
    Operation(
        "GET",
        "/ping",
        ready,
        "The same as /health",
        answers.Status,
        statuses=[503],
        unavailable=answers.Status,
    ),
    Operation(
        "GET",
        LIVENESS,
        live,
        "Whether the engine process runs and steps",
        answers.Status,
        statuses=[503],
        unavailable=answers.Status,
        is_open=True,
    ),
    Operation("GET", "/metrics", metrics, "Metrics for Prometheus", "text/plain"),
    Operation("GET", "/version", version, "The version of specserve", answers.Version),
    Operation(
        "GET",
        "/openapi.json",
        openapi,
        "This document",
        dict[str, Any],
        is_open=True,
    ),
    Operation("GET", "/docs", docs, "This document as a page", "text/html", is_open=True),
)
# What they answer is the same for every server and client, but for whether the engine runs.
SCOPES = {(o.method, o.path): o.scope for o in OPERATIONS if o.scope}
OPEN = frozenset([*(o.path for o in OPERATIONS if o.is_open), *PAGES, *PARTS])
