"""POST /tokenize and /detokenize: convert text to token ids, and back."""

from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.server.body import BodyKind, checked_fields, decode_object, drop_ignored, warning
from specserve.server.chat import (
    SOME,
    AnyMessage,
    Conversation,
    read_messages,
    read_options,
    render,
)
from specserve.server.completion import Service
from specserve.server.protocol import DetokenizeResponse, TokenizeResponse
from specserve.server.refusal import json_response
from specserve.server.stream import while_connected
from specserve.server.tools import read_tools


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either a prompt or messages. Other fields are as in completions and chats.

    add_special_tokens  the tokenizer adds special tokens; unset: only to a prompt
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[AnyMessage], SOME] | None = None
    add_special_tokens: bool | None = None  # None: only to a prompt
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to convert to text."""

    model: str | None = None
    tokens: list[int] | None = None


T = TypeVar("T", TokenizeBody, DetokenizeBody)


def read_body(raw: bytes, kind: type[T]) -> tuple[T, tuple[str, ...]]:
    """Read a body. Also return the paths of ignored fields."""
    given = decode_object(raw)
    past = drop_ignored(given)
    return checked_fields(given, kind), past


def kind_of(name: str, body: type[T]) -> BodyKind[tuple[T, tuple[str, ...]]]:
    result: Any = tuple[body, tuple[str, ...]]  # type: ignore[valid-type]
    return BodyKind(name, lambda raw: read_body(raw, body), result)


TOKENIZE, DETOKENIZE = kind_of("tokenize", TokenizeBody), kind_of("detokenize", DetokenizeBody)


async def asked_of(
    request: Request, kind: BodyKind[tuple[T, tuple[str, ...]]]
) -> tuple[T, tuple[str, ...]]:
    service: Service = request.app.state.service
    service.check_loaded()
    asked, past = await service.prompts.parse(await service.bodies.read(request), kind)
    service.check_model(asked.model)
    return asked, past + service.ignored_fields(asked.model)


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    asked, past = await asked_of(request, TOKENIZE)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("prompt and messages: send one of them", "prompt")
    if asked.messages is not None:
        tools = read_tools(asked.tools, None, None)
        how = asked.add_generation_prompt, asked.continue_final_message
        options = read_options(*how, asked.chat_template_kwargs, tools)
        messages, adds_special = read_messages(asked.messages), asked.add_special_tokens is True
        conversation = Conversation(messages, options, tools, adds_special)
        _, ids = await while_connected(request, render(service, conversation))
    else:
        adds_special = asked.add_special_tokens is not False
        ids = await service.prompts.tokenize(asked.prompt or "", "prompt", adds_special)
    limit = service.prompts.processor.max_model_len
    return json_response(TokenizeResponse(len(ids), limit, ids), headers=warning(past))


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    asked, past = await asked_of(request, DETOKENIZE)
    if asked.tokens is None:
        raise RequestError("tokens: missing. Send a list of token ids", "tokens")
    most = service.prompts.processor.max_model_len
    if len(asked.tokens) > most:
        message = f"tokens: {len(asked.tokens)} ids. At most {most} are allowed"
        raise RequestError(message, "tokens")
    ids = await service.prompts.in_thread(
        service.prompts.processor.read_ids, asked.tokens, "tokens"
    )
    text = await service.prompts.in_thread(service.prompts.processor.tokenizer.decode, ids, False)
    return json_response(DetokenizeResponse(text), headers=warning(past))
