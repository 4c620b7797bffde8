"""The table of routes, and the routes that report on the server."""

import asyncio
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from specserve.exchange.speculation_control import Change
from specserve.server.adapters import (
    LoadAdapterBody,
    UnloadAdapterBody,
    adapter_card,
    load_adapter,
    unload_adapter,
)
from specserve.server.chat import ChatBody, ChatMessage, chat
from specserve.server.completion import ServedModel, Service
from specserve.server.completions import CompletionBody, completions
from specserve.server.control import (
    DraftModelBody,
    change_speculation,
    load_draft_model,
    remove_draft_model,
    speculation,
)
from specserve.server.docs_page import HEADERS, page
from specserve.server.embeddings import EmbeddingsBody, embeddings
from specserve.server.history import QUERY, MetricsHistory, metrics_history
from specserve.server.message_input import PARTS as BLOCKS
from specserve.server.message_input import InputMessage, Tool
from specserve.server.messages import MessagesBody, count_tokens, messages
from specserve.server.ollama import (
    ollama_chat,
    ollama_embed,
    ollama_embeddings,
    ollama_generate,
    ollama_models,
    ollama_running,
    ollama_show,
    ollama_version,
)
from specserve.server.ollama_body import (
    ModelBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaPromptBody,
)
from specserve.server.ollama_types import (
    OllamaCard,
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaGeneration,
    OllamaModels,
    OllamaVersion,
)
from specserve.server.openapi import GENERATING, WITH_ENGINE, Operation, document
from specserve.server.pages import PAGES, PARTS, redirected
from specserve.server.protocol import (
    AnyEvent,
    AnyMessageEvent,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Deleted,
    DetokenizeResponse,
    EmbeddingList,
    MessageError,
    MessageObject,
    ModelCard,
    ModelList,
    Ranking,
    ResponseObject,
    ScoreList,
    SessionStatus,
    SleepStatus,
    SpeculationStatus,
    Status,
    TokenCount,
    TokenizeResponse,
    Version,
)
from specserve.server.ranking import RerankBody, ScoreBody, rerank, score
from specserve.server.refusal import json_response
from specserve.server.response_input import ITEMS, FunctionTool
from specserve.server.responses import ResponsesBody, responses
from specserve.server.sessions import (
    PinBody,
    SessionBody,
    load_session,
    pin_session,
    save_session,
)
from specserve.server.sleep import OF_SLEEP, OF_WAKE_UP, is_sleeping, sleep, wake_up
from specserve.server.texts import DetokenizeBody, TokenizeBody, detokenize, tokenize
from specserve.version import VERSION

LIVENESS = "/health/live"


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    adapters = [adapter_card(service, *each) for each in service.adapters.known.items()]
    own = card(service)
    others = [msgspec.structs.replace(own, id=name) for name in service.limits.model_aliases]
    return json_response(ModelList([own, *others, *adapters]))


async def show_model(request: Request) -> Response:
    service: Service = request.app.state.service
    adapter = service.check_model(request.path_params["id"])
    return json_response(card(service) if adapter is None else adapter_card(service, *adapter))


def card(service: Service) -> ModelCard:
    is_loaded = service.loaded is not None
    return ModelCard(
        id=service.name,
        created=service.started_at,
        owned_by="specserve",
        root=service.name,
        parent=None,
        max_model_len=service.prompts.processor.max_model_len if is_loaded else None,
        chat_defaults=service.prompts.processor.defaults.for_chats if is_loaded else UNSET,
        defaults=service.prompts.processor.defaults.parameters if is_loaded else UNSET,
        **(details(service.served) if is_loaded else {}),
    )


def details(served: ServedModel) -> dict[str, Any]:
    """Return the fields of a loaded model that OpenAI lacks, see `ModelCard`."""
    fields = {
        "implementation": served.implementation,
        "row_invariant": served.row_invariant,
        "drafter": served.drafter,
        "max_nodes": served.max_nodes,
        "sources": served.sources,
        "tool_parser": served.formats.name,
        "reasoning_parser": served.formats.reasoning,
        "kv_dtype": served.kv_dtype,
        "weights": served.weights,
        "draft_weights": served.draft_weights,
        "draft_head": served.draft_head,
        "scaled": served.scaled or None,
        "demo": served.is_demo or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


async def reset_cache(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_loaded()
    await service.engine.reset_cache()
    return json_response(Status("reset"))


async def ready(request: Request) -> Response:
    service: Service = request.app.state.service
    if service.is_ready:
        return json_response(Status("sleeping" if service.is_asleep else "ready"))
    return unavailable(service.unready_because)


async def live(request: Request) -> Response:
    service: Service = request.app.state.service
    if not service.is_alive:
        return unavailable("engine dead")
    return json_response(Status("sleeping" if service.is_asleep else "alive"))


def unavailable(status: str) -> Response:
    return json_response(Status(status), 503, {"Retry-After": "1"})


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    return json_response(Version(VERSION))


@cache
def described() -> dict[str, Any]:
    inputs = [ChatMessage, FunctionTool, *ITEMS.values(), InputMessage, Tool, *BLOCKS]
    return document(OPERATIONS, more=inputs)


@cache
def documents() -> tuple[bytes, str]:
    """Return the OpenAPI document as JSON and as a page. Slow: call it in a thread."""
    return msgspec.json.encode(described()), page(described())


async def openapi(request: Request) -> Response:
    json, _ = await asyncio.to_thread(documents)
    return Response(json, media_type="application/json")


async def docs(request: Request) -> Response:
    if (away := redirected(request)) is not None:
        return away
    _, html = await asyncio.to_thread(documents)
    return Response(html, headers=HEADERS, media_type="text/html")


OLLAMA = (
    Operation(
        "POST",
        "/api/chat",
        ollama_chat,
        "Generate from messages, with Ollama's API",
        OllamaChat,
        OllamaChatBody,
        chunk=OllamaChat,
        statuses=GENERATING,
        error=OllamaError,
        stream="application/x-ndjson",
    ),
    Operation(
        "POST",
        "/api/generate",
        ollama_generate,
        "Generate from a prompt, with Ollama's API",
        OllamaGeneration,
        OllamaGenerateBody,
        chunk=OllamaGeneration,
        statuses=GENERATING,
        error=OllamaError,
        stream="application/x-ndjson",
    ),
    Operation(
        "POST",
        "/api/embed",
        ollama_embed,
        "Convert texts to embeddings, with Ollama's API",
        OllamaEmbeddings,
        OllamaEmbedBody,
        required=["input"],
        statuses=GENERATING,
        error=OllamaError,
    ),
    Operation(
        "POST",
        "/api/embeddings",
        ollama_embeddings,
        "Convert a text to an embedding, with the old route of Ollama's API",
        OllamaEmbedding,
        OllamaPromptBody,
        required=["prompt"],
        statuses=GENERATING,
        error=OllamaError,
    ),
    Operation(
        "POST",
        "/api/show",
        ollama_show,
        "Show the served model, with Ollama's API",
        OllamaCard,
        ModelBody,
        statuses=[404, 503],
        error=OllamaError,
    ),
    *(
        Operation("GET", path, route, what, answer, statuses=[503], error=OllamaError)
        for path, route, what, answer in (
            ("/api/tags", ollama_models, "List the served model, with Ollama's API", OllamaModels),
            ("/api/ps", ollama_running, "List the loaded model, with Ollama's API", OllamaModels),
            ("/api/version", ollama_version, "Show the version of Ollama's API", OllamaVersion),
        )
    ),
)
OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        chat,
        "Generate from messages, with the model's chat template",
        ChatCompletion,
        ChatBody,
        chunk=ChatCompletionChunk,
        required=["messages"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/completions",
        completions,
        "Continue one or several prompts",
        Completion,
        CompletionBody,
        chunk=CompletionChunk,
        required=["prompt"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/responses",
        responses,
        "Generate with OpenAI's Responses API, without storage",
        ResponseObject,
        ResponsesBody,
        chunk=AnyEvent,
        required=["input"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/messages",
        messages,
        "Generate with Anthropic's Messages API",
        MessageObject,
        MessagesBody,
        chunk=AnyMessageEvent,
        required=["messages"],
        statuses=GENERATING,
        error=MessageError,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a request to /v1/messages",
        TokenCount,
        MessagesBody,
        required=["messages"],
        statuses=[503],
        error=MessageError,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        embeddings,
        "Convert texts to embeddings",
        EmbeddingList,
        EmbeddingsBody,
        required=["input"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/rerank",
        rerank,
        "Sort documents by their relevance for a query",
        Ranking,
        RerankBody,
        required=["query", "documents"],
        statuses=GENERATING,
    ),
    Operation(
        "POST",
        "/v1/score",
        score,
        "Score pairs of texts",
        ScoreList,
        ScoreBody,
        required=["text_1", "text_2"],
        statuses=GENERATING,
    ),
    *OLLAMA,
    Operation(
        "GET",
        "/v1/models",
        list_models,
        "List the served model and its adapters",
        ModelList,
    ),
    Operation(
        "GET",
        "/v1/models/{id:path}",
        show_model,
        "Show the model or an adapter by name",
        ModelCard,
        statuses=[404],
    ),
    Operation(
        "GET",
        "/v1/speculation",
        speculation,
        "Show the settings and data of speculation: sources, limits, costs, acceptance, last plan",
        SpeculationStatus,
        statuses=WITH_ENGINE,
    ),
    Operation(
        "PATCH",
        "/v1/speculation",
        change_speculation,
        "Change drafters and limits while requests run; texts stay the same",
        SpeculationStatus,
        Change,
        statuses=WITH_ENGINE,
        scope="speculation",
    ),
    Operation(
        "POST",
        "/v1/speculation/draft-model",
        load_draft_model,
        "Load or replace the draft model; steps continue while it is loaded",
        SpeculationStatus,
        DraftModelBody,
        required=["model"],
        statuses=WITH_ENGINE,
        scope="speculation",
    ),
    Operation(
        "DELETE",
        "/v1/speculation/draft-model",
        remove_draft_model,
        "Remove the draft model, and free its memory",
        SpeculationStatus,
        statuses=WITH_ENGINE,
        scope="speculation",
    ),
    Operation(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        "Load a LoRA adapter; steps continue while it is loaded",
        ModelCard,
        LoadAdapterBody,
        required=["lora_name", "lora_path"],
        statuses=WITH_ENGINE,
        scope="adapters",
    ),
    Operation(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "Unload a LoRA adapter; running requests keep it",
        Deleted,
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
        Status,
        statuses=WITH_ENGINE,
        scope="cache",
    ),
    *(
        Operation(
            "POST",
            f"/v1/cache/{action}",
            route,
            what,
            SessionStatus,
            body,
            required=["prompt_cache_key"],
            statuses=[*WITH_ENGINE, 404, 409],
            scope="cache",
        )
        for action, route, what, body in (
            ("save", save_session, "Write the KV of a conversation to disk", SessionBody),
            ("load", load_session, "Read the KV of a conversation from disk", SessionBody),
            ("pin", pin_session, "Keep the KV of a conversation in the tiers", PinBody),
        )
    ),
    Operation(
        "POST",
        "/sleep",
        sleep,
        "Release the memory of the KV and, at level 2, of the weights",
        SleepStatus,
        statuses=[*WITH_ENGINE, 409],
        scope="sleep",
        query=OF_SLEEP,
    ),
    Operation(
        "POST",
        "/wake_up",
        wake_up,
        "Restore the memory of an engine that sleeps",
        SleepStatus,
        statuses=[*WITH_ENGINE, 409],
        scope="sleep",
        query=OF_WAKE_UP,
    ),
    Operation(
        "GET",
        "/is_sleeping",
        is_sleeping,
        "Show whether the engine sleeps",
        SleepStatus,
    ),
    Operation(
        "POST",
        "/tokenize",
        tokenize,
        "Convert a prompt or messages to token ids",
        TokenizeResponse,
        TokenizeBody,
        statuses=[503],
    ),
    Operation(
        "POST",
        "/detokenize",
        detokenize,
        "Convert token ids to text",
        DetokenizeResponse,
        DetokenizeBody,
        required=["tokens"],
        statuses=[503],
    ),
    Operation(
        "GET",
        "/health",
        ready,
        "Report readiness: the model is loaded, and the server is not shutting down; the status of "
        "a server that sleeps is sleeping",
        Status,
        statuses=[503],
        unavailable=Status,
    ),
    Operation(
        "GET",
        "/health/ready",
        ready,
        "The same as /health",
        Status,
        statuses=[503],
        unavailable=Status,
    ),
    Operation(
        "GET",
        "/ping",
        ready,
        "The same as /health",
        Status,
        statuses=[503],
        unavailable=Status,
    ),
    Operation(
        "GET",
        LIVENESS,
        live,
        "Report liveness: the engine process runs and completes steps",
        Status,
        statuses=[503],
        unavailable=Status,
        is_open=True,
    ),
    Operation("GET", "/metrics", metrics, "Return metrics for Prometheus", "text/plain"),
    Operation(
        "GET",
        "/metrics/history",
        metrics_history,
        "Return samples of the last 15 minutes, for the dashboard",
        MetricsHistory,
        query=QUERY,
    ),
    Operation("GET", "/version", version, "Show the version of specserve", Version),
    Operation(
        "GET",
        "/openapi.json",
        openapi,
        "Return this document",
        dict[str, Any],
        is_open=True,
    ),
    Operation("GET", "/docs", docs, "Show this document as a page", "text/html", is_open=True),
)
SCOPES = {(o.method, o.path): o.scope for o in OPERATIONS if o.scope}
# Open routes are the same for every server and client, except for liveness.
# Routes that the dashboard reads. server.open_dashboard opens them to clients without a key.
DASHBOARD = frozenset(["/metrics", "/metrics/history", "/v1/models", "/v1/speculation"])
OPEN = frozenset([*(o.path for o in OPERATIONS if o.is_open), *PAGES, *PARTS])
