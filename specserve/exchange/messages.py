"""Messages between the HTTP process and the engine process: requests, outputs, states, frames."""

import select
import socket
from array import array
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Literal

import msgspec

from specserve.config import Config
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.sleep import SleepState
from specserve.memory.blocks import Keys, KVFormat
from specserve.memory.disk_tier import TierStats
from specserve.models.selection import Drafters
from specserve.models.weight_forms import WeightForms


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter. Only the HTTP process knows its names, which may move to other adapters."""

    folder: str  # the engine rereads it here, and refuses it if the digest differs
    digest: str  # SHA-256 of its tensors and scalings, in hexadecimal
    rank: int


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """The origin of requests. A call is one HTTP request or one `LLM.generate`."""

    call: int  # id of the call's first request; earlier calls have smaller numbers
    tenant: int = 0  # index of the API key in the key file; 0 without keys
    request_id: str = ""  # of the HTTP request, for log lines
    session: str = ""  # the request's `prompt_cache_key`


VERSION = 1  # of the messages; a process that receives another version fails
MAX_BYTES = 1 << 28  # maximum bytes of a frame's payload
HEADER = Struct("<II")  # version, bytes of the payload


def pack(payload: bytes) -> bytes:
    assert len(payload) <= MAX_BYTES, f"a frame of {len(payload)} bytes is too long to send"
    return HEADER.pack(VERSION, len(payload)) + payload


class Frames:
    """Splits the bytes of a socket into frames."""

    def __init__(self) -> None:
        self.pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that `data` completes. RuntimeError for a wrong version or length."""
        self.pending += data
        while len(self.pending) >= HEADER.size:
            version, length = HEADER.unpack_from(self.pending)
            if version != VERSION:
                raise RuntimeError(f"a frame has version {version} instead of {VERSION}")
            if length > MAX_BYTES:
                raise RuntimeError(f"a frame has {length} bytes. At most {MAX_BYTES} are allowed")
            end = HEADER.size + length
            if len(self.pending) < end:
                return
            frame = bytes(memoryview(self.pending)[HEADER.size : end])
            del self.pending[:end]
            yield frame


CHUNK = 1 << 20  # maximum bytes of one read
encode = msgspec.msgpack.Encoder().encode


class Link:
    """A child process's end of a blocking socket. EOFError once the parent has closed its end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.frames = sock, Frames()
        self.arrivals = select.poll()
        self.arrivals.register(sock, select.POLLIN)

    def receive(self, wait: bool) -> list[bytes]:
        """Return the frames that have arrived; `wait` waits for at least one."""
        got: list[bytes] = []
        if not wait and not self.arrivals.poll(0):  # as usual: an exception would take longer
            return got
        while True:
            try:
                data = self.sock.recv(CHUNK, 0 if wait and not got else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return got
            if not data:
                raise EOFError
            got += self.frames.feed(data)

    def send(self, message: msgspec.Struct) -> None:
        self.sock.sendall(pack(encode(message)))


class RowCost(msgspec.Struct, frozen=True):
    """The time of a step with up to `rows` rows, without the terms for context and requests."""

    rows: int
    seconds: float
    is_known: bool  # measured at this size; else estimated from other sizes


class CostState(msgspec.Struct, frozen=True):
    """The step costs of one model on this machine."""

    steps: list[RowCost]
    seconds_per_token: float  # per context token, once per request
    seconds_per_row_token: float  # per context token and row that attends to it
    seconds_per_request: float
    slowdown: float  # factor of other load at present; multiplies all seconds


class PlainStep(msgspec.Struct, frozen=True):
    """Measured steps of one request without draft tokens, at about the same context length."""

    context: int  # tokens, median
    seconds: float  # time of a step without drafting, median
    steps: int  # number of steps; only the latest count


class CalibrationPoint(msgspec.Struct, frozen=True):
    """Draft tokens of one source with similar scores, at one depth of the tree."""

    depth: int  # from 1
    score: float  # mean of the source's own estimates of acceptance
    right: float  # accepted share of the draft tokens
    tries: float  # number of draft tokens; older ones count less


class PlanState(msgspec.Struct, frozen=True):
    """The plan of a step that could have draft tokens."""

    roots: int  # rows of the last tokens of requests
    prompt_rows: int
    guesses: int  # draft tokens
    rows: int  # of the step: the sum of the above
    tokens: float  # expected number
    seconds: float  # expected, including drafting
    kept: float = 1.0  # share of the expected draft tokens that the plan counts on


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's state of speculation for one tenant."""

    sources: tuple[str, ...] = ()
    known_sources: tuple[str, ...] = ()  # all sources so far, by their bits in details
    max_nodes: int = 0  # draft tokens per request and step
    max_step_nodes: int = 0  # draft tokens per step, over all requests
    costs: dict[str, CostState] = {}  # by model, "target" and "draft"
    plain_steps: list[PlainStep] = []  # by rising context
    tenant: int = 0  # its requests without a salt update `calibration`
    calibration: dict[str, list[CalibrationPoint]] = {}  # by source
    plan: PlanState | None = None  # of the latest step that had only requests of the tenant


class SourceCounts(msgspec.Struct):
    """Draft tokens of one source in a step, a request, or a response. A draft token of several
    sources counts for each source.
    """

    proposed: int = 0
    verified: int = 0
    accepted: int = 0

    def __add__(self, other: "SourceCounts") -> "SourceCounts":
        return SourceCounts(
            self.proposed + other.proposed,
            self.verified + other.verified,
            self.accepted + other.accepted,
        )


class VerifiedTree(msgspec.Struct, frozen=True):
    """The verified draft tokens of a step. `tokens[k - 1]` is node k.

    Its parent is node `parents[k - 1]` < k. Node 0 is the root, the last token before the step.
    """

    tokens: list[int]
    parents: list[int]
    sources: list[int]  # per draft token: bit i is set if `Engine.known_sources[i]` proposed it
    accepted: list[int]  # nodes, from the root down


class StepDetails(msgspec.Struct, frozen=True):
    """The sources of the tokens of one step."""

    tokens: list[int]
    ends: list[int]  # end of each token in the choice's text, in characters
    sources: list[int]  # per token, as in `VerifiedTree.sources`; 0: only the target model
    tree: VerifiedTree  # the draft tokens that the step verified


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of a token and of the most likely tokens at its position.

    They are natural logarithms of probabilities, before any parameter changes the logits.
    """

    logprob: float
    rank: int  # 1 for the most likely token
    ids: list[int]  # the most likely tokens, of ranks 1, 2, ..., up to the requested number
    top: list[float]  # their logprobs


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of one step for one request, as plain data for another process."""

    id: int
    tokens: list[int]
    finish_reason: str | None  # "stop" | "length" if these tokens end it, "error" after a failure
    is_verified: bool  # the step had a root, so it counts for the acceptance length
    num_drafted: int
    num_accepted: int
    admitted_at: float  # seconds, perf_counter: when the request left the queue
    num_cached: int = 0  # prompt tokens found in the prefix cache
    is_fallback: bool = False  # drafted by n-grams, because the draft model had not caught up
    failure: str = ""  # why the request cannot continue; empty if it can
    blamed: str = ""  # the parameter that caused the failure; empty: none
    sources: dict[str, SourceCounts] = {}  # in the engine's order; empty if no source was asked
    tree: VerifiedTree | None = None  # only if the request asked for details and had draft tokens
    logprobs: list[TokenLogprobs] = []  # of `tokens`, if the request asked for them
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's next tokens, from the second on
    # Only of beam search, whose tokens come at its end:
    first_token_at: float = 0.0  # seconds, perf_counter: when its first step ended
    num_steps: int = 0
    pooled: bytes = b""  # the prompt's vector, float32, if the request asked for it

    @property
    def is_of_prompt(self) -> bool:
        """Whether it has only prompt logprobs, because the request has no first token yet."""
        return not self.tokens and self.finish_reason is None


class SourceStats(SourceCounts):
    """Sums over all steps for one source."""

    accepted_at: list[int] = []  # accepted tokens by depth: first the children of the root
    seconds: float = 0.0  # wall time of proposing
    saved_seconds: float = 0.0  # estimate: time saved by accepted draft tokens, minus its own time
    errors: int = 0  # exceptions of a user's drafter


class Stats(msgspec.Struct):
    """Sums over all steps; seconds are wall time."""

    num_steps: int = 0
    num_rows: int = 0
    num_roots: int = 0  # rows of the last tokens of requests
    num_drafted: int = 0  # rows of draft tokens
    num_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # forward passes of the target model
    step_seconds: float = 0.0
    num_fallbacks: int = 0  # drafts by n-grams, because the draft model had not caught up
    num_looked_up: int = 0  # prompt tokens looked up in the prefix cache
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_resets: int = 0  # of the prefix cache
    num_checkpoints: int = 0  # recurrent states that the prefix cache holds now
    num_checkpoint_hits: int = 0  # prompts that found one
    sources: dict[str, SourceStats] = {}  # by draft source
    tiers: dict[str, TierStats] = {}  # "host" and "disk", if they exist

    @property
    def drafter_errors(self) -> int:
        return sum(sums.errors for sums in self.sources.values())


class ResumeState(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a request in an engine process that ended, from which another one resumes."""

    output: list[int] = []  # its tokens so far
    num_scored: int = 0  # prompt tokens whose logprobs were sent


NOT_RESUMED = ResumeState()


def packed(token_ids: Iterable[int]) -> bytes:
    return array("i", token_ids).tobytes()


class Add(msgspec.Struct, frozen=True, array_like=True):
    """A prompt and the seeds of its choices. Their ids are `id`, `id` + 1, ..., all unused so far.

    Data that all choices share is sent once, because decoding it delays the engine's steps.
    """

    id: int
    tokens: bytes  # the prompt's ids, `packed`: a list takes 36 bytes per id while it waits
    sampling: Sampling
    seeds: list[int]
    keys: Keys = {}  # of the prompt's blocks; if empty, the engine hashes the prompt
    caller: Caller | None = None
    resume: ResumeState = NOT_RESUMED  # only for a single choice
    adapter: AdapterRef | None = None

    @property
    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()

    @property
    def samplings(self) -> list[Sampling]:
        return [msgspec.structs.replace(self.sampling, seed=seed) for seed in self.seeds]


class EngineStart(msgspec.Struct, frozen=True):
    """The first message to a new engine process."""

    config: Config
    sources: tuple[str, ...] = ()  # numbered in details so far, see `Ready.known_sources`
    first: Drafters | None = None  # of the first engine process, whose head stays loaded
    tenants: tuple[str, ...] = ()  # digest of each API key, if blocks are kept on disk


class SessionTask(msgspec.Struct, frozen=True, array_like=True):
    """A task for the KV blocks of the requests with one `prompt_cache_key`."""

    id: int
    action: Literal["save", "load", "pin", "unpin"]
    session: str


class SessionReport(msgspec.Struct, frozen=True, tag=True):
    """The reply to a SessionTask. If nothing was done, `refusal` is the reason."""

    id: int
    num_blocks: int = 0  # 0: no session has the name
    num_in_memory: int = 0
    num_on_disk: int = 0
    refusal: str = ""


class EngineCommands(msgspec.Struct, frozen=True):
    """A message to the engine. It adds and removes requests before the next step."""

    add: list[Add]
    finish: list[int]
    reset_cache: bool = False
    report_speculation: list[int] = []  # tenants; the reply to each is a `SpeculationState`
    change: Config | None = None  # of speculation; the reply, some steps later, is a `Changed`
    load_adapters: list[str] = []  # folders; the replies, some steps later, are `AdapterLoaded`
    forget_adapters: list[str] = []  # digests of adapters that requests can no longer name
    sleep: int = 0  # level to sleep at; the reply is a `SleepState`
    wake_up: list[str] = []  # tags to wake up; the reply is a `SleepState`
    sessions: list[SessionTask] = []  # the replies, some steps later, are `SessionReport`


class Loading(msgspec.Struct, frozen=True, tag=True):
    name: str
    done: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A ConfigError that was raised while loading."""

    message: str


class DraftHeadCard(msgspec.Struct, frozen=True):
    """The draft head of the target model.

    taps  layers of the target model whose input the head reads; the number of layers stands for
          the output of the last layer
    """

    name: str  # "mtp" if it is part of the target model
    aux_layer_ids: tuple[int, ...] = msgspec.field(name="taps")
    draft_vocab_size: int
    weights: WeightForms


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The message of an engine that is loaded: all that the HTTP process needs to know about it."""

    phases: dict[str, str]  # of the start-up: name -> seconds and a note
    drafter: str
    vocab_size: int
    max_model_len: int
    dtype: str  # of the activations, resolved: "bf16" | "fp32"
    kv_dtype: str  # resolved: "bf16" | "fp32" | "int8" | "fp8"
    arithmetic: str  # the build of the kernels, and the instruction set or the GPU
    block_size: int  # tokens of the target model per block
    num_blocks: int
    kv_formats: dict[str, KVFormat]  # of the models with a prefix cache
    implementation: str = "native"  # of the target model: "native" | "transformers"
    row_invariant: bool | None = None  # whether results are batch-invariant; None: not measured,
    # because native code is batch-invariant by construction
    has_head: bool = True  # whether the target model was trained to generate text
    weights: WeightForms = WeightForms()  # of the target model
    sources: tuple[str, ...] = ()  # of draft tokens
    known_sources: tuple[str, ...] = ()  # all so far, by their bits in `VerifiedTree.sources`
    draft_weights: WeightForms | None = None  # None without a draft model
    draft_head: DraftHeadCard | None = None


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The reply to a change of speculation. If nothing changed, `refusal` is the reason."""

    ready: Ready | None
    refusal: str = ""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The reply to loading an adapter. If that failed, `refusal` is the reason."""

    folder: str
    adapter: AdapterRef | None
    refusal: str = ""


class Report(msgspec.Struct, frozen=True, tag=True):
    """The engine's state, sent after every step and whenever requests have been removed."""

    outputs: list[StepOutput]
    num_running: int
    num_waiting: int
    num_preempted: int
    blocks: dict[str, int]  # by holder
    stats: Stats

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that the models hold, 0 to 1."""
        return (self.blocks["target"] + self.blocks["draft"]) / (sum(self.blocks.values()) or 1)


EngineReply = SpeculationState | Changed | AdapterLoaded | SleepState | SessionReport
FromEngine = Loading | Failed | Ready | Report | EngineReply

decode_commands = msgspec.msgpack.Decoder(EngineCommands).decode
decode_reply = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: EngineCommands | FromEngine) -> bytes:
    return pack(encode(message))
