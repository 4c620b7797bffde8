"""The messages between the HTTP process and the engine process: plain data, typed both ways."""

from array import array
from collections.abc import Iterable

import msgspec

from specserve.config import Config
from specserve.exchange.adapter import AdapterRef
from specserve.exchange.caller import Caller
from specserve.exchange.frames import pack
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.speculation_state import SpeculationState
from specserve.exchange.step_output import Stats, StepOutput
from specserve.memory.block_keys import Keys, KVFormat
from specserve.models.weight_forms import WeightForms


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """What a request had from an engine process that has ended: it goes on in another one."""

    output: list[int] = []  # its tokens so far
    num_scored: int = 0  # tokens of the prompt whose logprobs were told


NOT_BEGUN = Begun()


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
    begun: Begun = NOT_BEGUN  # of a single choice
    adapter: AdapterRef | None = None

    @property
    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()

    @property
    def samplings(self) -> list[Sampling]:
        return [msgspec.structs.replace(self.sampling, seed=seed) for seed in self.seeds]


class Begin(msgspec.Struct, frozen=True):
    """To a fork server: what an engine process is to be."""

    config: Config
    sources: tuple[str, ...] = ()  # that details have numbered so far, see `Ready.known_sources`
    first: Config | None = None  # of the first engine process, where it may be another one


class EngineCommands(msgspec.Struct, frozen=True):
    """To the engine: requests to add and ids to remove before the next step."""

    add: list[Add]
    finish: list[int]
    reset_cache: bool = False
    tell_speculation: list[int] = []  # tenants: the answer to each is a `SpeculationState`
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

    taps  the layers of the target of which it reads what comes in; their number: what comes out
    """

    name: str  # "mtp" where it came with the target
    taps: tuple[int, ...]
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
    known_sources: tuple[str, ...] = ()  # all that there have been, by their bits in `Tree.sources`
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

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(EngineCommands).decode
decode_reply = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: EngineCommands | FromEngine) -> bytes:
    return pack(encode(message))
