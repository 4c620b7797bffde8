"""POST /v1/chat/completions: messages, rendered by the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from specserve.errors import RequestError
from specserve.exchange.sampling_params import NumTop, SamplingParams
from specserve.models.chat_template import ChatOptions
from specserve.server.body import (
    REFUSED,
    Body,
    convert,
    fields,
    is_same,
    read,
    refuse_unknown,
)
from specserve.server.live_completion import Arrival, LiveCompletion, arrival
from specserve.server.logprobs import chat_form
from specserve.server.refusal import cut
from specserve.server.response import RouteSchema, respond, while_connected
from specserve.server.service import Service, blaming

# Fields of answers, which clients send back in messages -> the values without effect: only they
# are accepted.
NO_OP: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


MAX_DEPTH = 32  # of values for a template


SOME = Meta(extra_json_schema={"minItems": 1})
AnyMessage = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Message"})
]


class ChatBody(Body, frozen=True, kw_only=True):
    """A chat.

    messages        the conversation so far
    add_special_tokens  the tokenizer adds its own to what the template writes
    add_generation_prompt  the template writes the answer's beginning; unset: unless a message is
                    continued
    continue_final_message  the answer continues the last message, an assistant's
    chat_template_kwargs  values of names that the chat template reads
    logprobs        tell each token's logprob
    top_logprobs    with logprobs: and those of so many likeliest tokens
    """

    refused: ClassVar[Mapping[str, str]] = REFUSED | {
        "prompt": "a chat has messages; send a prompt to /v1/completions"
    }

    messages: Annotated[tuple[AnyMessage, ...], SOME] = ()
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None

    @property
    def params(self) -> SamplingParams:
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        return msgspec.structs.replace(super().params, logprobs=num_top)

    @property
    def options(self) -> ChatOptions:
        kwargs = self.chat_template_kwargs or {}
        return read_options(self.add_generation_prompt, self.continue_final_message, kwargs)


class Conversation(Protocol):
    """What an answer is asked for by, whatever the route's body looks like."""

    @property
    def model(self) -> str | None: ...

    @property
    def messages(self) -> Sequence[dict[str, Any]]: ...

    @property
    def options(self) -> ChatOptions: ...

    @property
    def add_special_tokens(self) -> bool: ...

    @property
    def params(self) -> SamplingParams: ...


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a message. `name` is accepted and ignored, as by most templates."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def piece(text: str, is_first: bool) -> dict[str, Any]:
    """The role comes with the first token, not before: clients take its chunk for that token."""
    if is_first:
        return {"delta": {"role": "assistant", "content": text}}
    return {"delta": {"content": text} if text else {}}


def message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


SCHEMA = RouteSchema(
    "chatcmpl",
    "chat.completion.chunk",
    "chat.completion",
    piece,
    message,
    chat_form,
    choices_have_prompts=False,
)


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    arrived = arrival(request)
    service.check_open()
    asked = await service.parse(await service.bodies.read(request), read_chat)
    completion = await begin(request, asked, arrived)
    return await respond(request, SCHEMA, asked, completion)


async def begin(request: Request, asked: Conversation, arrived: Arrival) -> LiveCompletion:
    """Queue the answer of a conversation; errors of its text name `messages`."""
    service: Service = request.app.state.service
    service.check_model(asked.model)
    await service.check_asked(asked.params, 1, "messages")
    kept = service.input_processor.num_kept(asked.params)
    encoding = encode(service, asked.messages, asked.options, asked.add_special_tokens, kept)
    prompt = await while_connected(request, encoding)
    with blaming("messages"):
        service.input_processor.check_length(prompt)
    return await service.ask([prompt], asked.params, arrived, "messages")


async def encode(
    service: Service,
    messages: Sequence[dict[str, Any]],
    options: ChatOptions,
    add_special_tokens: bool,
    kept: int | None = None,
) -> list[int]:
    """The conversation's tokens, or the last `kept` of them."""
    text = await service.render(messages, options)
    return await service.tokenize(text, "messages", add_special_tokens, kept)


def read_chat(raw: bytes) -> ChatBody:
    body = read(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: only with logprobs; set logprobs to true", "top_logprobs")
    return msgspec.structs.replace(body, messages=tuple(read_messages(body.messages)))


def read_options(
    add_generation_prompt: bool | None, continue_final_message: bool, kwargs: dict[str, Any]
) -> ChatOptions:
    check_depth(kwargs, MAX_DEPTH)
    return ChatOptions(add_generation_prompt, continue_final_message, kwargs)


def check_depth(value: Any, most: int) -> None:
    if not most:
        raise RequestError(
            f"chat_template_kwargs: nested more than {MAX_DEPTH} deep", "chat_template_kwargs"
        )
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, most - 1)


def read_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("messages: give at least one", "messages")
    return [read_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def read_message(given: dict[str, Any], path: str) -> dict[str, Any]:
    known = fields(Message)
    kept = {key: value for key, value in given.items() if value is not None}
    values = {k: convert(v, known[k], f"{path}.{k}") for k, v in kept.items() if k in known}
    for key, value in kept.items():
        if key not in known:
            check_no_op(key, value, path)
    if "role" not in values:
        raise RequestError(f"{path}.role: every message has one", f"{path}.role")
    if "content" not in values and values["role"] != "assistant":
        raise RequestError(
            f"{path}.content: missing; give a string or text parts", f"{path}.content"
        )
    return for_template(Message(**values), path)


def for_template(message: Message, path: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        texts = [read_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        content = "\n".join(texts)
    # Templates skip unknown roles, and OpenAI's developer role stands for system.
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": content or ""}
    reasoning = message.reasoning_content or message.reasoning
    return fields | {"reasoning_content": reasoning} if reasoning else fields


def read_part(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"{path}.type: only text is read, not {cut(str(kind))!r}", f"{path}.type"
        )
    for key in part:
        if key not in ("type", "text"):
            refuse_unknown(key, ["type", "text"], f"{path}.")
    return str(convert(part.get("text"), str, f"{path}.text"))


def check_no_op(key: str, value: Any, path: str) -> None:
    if key not in NO_OP:
        refuse_unknown(key, [*fields(Message), *NO_OP], f"{path}.")
    if not any(is_same(value, off) for off in NO_OP[key]):
        raise RequestError(f"{path}.{key} is not supported yet: leave it out", f"{path}.{key}")
