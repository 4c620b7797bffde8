"""Bodies of Ollama's routes, and their conversion to bodies of OpenAI's routes."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from specserve.errors import RequestError
from specserve.exchange.sampling_params import NumTop
from specserve.server.body import BodyKind, Effort, checked_fields, convert, decode_object, is_same
from specserve.server.chat import ChatBody, read_chat
from specserve.server.completions import CompletionBody, read_completion
from specserve.server.embeddings import EmbeddingInputs, EmbeddingsBody, read_embeddings
from specserve.server.ollama_types import OPTIONS
from specserve.server.refusal import cut
from specserve.server.tools import ToolsAsked

# Options without an effect on the text or, as the context length, without a setting per request.
IGNORED = {
    *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta"),
    *("mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa"),
    *("penalize_newline", "repeat_last_n", "use_mlock", "use_mmap", "vocab_only"),
}
# Samplers that specserve lacks -> values with which they are off
OFF: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (0, 1),
}
UNLIMITED = (-1, -2)  # values of num_predict
NO_IMAGES = "images are not supported. Send text"
OLD_CONTEXT = "send the conversation to /api/chat instead"
OWN_TEMPLATE = "the server uses the model's template; set raw = true to send a whole prompt"


class OllamaBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all of Ollama's routes that run the model.

    model           name of the served model or of an adapter; ":latest" is ignored
    options         parameters: num_predict, temperature, top_k, top_p, min_p, seed, stop,
                    repeat_penalty, presence_penalty, frequency_penalty. Options of memory and
                    threads are ignored, and listed in the Warning header
    keep_alive      ignored, because the model stays loaded
    """

    model: str | None = None
    options: dict[str, Any] = {}
    keep_alive: Any = None


class OllamaTextBody(OllamaBody, frozen=True, kw_only=True):
    """The fields of both generating routes.

    stream          false returns one JSON object instead of lines
    format          "json", or a JSON schema that the text must fit
    think           false turns reasoning off and true on, if the template can; or an effort
    logprobs        true returns the logprob of each token
    top_logprobs    number of most likely tokens per position; needs logprobs
    """

    stream: bool = True
    logprobs: bool = False
    top_logprobs: NumTop | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Effort | None = None


class OllamaChatBody(OllamaTextBody, frozen=True, kw_only=True):
    """A chat.

    messages        the conversation; if empty, the server only reports that the model is loaded
    tools           functions that the model can call
    """

    messages: list[dict[str, Any]] = []
    tools: list[Any] | None = None


class OllamaGenerateBody(OllamaTextBody, frozen=True, kw_only=True):
    """A prompt.

    prompt          the user's message; if empty, the server only reports that the model is loaded
    system          the system message
    suffix          text after the response, for models with tokens for it; then the template is
                    not used
    raw             true continues the prompt without the template
    """

    prompt: str = ""
    system: str = ""
    suffix: str = ""
    raw: bool = False
    template: str = ""
    images: list[Any] = []
    context: list[int] = []


class OllamaEmbedBody(OllamaBody, frozen=True, kw_only=True):
    """Texts to convert to embeddings.

    input           a text, or a list of up to 2048 texts
    truncate        false refuses a text that exceeds the context; true cuts its end
    dimensions      length of the embeddings, which are cut and normalized again
    """

    input: str | list[str] | None = None
    truncate: bool = True
    dimensions: int | None = None


class OllamaPromptBody(OllamaBody, frozen=True, kw_only=True):
    """A text to convert to an embedding, on the route of old clients.

    prompt          the text; its end is cut if it exceeds the context
    """

    prompt: str | None = None


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """The model to show."""

    model: str | None = None
    name: str | None = None  # the same in old versions of Ollama
    verbose: bool = False


class OllamaAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A generating body, as one of OpenAI's bodies.

    is_chat     the response has a message
    chat        with its tools; None for a plain prompt
    completion  None for a chat; both are None for a request without a prompt
    past        ignored fields
    """

    model: str | None
    is_chat: bool
    chat: tuple[ChatBody, ToolsAsked] | None = None
    completion: CompletionBody | None = None
    past: tuple[str, ...] = ()


def read_ollama_chat(raw: bytes) -> OllamaAsked:
    body = checked_fields(decode_object(raw), OllamaChatBody)
    fields, past = read_common(body)
    messages = read_history(body.messages)
    fields |= {"messages": messages, "tools": body.tools or None}
    if messages and messages[-1].get("role") == "assistant" and messages[-1].get("content"):
        fields["continue_final_message"] = True  # as Ollama does
    chat = read_chat(msgspec.json.encode(fields)) if body.messages else None
    return OllamaAsked(model=body.model, is_chat=True, chat=chat, past=past)


def read_ollama_generate(raw: bytes) -> OllamaAsked:
    body = checked_fields(decode_object(raw), OllamaGenerateBody)
    refused = {"images": NO_IMAGES, "context": OLD_CONTEXT, "template": OWN_TEMPLATE}
    for name, why in refused.items():
        if getattr(body, name):
            raise RequestError(f"{name}: {why}", name)
    fields, past = read_common(body)
    head: dict[str, Any] = {"model": body.model, "is_chat": False, "past": past}
    if not body.prompt:
        return OllamaAsked(**head)
    if body.raw or body.suffix:
        if body.system:
            raise RequestError("system: not with raw or suffix. Put it into the prompt", "system")
        if body.think not in (None, "none"):  # only templates read it
            head["past"] = (*past, "think")
        for name in ("chat_template_kwargs", "reasoning_effort"):
            fields.pop(name, None)
        if fields.pop("logprobs", False):
            fields["logprobs"] = fields.pop("top_logprobs") or 0
        fields |= {"prompt": body.prompt, "suffix": body.suffix or None}
        completion, _ = read_completion(msgspec.json.encode(fields))
        return OllamaAsked(**head, completion=completion)
    system = [{"role": "system", "content": body.system}] if body.system else []
    fields["messages"] = [*system, {"role": "user", "content": body.prompt}]
    return OllamaAsked(**head, chat=read_chat(msgspec.json.encode(fields)))


def read_ollama_embed(raw: bytes) -> tuple[OllamaEmbedBody, EmbeddingsBody, EmbeddingInputs]:
    body = checked_fields(decode_object(raw), OllamaEmbedBody)
    fields = {"input": body.input, "truncate": body.truncate, "dimensions": body.dimensions}
    return body, *read_embeddings(msgspec.json.encode(fields))


def read_ollama_prompt(raw: bytes) -> tuple[OllamaPromptBody, EmbeddingsBody, EmbeddingInputs]:
    body = checked_fields(decode_object(raw), OllamaPromptBody)
    if not body.prompt:
        raise RequestError("prompt: missing. Send a text", "prompt")
    return body, *read_embeddings(msgspec.json.encode({"input": body.prompt, "truncate": True}))


def read_ollama_model(raw: bytes) -> ModelBody:
    return checked_fields(decode_object(raw), ModelBody)


OLLAMA_CHAT = BodyKind("ollama chat", read_ollama_chat, OllamaAsked)
OLLAMA_GENERATE = BodyKind("ollama generate", read_ollama_generate, OllamaAsked)
OLLAMA_EMBED = BodyKind(
    "ollama embed", read_ollama_embed, tuple[OllamaEmbedBody, EmbeddingsBody, EmbeddingInputs]
)
OLLAMA_PROMPT = BodyKind(
    "ollama prompt", read_ollama_prompt, tuple[OllamaPromptBody, EmbeddingsBody, EmbeddingInputs]
)


def read_common(body: OllamaTextBody) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of an OpenAI body for options, format and thinking, and the paths of
    ignored fields.
    """
    fields, past = read_options(body.options)
    fields |= {"stream": body.stream}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    elif body.top_logprobs is not None:
        raise RequestError("top_logprobs: needs logprobs. Set logprobs = true", "top_logprobs")
    if body.keep_alive is not None:
        past = (*past, "keep_alive")
    if isinstance(body.format, dict):
        form = {"name": "format", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise RequestError(
            f'format: {cut(body.format)!r} is unknown. Send "json" or a JSON schema', "format"
        )
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.think}
    return fields, past


def read_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    fields, past = dict[str, Any](), list[str]()
    for name, value in options.items():
        path = f"options.{name}"
        if value is None or (name == "num_predict" and value in UNLIMITED):
            continue
        if name == "num_predict" and is_same(value, 0):
            raise RequestError(f"{path}: 0 is not supported. Send 1 or more, or -1", path)
        if name in OPTIONS:
            fields[OPTIONS[name]] = value
        elif name in IGNORED:
            past.append(path)
        elif name not in OFF:
            known = ", ".join(sorted(OPTIONS))
            raise RequestError(f"{cut(path)}: unknown. The options are {known}", cut(path))
        elif value not in OFF[name]:
            raise RequestError(f"{path} = {value!r:.50}: this sampler is not supported", path)
    return fields, tuple(past)


def read_history(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Ollama's messages as OpenAI's. Calls get ids, which their results repeat: a result
    belongs to the first open call of its tool, or else to the first open call.
    """
    found, open_calls = list[dict[str, Any]](), dict[str, Any]()  # by id: the tool's name
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        given = {key: value for key, value in message.items() if value is not None}
        if given.pop("images", None):
            raise RequestError(f"{path}.images: {NO_IMAGES}", f"{path}.images")
        if (thinking := given.pop("thinking", "")) != "":
            given["reasoning_content"] = thinking
        if given.get("role") == "tool":
            named = given.pop("tool_name", given.get("name"))
            given |= {} if named is None else {"name": named}
            same = (id for id, tool in open_calls.items() if named is not None and tool == named)
            id = given.pop("tool_call_id", None) or next(same, next(iter(open_calls), f"call_{i}"))
            if isinstance(id, str):
                open_calls.pop(id, None)
            given["tool_call_id"] = id
        calls = given.pop("tool_calls", None)
        if calls:
            calls = [
                numbered(convert(call, dict[str, Any], f"{path}.tool_calls[{j}]"), f"call_{i}_{j}")
                for j, call in enumerate(convert(calls, list[Any], f"{path}.tool_calls"))
            ]
            open_calls = {str(call["id"]): name_in(call) for call in calls}
            given["tool_calls"] = calls
        found.append({"content": "", **given})
    return found


def numbered(call: dict[str, Any], id: str) -> dict[str, Any]:
    """Return a call with an id, and without Ollama's index of its function."""
    function = call.get("function")
    if isinstance(function, dict):
        call = {**call, "function": {k: v for k, v in function.items() if k != "index"}}
    return {"type": "function", **call, "id": call.get("id") or id}


def name_in(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None
