"""What the routes answer, as types: for `/openapi.json`. Nothing is made of them.

UNSET is a field that an answer may lack; tests compare all of this with answers.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from specserve.exchange.speculation_state import CostState, GuessKind, PlanState
from specserve.exchange.step_output import SourceCounts
from specserve.generation import StepDetails
from specserve.logprobs import Logprob
from specserve.models.folder import Scaled
from specserve.models.weight_forms import WeightForms


class ErrorDetails(Struct):
    """OpenAI's four fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorDetails


class Status(Struct):
    status: str


class Version(Struct):
    version: str


class ModelCard(Struct):
    """The served model; the fields after `max_model_len` come once it is loaded.

    max_model_len   tokens of prompt and answer together; null while the model is being loaded
    drafter         who guesses: `drafter.name` of the server's config
    max_nodes       most guesses of a request in a step
    sources         the names of those that guess
    kv_dtype        bf16, fp32, int8 or fp8
    weights         forms of the target's weights in memory
    draft_weights   the same of the draft model, if there is one
    scaled          models that were made for demonstrations, if there are any
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    drafter: str | UnsetType = UNSET
    max_nodes: int | UnsetType = UNSET
    sources: list[str] | UnsetType = UNSET
    kv_dtype: str | UnsetType = UNSET
    weights: WeightForms | UnsetType = UNSET
    draft_weights: WeightForms | UnsetType = UNSET
    scaled: list[Scaled] | UnsetType = UNSET


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Targets(Struct):
    """Targets of requests that give none, and the smallest `tpot_ms` that clients may set."""

    ttft_ms: float | None
    tpot_ms: float | None
    min_tpot_ms: float | None


class Speculation(Struct):
    """What guesses are chosen by.

    sources         who may guess
    max_nodes       most guesses of a request and step
    max_step_nodes  most guesses of a step
    costs           by model: what its steps take
    calibration     by source: how often its guesses were right
    plan            of the latest step that could have guesses
    """

    object: Literal["speculation"]
    sources: list[str]
    max_nodes: int
    max_step_nodes: int
    costs: dict[str, CostState]
    calibration: dict[str, list[GuessKind]]
    plan: PlanState | None
    slo: Targets


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Struct):
    prompt: str


class PromptDetails(Struct):
    """Of the prompt's tokens, how many were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of the prompts, each of them once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class SpeculativeDecoding(Struct):
    """Guesses of an answer, all choices together."""

    drafter: str
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    max_depth: int
    num_draft_fallbacks: int
    sources: dict[str, SourceCounts]


class Metrics(Struct):
    """vLLM's names."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class Timings(Struct):
    """llama.cpp's names."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    cache_n: int
    draft_n: int
    draft_n_accepted: int


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(Struct):
    """Of each token, by its place; null for the first one of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class SpeculationDetails(Struct):
    """Where tokens came from, where `return_speculation_details` asks for it."""

    sources: list[str]
    steps: list[StepDetails]


PromptLogprobs = list[dict[int, Logprob] | None]
FinishReason = Literal["stop", "length"]


class Choice(Struct, kw_only=True):
    """What choices of both completion routes have.

    stop_reason     the stop string, or the id of stop_token_ids, that ended it
    seed            the same request with it has the same text
    speculation     where `return_speculation_details` asks for it
    token_ids       where `return_token_ids` asks for them
    """

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    speculation: SpeculationDetails | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class ChatChoice(Choice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Head(Struct, kw_only=True):
    """What answers and chunks begin with.

    system_fingerprint  servers of the same one, given the same seed, have the same text
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(Head, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    timings: Timings
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(Head, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics
    timings: Timings


class ChunkChoice(Struct, kw_only=True):
    """A step of a choice, or its end.

    finish_reason   null but in the choice's last chunk
    """

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    speculation: SpeculationDetails | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChunkChoice(ChunkChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Chunk(Head, kw_only=True):
    """An event of a stream.

    usage       where `stream_options` ask for it
    metrics     in the last chunk
    timings     in the last chunk
    """

    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatChunk(Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChunk(Chunk, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
