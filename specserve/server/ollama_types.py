"""The JSON of Ollama's routes. Times are in nanoseconds."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from specserve.server.protocol import TokenLogprob

# Options -> fields of OpenAI's bodies
OPTIONS = {
    **{name: name for name in ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop")},
    **{name: name for name in ("temperature", "top_k", "top_p")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# Paths in OpenAI's bodies -> in Ollama's
PATHS = {field: f"options.{option}" for option, field in OPTIONS.items()} | {
    "reasoning_effort": "think",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
}


class OllamaError(Struct):
    error: str


class OllamaVersion(Struct):
    """The version of Ollama whose API the routes follow, because clients require a minimum."""

    version: str


class CalledTool(Struct):
    name: str
    arguments: Any  # an object; the text itself if the model wrote no valid object
    index: int


class OllamaCall(Struct):
    id: str
    function: CalledTool


class OllamaMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaLine(Struct, kw_only=True):
    """A line of a stream, or a whole response. The fields from `done_reason` on come at the end.

    logprobs        of the tokens since the last line, if the request has logprobs
    done            true for the last line, which has no text
    done_reason     stop or length; load for a request without a prompt
    total_duration  time since the request arrived
    load_duration   0, because the model is loaded
    prompt_eval_count  tokens of the prompt
    eval_count      tokens of the output
    """

    model: str
    created_at: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaLine, kw_only=True):
    message: OllamaMessage


class OllamaGeneration(OllamaLine, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbeddings(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    embedding: list[float]


class OllamaDetails(Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True):
    """The served model. Only /api/ps has `expires_at`, `size_vram` and `context_length`."""

    name: str
    model: str
    size: int  # bytes of the weights in memory
    digest: str
    details: OllamaDetails
    modified_at: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaCard(Struct):
    """Details of the served model.

    capabilities    some of completion, tools, thinking, insert and embedding
    """

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
