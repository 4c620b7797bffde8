"""The types of the routes' JSON, which also define /openapi.json.

JSON omits fields that are UNSET.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from specserve.api.outputs import Logprob
from specserve.exchange.messages import (
    CalibrationPoint,
    CostState,
    DraftHeadCard,
    PlainStep,
    PlanState,
    SourceCounts,
    StepDetails,
)
from specserve.models.folder import Scaled
from specserve.models.weight_forms import WeightForms


class ErrorDetails(Struct):
    """The four fields of OpenAI's errors."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorDetails


class Status(Struct):
    status: str


class SleepStatus(Struct):
    """The parts of the engine that sleep.

    is_sleeping  true until all parts are awake
    level        0: awake, 1: weights are kept in host memory, 2: weights are dropped
    tags         the parts whose memory is released: weights, kv_cache
    """

    is_sleeping: bool
    level: int
    tags: list[str]


class Version(Struct):
    version: str


class AdapterDetails(Struct):
    digest: str
    rank: int


class ModelCard(Struct, tag_field="object", tag="model", kw_only=True):
    """The served model or an adapter. Fields after `max_model_len` are set once it is loaded.

    max_model_len   maximum tokens of prompt and output together; null while the model loads
    chat_defaults   parameters for chats of users, if the model's files name none
    defaults        values of parameters that a request leaves unset
    implementation  code that computes the target model: native or transformers
    row_invariant   whether results are batch-invariant, if the code does not guarantee it; if
                    false, speculation and prefix caching are off
    drafter         `drafter.name` of the server's config
    max_nodes       maximum draft tokens per request and step
    sources         names of the draft sources
    tool_parser     format of tool calls in a text
    reasoning_parser  format of reasoning in a text
    kv_dtype        bf16, fp32, int8 or fp8
    weights         formats of the target model's weights in memory
    draft_weights   formats of the draft model's weights, if there is one
    draft_head      the draft head in use, if there is one
    scaled          demo models in use that are padded to the compute of larger models
    demo            true if specserve's demo model is the target model
    parent          for an adapter: the model that it changes
    adapter         for an adapter: the SHA-256 of its tensors and scalings, and its rank
    """

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    chat_defaults: dict[str, float | int] | UnsetType = UNSET
    defaults: dict[str, float | int] | UnsetType = UNSET
    implementation: str | UnsetType = UNSET
    row_invariant: bool | UnsetType = UNSET
    drafter: str | UnsetType = UNSET
    max_nodes: int | UnsetType = UNSET
    sources: list[str] | UnsetType = UNSET
    tool_parser: str | UnsetType = UNSET
    reasoning_parser: str | UnsetType = UNSET
    kv_dtype: str | UnsetType = UNSET
    weights: WeightForms | UnsetType = UNSET
    draft_weights: WeightForms | UnsetType = UNSET
    draft_head: DraftHeadCard | UnsetType = UNSET
    scaled: list[Scaled] | UnsetType = UNSET
    demo: bool | UnsetType = UNSET
    adapter: AdapterDetails | UnsetType = UNSET


class SessionStatus(Struct):
    """The KV of a conversation.

    prompt_cache_key  of its requests
    blocks          blocks of KV in the pool's size
    blocks_in_memory  blocks that the pool or host memory has
    blocks_on_disk  blocks that the folder memory.disk_path has
    """

    prompt_cache_key: str
    blocks: int
    blocks_in_memory: int
    blocks_on_disk: int


class Deleted(Struct, tag_field="object", tag="model"):
    id: str
    deleted: Literal[True]


class ModelList(Struct, tag_field="object", tag="list"):
    data: list[ModelCard]


class Targets(Struct):
    """Latency targets of requests without their own, and the minimum `tpot_ms` for clients."""

    ttft_ms: float | None
    tpot_ms: float | None
    min_tpot_ms: float | None


class SpeculationStatus(Struct, tag_field="object", tag="speculation"):
    """The settings of speculation, and the data for the choice of draft tokens.

    drafter         auto, none, ngram, model, eagle or a package.module:Class
    row_invariant   as in the entry of the model; if false, speculation is off
    draft_model     name of the draft model, if there is one
    draft_head      name of the draft head, if there is one
    options         options of the drafter that differ from the defaults
    sources         draft sources in use
    known_sources   all draft sources since the start
    max_nodes       maximum draft tokens per request and step
    max_step_nodes  maximum draft tokens per step
    costs           step costs, by model
    plain_steps     measured steps of one request without draft tokens, by rising context
    calibration     acceptance rates by source, from requests without a salt of the same API key
    plan            plan of the latest step that only had requests of the same API key
    """

    drafter: str
    draft_model: str | None
    draft_head: str | None
    options: dict[str, Any]
    sources: list[str]
    known_sources: list[str]
    max_nodes: int
    max_step_nodes: int
    costs: dict[str, CostState]
    plain_steps: list[PlainStep]
    calibration: dict[str, list[CalibrationPoint]]
    plan: PlanState | None
    slo: Targets
    row_invariant: bool | UnsetType = UNSET


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeResponse(Struct):
    prompt: str


class PromptTokensDetails(Struct):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Tokens of reasoning, and tokens of the prediction that are in the output or not."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class CompletionUsage(Struct):
    """Tokens of the prompts, each counted once, and of all choices.

    completion_tokens_details  if the model reasons, or the request has a prediction
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class SpeculativeDecoding(Struct):
    """Speculation of a response, over all choices."""

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


class RequestMetrics(Struct):
    """Statistics with vLLM's names.

    row_invariant  as in the entry of the model
    """

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None
    row_invariant: bool | UnsetType = UNSET


class Timings(Struct):
    """Statistics with llama.cpp's names."""

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
    """Logprobs by position; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class SpeculationDetails(Struct):
    """The source of each token, if `return_speculation_details` is set."""

    sources: list[str]
    steps: list[StepDetails]


PromptLogprobs = list[dict[int, Logprob] | None]
FinishReason = Literal["stop", "length", "tool_calls"]


class ChoiceFields(Struct, kw_only=True):
    """Common fields of choices of chats and completions.

    stop_reason     the stop string or the id of stop_token_ids that ended the text
    seed            the same request with this seed returns the same text
    speculation     if `return_speculation_details` is set
    token_ids       if `return_token_ids` is set
    """

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    speculation: SpeculationDetails | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionCall(Struct):
    """A called function. `arguments` are JSON."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatCompletionMessage(Struct):
    """The message of a choice. `reasoning_content` and `reasoning` have the same value."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # instead, if the request has functions


class ChatCompletionChoice(ChoiceFields, kw_only=True):
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(ChoiceFields, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ResponseHead(Struct, kw_only=True):
    """Common fields of responses and chunks.

    system_fingerprint  equal fingerprints and seeds return equal texts
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(ResponseHead, tag_field="object", tag="chat.completion", kw_only=True):
    choices: list[ChatCompletionChoice]
    usage: CompletionUsage
    metrics: RequestMetrics
    timings: Timings
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(ResponseHead, tag_field="object", tag="text_completion", kw_only=True):
    choices: list[CompletionChoice]
    usage: CompletionUsage
    metrics: RequestMetrics
    timings: Timings


class ChunkChoiceFields(Struct, kw_only=True):
    """A step of a choice, or its end.

    finish_reason   only set in the choice's last chunk
    """

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    speculation: SpeculationDetails | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The beginning of a call, with its id and name, or more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class MessageDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET  # instead, if the request has functions


class ChatChunkChoice(ChunkChoiceFields, kw_only=True):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


class CompletionChunkChoice(ChunkChoiceFields, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChunkFields(ResponseHead, kw_only=True):
    """An event of a stream.

    usage       if `stream_options` request it
    metrics     in the last chunk
    timings     in the last chunk
    obfuscation  in padded events
    """

    obfuscation: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatCompletionChunk(
    ChunkFields, tag_field="object", tag="chat.completion.chunk", kw_only=True
):
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChunk(ChunkFields, tag_field="object", tag="text_completion", kw_only=True):
    choices: list[CompletionChunkChoice]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A text of the response. annotations are empty, and logprobs unless requested."""

    text: str
    annotations: list[None]
    logprobs: list[TokenLogprob]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputItem(Struct, tag_field="type", kw_only=True):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(OutputItem, tag="message", kw_only=True):
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem, tag="reasoning", kw_only=True):
    """The model's reasoning, without a summary."""

    content: list[ReasoningText]
    summary: list[None]


class OutputCall(OutputItem, tag="function_call", kw_only=True):
    """A call of a function. Its arguments are JSON."""

    call_id: str
    name: str
    arguments: str


AnyOutput = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Struct):
    """Details of the input's tokens. `cache_write_tokens` is always 0: the prefix cache is free."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: Literal["server_error"]
    message: str


class ReasoningSettings(Struct):
    effort: str | None
    summary: None


class ResponseObject(Struct, tag_field="object", tag="response", kw_only=True):
    """A response: the resolved settings of the request, and the output.

    usage           null until the output is complete
    metrics         once the output is complete
    timings         once the output is complete
    stop_reason     the stop string or the id of stop_token_ids that ended the text
    seed            the same request with this seed returns the same text
    system_fingerprint  equal fingerprints and seeds return equal texts
    """

    id: str
    created_at: int
    model: str
    system_fingerprint: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[AnyOutput]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    stop_reason: str | int | None
    seed: int
    background: Literal[False]
    conversation: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    metrics: RequestMetrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, tag_field="object", tag="embedding", kw_only=True):
    """The embedding of one input: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, tag_field="object", tag="list", kw_only=True):
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RankedText(Struct):
    text: str


class RankedDocument(Struct):
    index: int  # in the request
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Struct):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class Score(Struct, tag_field="object", tag="score", kw_only=True):
    index: int
    score: float


class ScoreList(Struct, tag_field="object", tag="list", kw_only=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class ResponseEvent(Struct, tag_field="type", kw_only=True):
    """An event of a stream. Padded events have `obfuscation`."""

    sequence_number: int
    obfuscation: str | UnsetType = UNSET


class StateEvent(ResponseEvent, kw_only=True):
    response: ResponseObject


class ItemEvent(ResponseEvent, kw_only=True):
    output_index: int
    item: AnyOutput


class CallEvent(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class PartEvent(CallEvent, kw_only=True):
    content_index: int


class Created(StateEvent, tag="response.created", kw_only=True):
    pass


class InProgress(StateEvent, tag="response.in_progress", kw_only=True):
    pass


class Completed(StateEvent, tag="response.completed", kw_only=True):
    pass


class IncompleteEnd(StateEvent, tag="response.incomplete", kw_only=True):
    pass


class FailedEnd(StateEvent, tag="response.failed", kw_only=True):
    """The end of a response that fails. An `error` event follows."""


class ItemAdded(ItemEvent, tag="response.output_item.added", kw_only=True):
    pass


class ItemDone(ItemEvent, tag="response.output_item.done", kw_only=True):
    pass


class PartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class TextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(CallEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(CallEvent, tag="response.function_call_arguments.done", kw_only=True):
    arguments: str


class ErrorEvent(ResponseEvent, tag="error", kw_only=True):
    """The last event of a response that fails."""

    code: str | None
    message: str
    param: str | None
    error: ErrorDetails


AnyEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | IncompleteEnd
    | FailedEnd
    | ErrorEvent
)


class UnsupportedFeatures(Struct):
    """Features of a request that clients then do without."""

    error_code: str
    unsupported: list[str]


class MessageErrorDetails(Struct):
    """The type and the text of Anthropic's errors."""

    type: str
    message: str
    details: UnsupportedFeatures | UnsetType = UNSET


class MessageError(Struct, tag_field="type", tag="error"):
    """An error in Anthropic's format: a response, or the last event of a stream."""

    error: MessageErrorDetails
    obfuscation: str | UnsetType = UNSET


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """The model's reasoning. The signature is constant, and is ignored in requests."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool. `input` is empty if max_tokens cut the arguments."""

    id: str
    name: str
    input: dict[str, Any]


MessageBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct):
    """Counts of tokens.

    input_tokens    tokens of the prompt that were computed
    cache_read_input_tokens  tokens of the prompt that were cached
    cache_creation_input_tokens  always 0: the prefix cache is free
    output_tokens   tokens of the output, including reasoning
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Struct, tag_field="type", tag="message", kw_only=True):
    """A response of Anthropic's Messages API.

    stop_reason     null until the output is complete
    stop_sequence   the stop sequence that ended the text
    seed            the same request with this seed returns the same text
    system_fingerprint  equal fingerprints and seeds return equal texts
    metrics         once the output is complete
    timings         once the output is complete
    """

    id: str
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    seed: int
    system_fingerprint: str
    metrics: RequestMetrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int


class BlockTextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """A piece of a call's input. The pieces form a JSON object."""

    partial_json: str


class MessageEnd(Struct):
    """The changes of a message at its end."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEvent(Struct, tag_field="type", kw_only=True):
    """An event of a stream. Padded events have `obfuscation`."""

    obfuscation: str | UnsetType = UNSET


class MessageStart(MessageEvent, tag="message_start", kw_only=True):
    message: MessageObject


class BlockEvent(MessageEvent, kw_only=True):
    index: int


class BlockStart(BlockEvent, tag="content_block_start", kw_only=True):
    content_block: MessageBlock


class BlockDelta(BlockEvent, tag="content_block_delta", kw_only=True):
    delta: BlockTextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(BlockEvent, tag="content_block_stop", kw_only=True):
    pass


class MessageChange(MessageEvent, tag="message_delta", kw_only=True):
    """The end of the output, and the final usage."""

    delta: MessageEnd
    usage: MessageUsage
    metrics: RequestMetrics | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class MessageStop(MessageEvent, tag="message_stop", kw_only=True):
    pass


class Ping(MessageEvent, tag="ping", kw_only=True):
    """An event without content, sent after a time without output."""


AnyMessageEvent = (
    MessageStart
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageChange
    | MessageStop
    | Ping
    | MessageError
)
