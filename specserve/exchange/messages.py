"""Data between the HTTP process and the engine process: requests, outputs, messages, frames."""

import socket
from array import array
from collections.abc import Iterable, Iterator
from struct import Struct

import msgspec

from specserve.config import Config
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import Keys, KVFormat
from specserve.models.selection import Drafters
from specserve.models.weight_forms import WeightForms


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """Names are the HTTP process's own: what is known by one may change."""

    folder: str  # where it can be read, for as long as its content is this
    digest: str  # SHA-256 of what it does to the model, in hexadecimal
    rank: int


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """A call is one HTTP request or one `LLM.generate`, with all its prompts and choices."""

    call: int  # the id of its first request, so that an earlier call has a smaller one
    tenant: int = 0  # index of the API key in the key file; 0 without keys
    request_id: str = ""  # of an HTTP request, for log lines


VERSION = 1  # of the messages; ends of different versions stop at once
MAX_BYTES = 1 << 28
HEADER = Struct("<II")  # version, bytes that follow


def pack(payload: bytes) -> bytes:
    assert len(payload) <= MAX_BYTES, f"a frame of {len(payload)} bytes is too long to send"
    return HEADER.pack(VERSION, len(payload)) + payload


class Frames:
    """Splits the bytes of a socket into frames."""

    def __init__(self) -> None:
        self.pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that these bytes complete; RuntimeError for a wrong version or length."""
        self.pending += data
        while len(self.pending) >= HEADER.size:
            version, length = HEADER.unpack_from(self.pending)
            if version != VERSION:
                raise RuntimeError(f"a frame of version {version}, and this end speaks {VERSION}")
            if length > MAX_BYTES:
                raise RuntimeError(f"a frame of {length} bytes, and {MAX_BYTES} are allowed")
            end = HEADER.size + length
            if len(self.pending) < end:
                return
            frame = bytes(memoryview(self.pending)[HEADER.size : end])
            del self.pending[:end]
            yield frame


CHUNK = 1 << 20
encode = msgspec.msgpack.Encoder().encode


class Link:
    """A child process's end of a socket, blocking; EOFError once the parent has closed its end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.frames = sock, Frames()

    def receive(self, wait: bool) -> list[bytes]:
        """The frames that have arrived; waits for at least one if `wait`."""
        got: list[bytes] = []
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
    """A step of up to so many rows, without what context and requests add."""

    rows: int
    seconds: float
    is_known: bool  # from steps of this size; else estimated from those of others


class CostState(msgspec.Struct, frozen=True):
    """What a model's steps take on this machine."""

    steps: list[RowCost]
    seconds_per_token: float  # of context, once for each request
    seconds_per_row_token: float  # of context, for each row that attends to it
    seconds_per_request: float
    slowdown: float  # by other load, at present: all seconds are to be multiplied by it


class PlainStep(msgspec.Struct, frozen=True):
    """Measured steps of one request without draft tokens, of about the same context."""

    context: int  # tokens; the median
    seconds: float  # of a whole step without the time of drafting; the median
    steps: int  # how many: the latest


class CalibrationPoint(msgspec.Struct, frozen=True):
    """Guesses of one source, with scores close to each other, at one depth from 1."""

    depth: int
    score: float  # on average: the source's own estimate that a guess is right
    right: float  # share that was right
    tries: float  # number of guesses; older ones count for less


class PlanState(msgspec.Struct, frozen=True):
    """The plan of a step that could have guesses."""

    roots: int
    prompt_rows: int
    guesses: int
    rows: int  # of the step: all of these
    tokens: float  # expected
    seconds: float  # expected, drafting included


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an engine tells of its speculation."""

    sources: tuple[str, ...] = ()
    known_sources: tuple[str, ...] = ()  # all that there have been, by their bits in details
    max_nodes: int = 0  # guesses of a request and step
    max_step_nodes: int = 0  # guesses of a step, over all requests
    costs: dict[str, CostState] = {}  # by model, "target" and "draft"
    plain_steps: list[PlainStep] = []  # by rising context
    tenant: int = 0  # whose requests without a salt `calibration` is learnt from
    calibration: dict[str, list[CalibrationPoint]] = {}  # by source
    plan: PlanState | None = None  # of that tenant's latest step without others' requests


class SourceCounts(msgspec.Struct, frozen=True):
    """A source's guesses in one or more steps; one of several sources counts for each of them."""

    proposed: int
    verified: int
    accepted: int


class VerifiedTree(msgspec.Struct, frozen=True):
    """The verified guesses of a step: `tokens[k - 1]` is node k, below node `parents[k - 1]` < k.

    Node 0 is the root, the last token before the step.
    """

    tokens: list[int]
    parents: list[int]
    sources: list[int]  # of each guess: bit i is set where `Engine.known_sources[i]` made it
    accepted: list[int]  # nodes, from the root down


class StepDetails(msgspec.Struct, frozen=True):
    """Where the tokens of one step came from."""

    tokens: list[int]
    ends: list[int]  # characters of the choice's text, up to and with each token's
    sources: list[int]  # of each token, as in `VerifiedTree.sources`; 0 is the target alone
    tree: VerifiedTree  # of the guesses that the step verified


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the model says of a token and of the likeliest ones in its place, before any parameter
    changes its logits: natural logarithms of probabilities.
    """

    logprob: float
    rank: int  # 1 for the likeliest
    ids: list[int]  # those of the ranks 1, 2, ..., as many as were asked for
    top: list[float]  # and what it says of them


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced for one request, as plain data that is sent between processes."""

    id: int
    tokens: list[int]
    finish_reason: str | None  # "stop" | "length" where these tokens end it, "error" at a failure
    is_verified: bool  # the step had a root, so that it counts for the acceptance length
    num_drafted: int
    num_accepted: int
    admitted_at: float  # seconds, perf_counter: when it left the queue
    num_cached: int = 0  # tokens of the prompt that were found in the prefix cache
    is_fallback: bool = False  # drafted by n-grams, as the draft model had not caught up
    failure: str = ""  # why the request cannot continue; empty if it can
    blamed: str = ""  # the parameter that it is due to; empty: to none
    sources: dict[str, SourceCounts] = {}  # all in the engine's order, if any was asked
    tree: VerifiedTree | None = None  # only where the request asked for details and had guesses
    logprobs: list[TokenLogprobs] = []  # of `tokens`, where the request asked for them
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's next tokens, from its second on

    @property
    def is_of_prompt(self) -> bool:
        """Whether it only tells a part of the prompt's logprobs: its first token is yet to come."""
        return not self.tokens and self.finish_reason is None


class SourceStats(msgspec.Struct):
    """Sums over all steps for one source of guesses; one of several sources counts for each."""

    proposed: int = 0
    verified: int = 0
    accepted: list[int] = []  # by depth: of children of the root first
    seconds: float = 0.0  # wall time that it took
    saved_seconds: float = 0.0  # estimated: what its accepted guesses saved, less what it took
    errors: int = 0  # exceptions of a user's drafter


class Stats(msgspec.Struct):
    """Sums over all steps; seconds are wall time."""

    num_steps: int = 0
    num_rows: int = 0
    num_roots: int = 0  # rows of the last tokens of requests
    num_drafted: int = 0  # rows of guesses
    num_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's forward
    step_seconds: float = 0.0
    num_fallbacks: int = 0  # drafts that n-grams made, as the draft model had not caught up
    num_looked_up: int = 0  # prompt tokens looked up in the prefix cache
    num_cached: int = 0  # those that were found
    num_resets: int = 0  # of the prefix cache
    sources: dict[str, SourceStats] = {}  # of guesses, by name

    @property
    def drafter_errors(self) -> int:
        return sum(sums.errors for sums in self.sources.values())


class ResumeState(msgspec.Struct, frozen=True, array_like=True):
    """What a request had from an engine process that has ended: it goes on in another one."""

    output: list[int] = []  # its tokens so far
    num_scored: int = 0  # tokens of the prompt whose logprobs were told


NOT_RESUMED = ResumeState()


def packed(token_ids: Iterable[int]) -> bytes:
    return array("i", token_ids).tobytes()


class Add(msgspec.Struct, frozen=True, array_like=True):
    """A prompt and the seeds of its choices; their ids are `id`, `id` + 1, ..., all unused so far.

    What choices share is sent once: decoding it takes time from the engine's steps.
    """

    id: int
    tokens: bytes  # the prompt's ids, `packed`: in a list each takes 36 bytes while it waits
    sampling: Sampling
    seeds: list[int]
    keys: Keys = {}  # of the prompt's blocks; if empty, the engine hashes the prompt
    caller: Caller | None = None
    resume: ResumeState = NOT_RESUMED  # of a single choice
    adapter: AdapterRef | None = None

    @property
    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()

    @property
    def samplings(self) -> list[Sampling]:
        return [msgspec.structs.replace(self.sampling, seed=seed) for seed in self.seeds]


class EngineStart(msgspec.Struct, frozen=True):
    """To a fork server: what an engine process is to be."""

    config: Config
    sources: tuple[str, ...] = ()  # that details have numbered so far, see `Ready.known_sources`
    first: Drafters | None = None  # of the first engine process, whose head stays


class EngineCommands(msgspec.Struct, frozen=True):
    """To the engine: requests to add and ids to remove before the next step."""

    add: list[Add]
    finish: list[int]
    reset_cache: bool = False
    report_speculation: list[int] = []  # tenants: the answer to each is a `SpeculationState`
    change: Config | None = None  # who guesses; the answer, some steps later, is a `Changed`
    load_adapters: list[str] = []  # folders: each is answered, some steps later, by AdapterLoaded
    forget_adapters: list[str] = []  # digests of those that no request names any more


class Loading(msgspec.Struct, frozen=True, tag=True):
    name: str
    done: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A ConfigError that was raised while loading."""

    message: str


class DraftHeadCard(msgspec.Struct, frozen=True):
    """What is told of the target's draft head.

    taps  layers of the target model whose input the head reads; the number of layers: the output of
          the last layer
    """

    name: str  # "mtp" where it came with the target
    aux_layer_ids: tuple[int, ...] = msgspec.field(name="taps")
    draft_vocab_size: int
    weights: WeightForms


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded: what the HTTP process has to know about it and its model."""

    phases: dict[str, str]  # of the start-up: name -> seconds and a note
    drafter: str
    vocab_size: int
    max_model_len: int
    dtype: str  # of the activations, as resolved: "bf16" | "fp32"
    kv_dtype: str  # as resolved: "bf16" | "fp32" | "int8" | "fp8"
    arithmetic: str  # the build of the kernels, and the instruction set or the GPU
    block_size: int  # target tokens in a block
    num_blocks: int
    kv_formats: dict[str, KVFormat]  # of the models with a prefix cache
    implementation: str = "native"  # of the target: "native" | "transformers"
    row_invariant: bool | None = None  # whether its rows have the same bits in all steps; None: by
    # construction, as far as the build has that
    weights: WeightForms = WeightForms()  # of the target
    sources: tuple[str, ...] = ()  # of guesses
    known_sources: tuple[str, ...] = ()  # all so far, by their bits in `VerifiedTree.sources`
    draft_weights: WeightForms | None = None  # None without a draft model
    draft_head: DraftHeadCard | None = None


class Changed(msgspec.Struct, frozen=True, tag=True):
    """The engine guesses as it was told, or as before: then `refusal` says why."""

    ready: Ready | None
    refusal: str = ""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """An adapter that requests may have; without it, `refusal` says why not."""

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


FromEngine = Loading | Failed | Ready | Report | SpeculationState | Changed | AdapterLoaded

decode_commands = msgspec.msgpack.Decoder(EngineCommands).decode
decode_reply = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: EngineCommands | FromEngine) -> bytes:
    return pack(encode(message))
