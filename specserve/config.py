"""Every knob of the engine, and where its value comes from.

Does not import torch, which would slow down `specserve --help`.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from specserve.errors import ConfigError
from specserve_drafters.base import EAGLE
from specserve_drafters.candidates import MAX_NODES

# A small pair of models in the package, used where none is named.
DEMO = Path(__file__).parent / "demo" / "weights"
DEMO_TARGET, DEMO_DRAFT = DEMO / "specserve-demo", DEMO / "specserve-demo-draft"
DEMO_HEAD = DEMO / "specserve-demo-head"  # EAGLE-3, of the pair's target
STREAM_INTERVAL = 50.0  # milliseconds
USUAL_LORAS = 4  # adapters whose requests run at once
TLS_FILES = "tls_certificate_file", "tls_key_file"
DEMO_COST = DEMO.parent / "at_cost"  # files that say how the pair is scaled
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0.0)]
Milliseconds = Annotated[float, Meta(ge=1e-3)]
Name = Annotated[str, Meta(min_length=1)]


def about(text: str) -> Meta:
    """A description of a knob, shown by `specserve config show` and in errors."""
    return Meta(description=text)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen group of knobs. A misspelt key is an error, not a default."""


class ModelConfig(Section, frozen=True):
    """The target: the model whose tokens are emitted."""

    path: Annotated[
        Name | None, about("a local folder, a .gguf file or a hub id; unset: the demo pair")
    ] = None
    demo_compute: Annotated[
        Literal["qwen3-0.6b", "llama-3.1-8b"] | None,
        about(
            "qwen3-0.6b or llama-3.1-8b: the demo pair's words in the time of a model of that "
            "shape; unset: the pair as it is"
        ),
    ] = None
    chat_template: Annotated[
        Name | None,
        about("a file with the chat template, in jinja; unset: the model's own"),
    ] = None
    implementation: Annotated[
        Literal["auto", "native", "transformers"],
        about(
            "auto, native or transformers: whose code computes the target; auto is native where "
            "that has the architecture, else transformers"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"], about("auto, bf16 or fp32; auto is the checkpoint's")
    ] = "auto"
    quantize: Annotated[
        Literal["w8a8", "w8", "w4"] | None,
        about(
            "w8 or w4 rounds weights to 8 or 4 bits as they are loaded, w8a8 to 8 bits, and "
            "activations, too; unset: as they are"
        ),
    ] = None
    quantize_head: Annotated[
        Literal["none", "w8", "w4"],
        about("none, w8 or w4: the heads of models whose weights are rounded"),
    ] = "w8"
    quantize_embedding: Annotated[
        Literal["none", "w8"],
        about("none or w8: the embeddings of models whose weights are rounded"),
    ] = "none"
    device: Annotated[
        str,
        Meta(pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]?))?)$"),
        about("auto, cpu, cuda, or cuda:1 for the second GPU; auto is a GPU where there is one"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "flashinfer", "triton"],
        about("on a GPU: auto, flashinfer or triton; auto is FlashInfer for prompts, if there"),
    ] = "auto"
    threads: Annotated[Positive | None, about("CPU threads, at least 1; unset: by timing")] = None


class MemoryConfig(Section, frozen=True):
    """The one paged pool that target and draft model share."""

    block_size: Annotated[Positive, about("target tokens in a block, at least 1")] = 16
    kv_bytes: Annotated[Positive | None, about("size of the pool; unset: kv_fraction decides")] = (
        None
    )
    kv_fraction: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        about("share of the memory free after the weights, above 0 and at most 1"),
    ] = 0.5
    draft_block_size: Annotated[
        Positive | None, about("draft tokens in a block, at least 1; unset: as many as fit")
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        about(
            "auto, int8 or fp8; auto is the model's; the others, with a scale for each token and "
            "head, fit about twice the tokens of bf16"
        ),
    ] = "auto"
    prefix_cache: Annotated[bool, about("whether prompts that begin alike are computed once")] = (
        True
    )
    share_prefix_cache: Annotated[
        bool,
        about(
            "whether requests of all API keys share KV of prompts that begin alike; then "
            "cached_tokens and the time to first token show a key what other keys have sent"
        ),
    ] = False


class SchedulerConfig(Section, frozen=True):
    """How many requests run, and with how many rows a step."""

    max_running: Annotated[Positive, about("requests that run at once, at least 1")] = 64
    max_batched_tokens: Annotated[
        Positive,
        about("rows of a step, more than max_running; while no stream runs, prompts take all"),
    ] = 512
    prefill_chunk: Annotated[
        Positive, about("rows of prompts that a running stream waits for in a step, at least 1")
    ] = 128
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,  # a token of the prompt and one of the output
        about("prompt and output tokens of a request, at least 2; unset: the model's"),
    ] = None
    ttft_ms: Annotated[
        Milliseconds | None,
        about("target of requests that give none: arrival to first token; unset: no target"),
    ] = None
    tpot_ms: Annotated[
        Milliseconds | None,
        about("target of requests that give none: a token after the first; unset: no target"),
    ] = None

    def __post_init__(self) -> None:
        if self.max_batched_tokens <= self.max_running:
            raise ValueError(
                f"scheduler.max_batched_tokens = {self.max_batched_tokens} must exceed "
                f"scheduler.max_running = {self.max_running}, as every running request has a row "
                "in every step: raise the first or lower the second"
            )


class SpeculationConfig(Section, frozen=True):
    """Limits on guesses."""

    max_nodes: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_NODES)] | None,
        about(
            f"guesses a request and step, 0 to {MAX_NODES}; 0: no speculation; unset: "
            f"{MAX_NODES} for drafter.name = auto, else 16"
        ),
    ] = None
    max_step_nodes: Annotated[
        Natural | None,
        about("guesses a step, over all requests, 0 or more; unset: 256 for auto, else 32"),
    ] = None


class DrafterConfig(Section, frozen=True):
    """The drafter, which makes the guesses."""

    name: Annotated[
        Name,
        about(
            'auto, none, ngram, model, eagle or a "package.module:Class"; auto asks n-grams and, '
            "where there are such, a draft model and a head of the target, and verifies the "
            "guesses that it expects to save time; the others verify all that they guess, up to "
            "the limits of [speculation]"
        ),
    ] = "auto"
    model: Annotated[
        Name | None,
        about(
            "the draft model, as model.path, or an EAGLE-3 head; unset: none, or the demo pair's"
        ),
    ] = None
    head: Annotated[
        Name | None,
        about(
            "an EAGLE-3 head of the target, a local folder or a hub id; unset: drafter.model where "
            "that is one, or the target's own MTP layers, or the demo's where eagle is named"
        ),
    ] = None
    quantize: Annotated[
        Literal["w8a8", "w8", "w4"] | None, about("as model.quantize, for the draft model")
    ] = None
    options: Annotated[
        dict[str, Any],
        about(
            "the drafter's own knobs; of auto: sources, source_options (of drafters among them, by "
            "name), max_depth, width and tau"
        ),
    ] = {}

    def __post_init__(self) -> None:
        if "." in self.name and ":" not in self.name:
            raise ValueError(
                f"drafter.name = {self.name!r} is neither a built-in name (auto, none, ngram, "
                "model, eagle) nor 'package.module:Class'"
            )


class LoraConfig(Section, frozen=True):
    """LoRA adapters of the target, which requests choose by name."""

    max_loras: Annotated[
        Natural | None,
        about(
            "adapters whose requests run at once, 0 or more; 0: there are none; unset: as many as "
            "modules has, but 4 at least, and 0 where nothing else of [lora] is set"
        ),
    ] = None
    max_rank: Annotated[
        Annotated[int, Meta(ge=1, le=512)],
        about("the largest rank of an adapter, 1 to 512; every slot takes memory for it"),
    ] = 16
    modules: Annotated[
        dict[Name, Name],
        about("adapters that are there from the start: name -> folder or hub id"),
    ] = {}
    folder: Annotated[
        Name | None,
        about(
            "where the adapters are that callers with an admin key may load while the server runs; "
            "unset: none"
        ),
    ] = None
    allow_hub: Annotated[bool, about("whether these callers may name hub ids, too")] = False

    def __post_init__(self) -> None:
        names = "modules", "folder", "allow_hub"
        given = [name for name in names if getattr(self, name)]
        if self.max_loras == 0 and given:
            raise ValueError(
                f"lora.{given[0]} is of no use where lora.max_loras = 0: raise that, or leave the "
                "first out"
            )

    @property
    def num_slots(self) -> int:
        """Adapters that the target has room for."""
        if self.max_loras is not None:
            return self.max_loras
        is_asked = bool(self.modules or self.folder or self.allow_hub)
        return max(len(self.modules), USUAL_LORAS) if is_asked else 0


class ServerConfig(Section, frozen=True):
    """The HTTP server and its limits."""

    host: Annotated[Name, about("address to listen at; 0.0.0.0 is all of them")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), about("0 to 65535; 0 takes any that is free")] = 8000
    served_model_name: Annotated[
        Name | None,
        about("what clients call the model; unset: its folder's or file's name, or its hub id"),
    ] = None
    tool_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "command_r", "template", "none"],
        about(
            "how the model writes tool calls: auto, hermes, llama3_json, mistral, command_r, "
            "template (its tokenizer's own response template) or none; auto looks at its chat "
            "template"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        about("how the model writes reasoning: auto, think (<think>...</think>) or none"),
    ] = "auto"
    api_key_file: Annotated[
        Name | None,
        about("a file with the accepted API keys, one a line; unset: no key needed"),
    ] = None
    admin_key_file: Annotated[
        Name | None,
        about(
            "a file with admin keys, one a line, each with its scopes behind a space: speculation, "
            "cache, adapters, with commas between; none: all; unset: nobody may change who guesses"
        ),
    ] = None
    allow_no_keys: Annotated[
        bool,
        about(
            "whether a server without API keys may listen where other machines reach it: at any "
            "host but localhost, 127.0.0.0/8 and ::1"
        ),
    ] = False
    tls_certificate_file: Annotated[
        Name | None,
        about("the server's certificate and those above it, in PEM; unset: HTTP without TLS"),
    ] = None
    tls_key_file: Annotated[
        Name | None, about("the certificate's key, in PEM and not encrypted")
    ] = None
    cors_origins: Annotated[
        tuple[Name, ...],
        about('origins of web pages that may call, as in ["https://chat.example"]; ["*"]: all'),
    ] = ()
    hang_seconds: Annotated[
        float,
        Meta(gt=0),
        about(
            "an engine process that has ended no step for so long is replaced by another one; it "
            "has to be longer than any step"
        ),
    ] = 120.0
    access_log: Annotated[
        bool, about("whether each request that has ended is a line on stderr")
    ] = True
    log_format: Annotated[
        Literal["text", "json"],
        about("text or json: how lines on stderr are written; json: each is an object"),
    ] = "text"
    log_texts: Annotated[
        bool,
        about(
            "whether a request's line has its prompt and its text, 2000 characters of each; they "
            "are your users' own words"
        ),
    ] = False
    max_connections: Annotated[
        int, Meta(ge=1, le=1 << 20), about("connections at once, 1 to 1048576")
    ] = 2048
    max_header_bytes: Annotated[Positive, about("bytes of a request's line and headers")] = 65536
    max_body_bytes: Annotated[Positive, about("bytes of a request's body")] = 4 << 20
    max_body_items: Annotated[Positive, about("objects and lists in a request's body")] = 16384
    max_incoming_bytes: Annotated[
        Positive, about("bytes of all incomplete bodies, beyond 64 KiB each; more get a 503")
    ] = 256 << 20
    header_seconds: Annotated[Seconds, about("time for a client to send its headers")] = 10.0
    body_seconds: Annotated[Seconds, about("time for a client to send its body")] = 30.0
    stall_seconds: Annotated[
        Seconds, about("a client that reads nothing of its answer for so long is disconnected")
    ] = 60.0
    template_seconds: Annotated[Seconds, about("time for the chat template to run")] = 2.0
    comment_seconds: Annotated[
        Seconds, about("time between comments in a silent stream, for proxies that close idle ones")
    ] = 10.0
    max_queued_requests: Annotated[
        Positive, about("requests that wait for their first token, at least 1; more get a 503")
    ] = 512
    max_queued_tokens: Annotated[
        Positive,
        about("prompt tokens of waiting requests; one alone may be as long as the context"),
    ] = 1 << 20
    max_prompts: Annotated[Positive, about("prompts in one completions request")] = 128
    max_stop_strings: Annotated[
        Natural | None,
        about("stop strings of a request, 0 or more; unset: any number, within 16 KiB in all"),
    ] = None
    min_priority: Annotated[
        int,
        Meta(ge=-(2**31), le=0),
        about("the smallest priority, and so the most urgent, that clients may ask for; 0 or less"),
    ] = 0
    min_tpot_ms: Annotated[
        Milliseconds | None,
        about(
            "the smallest slo.tpot_ms that clients may ask for; unset: scheduler.tpot_ms, and "
            "none at all where that is unset, too"
        ),
    ] = None
    max_requests_per_key: Annotated[
        Positive | None,
        about("requests of an API key at once, whatever their choices; unset: no limit"),
    ] = None
    max_tokens_per_minute_per_key: Annotated[
        Positive | None,
        about(
            "tokens of prompts and answers of an API key in a minute, of which a minute's may be "
            "saved up; unset: no limit"
        ),
    ] = None
    stream_flush: Annotated[
        Literal["event", "token", "interval"],
        about(
            "when streams send: event, an event for each step; token, one for each token; "
            "interval, padded ones at a fixed interval, which hide how many guesses are accepted"
        ),
    ] = "event"
    stream_interval_ms: Annotated[
        float,
        Meta(ge=1, le=10_000),
        about("time between events where server.stream_flush = interval, 1 to 10000"),
    ] = STREAM_INTERVAL
    timeout_ms: Annotated[
        Milliseconds | None,
        about(
            "a request that has not been answered so long after its arrival ends with an error; "
            "clients may ask for less; unset: no deadline but their own"
        ),
    ] = None
    drain_seconds: Annotated[
        Annotated[float, Meta(ge=0)], about("time for running answers to end after SIGTERM")
    ] = 30.0

    def __post_init__(self) -> None:
        if self.served_model_name is not None and not self.served_model_name.isprintable():
            raise ValueError(
                f"server.served_model_name = {self.served_model_name!r} has characters that cannot "
                "be shown: take others"
            )
        for key, other in TLS_FILES, TLS_FILES[::-1]:
            if getattr(self, key) is not None and getattr(self, other) is None:
                raise ValueError(
                    f"server.{key} = {getattr(self, key)!r} needs server.{other}: set both, or none"
                )
        if self.stream_interval_ms != STREAM_INTERVAL and self.stream_flush != "interval":
            raise ValueError(
                f"server.stream_interval_ms = {self.stream_interval_ms:g} is of no use where "
                f"server.stream_flush = {self.stream_flush!r}: set that to interval, or leave the "
                "first out"
            )
        for key in ("max_requests_per_key", "max_tokens_per_minute_per_key"):
            if getattr(self, key) is not None and self.api_key_file is None:
                raise ValueError(
                    f"server.{key} = {getattr(self, key)} needs server.api_key_file "
                    "(--api-key-file): without keys all clients are the same"
                )
        if self.log_texts and not self.access_log:
            raise ValueError(
                "server.log_texts = true is of no use where server.access_log = false: drop one of "
                "them"
            )


class Config(Section, frozen=True):
    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    drafter: DrafterConfig = DrafterConfig()
    lora: LoraConfig = LoraConfig()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        if self.drafter.name == "model" and self.draft is None:
            raise ValueError(
                "drafter.name = 'model' needs a draft model: set drafter.model (--draft-model), "
                "or take drafter.name = 'ngram', which needs none"
            )
        if self.drafter.quantize is not None and self.draft is None:
            raise ValueError(
                f"drafter.quantize = {self.drafter.quantize!r} needs a draft model: set "
                "drafter.model (--draft-model), or leave it out"
            )
        if self.drafter.name not in ("auto", "eagle") and self.drafter.head is not None:
            raise ValueError(
                f"drafter.name = {self.drafter.name!r} has no use for drafter.head = "
                f"{self.drafter.head!r}: drop one of them"
            )
        if self.drafter.name in ("none", "ngram") and self.drafter.quantize is not None:
            raise ValueError(
                f"drafter.name = {self.drafter.name!r} has no use for drafter.quantize = "
                f"{self.drafter.quantize!r}: drop one of them"
            )
        drafter = self.drafter
        others = "model.path", "drafter.model", "drafter.head"
        for key, named in zip(others, (self.model.path, drafter.model, drafter.head), strict=True):
            if self.model.demo_compute is not None and named is not None:
                raise ValueError(
                    f"model.demo_compute = {self.model.demo_compute!r} works only with the demo "
                    f"models, and {key} = {named!r} names another model. Remove one of them"
                )
        is_rounded = self.model.quantize is not None or self.drafter.quantize is not None
        for key in ("quantize_head", "quantize_embedding"):
            asked = getattr(self.model, key)
            if asked != getattr(ModelConfig(), key) and not is_rounded:
                raise ValueError(
                    f"model.{key} = {asked!r} is of no use where no weights are rounded: set "
                    "model.quantize or drafter.quantize, too, or take it back "
                    f"(--set model.{key}=)"
                )
        if self.drafter.name == "none" and self.drafter.model is not None:
            raise ValueError(
                f"drafter.name = 'none' has no use for drafter.model = {self.drafter.model!r}: "
                "leave out the model (--set drafter.model= takes back a file's), or the name"
            )
        if self.drafter_name == "ngram" and self.drafter.model is not None:
            raise ValueError(
                f"drafter.name = 'ngram' has no use for drafter.model = {self.drafter.model!r}: "
                "drop the name to let both guess, or the model to let n-grams guess"
            )

    @property
    def min_tpot_ms(self) -> float | None:
        """The smallest target for a token after the first that clients may ask for, if any."""
        asked = self.server.min_tpot_ms
        return self.scheduler.tpot_ms if asked is None else asked

    @property
    def target(self) -> str:
        """The model that is served: a folder, a GGUF file or a hub id."""
        return self.model.path or str(self.demo(DEMO_TARGET))

    def demo(self, model: Path) -> Path:
        """A model of the demo pair, at the cost that is asked for."""
        cost = self.model.demo_compute
        return model if cost is None else DEMO_COST / f"{model.name}-{cost}.json"

    @property
    def draft(self) -> str | None:
        """The draft model, if there is any; drafter.model may name a head instead."""
        return str(self.demo(DEMO_DRAFT)) if self.names_nothing else self.drafter.model

    @property
    def head(self) -> str | None:
        """The head of the target that is named as such; the demo's where `eagle` is asked for."""
        sources = self.drafter.options.get("sources", ())
        is_asked = self.drafter.name == EAGLE or EAGLE in sources
        return str(self.demo(DEMO_HEAD)) if self.names_nothing and is_asked else self.drafter.head

    @property
    def names_nothing(self) -> bool:
        """Whether all models are the demo's."""
        return not (self.model.path or self.drafter.model or self.drafter.head)

    @property
    def drafter_name(self) -> str:
        """The drafter that all knobs together select; "none" where there is no speculation."""
        return "none" if 0 in self.max_draft_tokens else self.drafter.name

    @property
    def max_nodes(self) -> int:
        """Guesses that a request may have in a step; 0 where there is no speculation."""
        return 0 if self.drafter_name == "none" else self.max_draft_tokens[0]

    @property
    def max_step_nodes(self) -> int:
        """Guesses that all requests together may have in a step."""
        return 0 if self.drafter_name == "none" else self.max_draft_tokens[1]

    @property
    def max_draft_tokens(self) -> tuple[int, int]:
        """What [speculation] allows a request and a step."""
        usual = (MAX_NODES, 256) if self.drafter.name == "auto" else (16, 32)
        request, step = self.speculation.max_nodes, self.speculation.max_step_nodes
        return usual[0] if request is None else request, usual[1] if step is None else step


SECTIONS: dict[str, type[Section]] = get_type_hints(Config)
KNOBS: dict[str, Any] = {
    f"{section}.{key}": annotated
    for section, cls in SECTIONS.items()
    for key, annotated in get_type_hints(cls, include_extras=True).items()
}


class Setting(NamedTuple):
    origin: str  # the file, the flag or the argument
    key: str
    value: Any


def load_config(
    path: Path | Sequence[Path] | None = None,
    overrides: Mapping[str, Any] | None = None,
    arguments: Iterable[Setting] = (),
) -> Config:
    """The files' settings, overridden by --set's, overridden by arguments of other names.

    Of several files a later one wins, and its mappings add to those before. `overrides` are --set's
    ("section.key" -> value). Each setting is checked as it comes.
    """
    paths = [path] if isinstance(path, Path) else path or ()
    settings = merged(setting for each in paths for setting in read_file(each))
    settings += [Setting("--set", key, value) for key, value in (overrides or {}).items()]
    settings += arguments
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in settings:
        put(values, setting)
    try:
        sections: dict[str, Any] = {name: cls(**values[name]) for name, cls in SECTIONS.items()}
        return Config(**sections)
    except ValueError as e:  # its message names settings
        last = {s.key: s.origin for s in settings if s.key in str(e)}
        raise ConfigError(f"{', '.join(dict.fromkeys(last.values()))}: {e}") from e


def merged(settings: Iterable[Setting]) -> list[Setting]:
    """One setting per key: the last, and a mapping with the entries of those before."""
    found = dict[str, Setting]()
    for setting in settings:
        before, value = found.get(setting.key), setting.value
        if before is not None and isinstance(before.value, dict) and isinstance(value, dict):
            setting = setting._replace(value=before.value | value)
        found[setting.key] = setting
    return list(found.values())


def read_file(path: Path) -> Iterator[Setting]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}): check the path") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from e
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            names = " ".join(f"[{s}]" for s in SECTIONS)
            raise ConfigError(f"{path}: {section!r} is not a section; the sections are {names}")
        yield from (Setting(str(path), f"{section}.{key}", v) for key, v in table.items())


ARGUMENTS = {  # of the Python API
    "model": "model.path",
    "dtype": "model.dtype",
    "quantize": "model.quantize",
    "chat_template": "model.chat_template",
    "draft_model": "drafter.model",
    "draft_head": "drafter.head",
    "draft_quantize": "drafter.quantize",
    "drafter": "drafter.name",
    # vLLM's own names
    "block_size": "memory.block_size",
    "device": "model.device",
    "enable_prefix_caching": "memory.prefix_cache",
    "gpu_memory_utilization": "memory.kv_fraction",  # of what is free, not of all there is
    "kv_cache_dtype": "memory.kv_dtype",
    "kv_cache_memory_bytes": "memory.kv_bytes",
    "max_model_len": "scheduler.max_model_len",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_num_seqs": "scheduler.max_running",
    "lora_modules": "lora.modules",
    "model_impl": "model.implementation",
    "max_lora_rank": "lora.max_rank",
    "max_loras": "lora.max_loras",
}
DTYPES = {"auto": None, "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}  # others' names


def python_config(
    owner: str,
    arguments: Mapping[str, Any],
    files: str | Path | Sequence[str | Path] | None,
    given: Any,
) -> Config:
    """The config of a class of the Python API: its arguments win over its mapping `set`, which wins
    over the files.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"set = {given!r} is no mapping: give {{'section.key': value}}")
    settings = [Setting(f"{owner}(set)", key, value) for key, value in (given or {}).items()]
    for name, value in arguments.items():
        plain = str(value) if isinstance(value, Path) else value
        if name == "lora_modules" and isinstance(value, Mapping):
            plain = {key: str(path) for key, path in value.items()}
        plain = DTYPES.get(plain, plain) if name == "dtype" else plain
        if plain is not None:
            settings.append(Setting(f"{owner}({name})", ARGUMENTS[name], plain))
    each = [files] if isinstance(files, str | Path) else files or ()
    return load_config([*map(Path, each)], None, settings)


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """What --set's say. Mappings of one key are merged; two lists are refused, as either the first
    or their sum could be meant.
    """
    found = dict[str, Any]()
    for text in texts:
        key, value = parse_override(text)
        before = found.get(key)
        if isinstance(before, list) and isinstance(value, list) and before != value:
            raise ConfigError(f"--set {key}: there are two lists, {before} and {value}; give one")
        if isinstance(value, dict):
            options = {n: found.pop(n) for n in [*found] if n.startswith(f"{key}.")}
            kept = {n: v for n, v in options.items() if n.removeprefix(f"{key}.") not in value}
            found |= {key: (before if isinstance(before, dict) else {}) | value, **kept}
        else:
            found[key] = value
    return found


def parse_override(text: str) -> tuple[str, Any]:
    """`section.key=value`: the value as TOML, or as a plain string where it is none; no value at
    all is None.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write --set section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {} if value.strip() else {"value": None}
    # A value with a line break could add a second key: then it is taken as a string.
    return key.strip(), parsed["value"] if parsed.keys() == {"value"} else value


def put(values: dict[str, dict[str, Any]], setting: Setting) -> None:
    """Check one setting by itself and enter it; None takes an earlier one back.
    `drafter.options.x` sets one option of several.
    """
    options, _, option = setting.key.partition("drafter.options.")
    if option and not options:
        merged = {**values["drafter"].get("options", {}), option: setting.value}
        kept = {name: value for name, value in merged.items() if value is not None}
        setting = Setting(setting.origin, "drafter.options", kept)
    if setting.key not in KNOBS:
        near = difflib.get_close_matches(setting.key, KNOBS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "`specserve config show` prints every key"
        raise ConfigError(f"{setting.origin}: unknown key {setting.key!r}; {remedy}")
    section, _, key = setting.key.partition(".")
    if setting.value is None:
        values[section].pop(key, None)
        return
    try:
        value = msgspec.convert(setting.value, KNOBS[setting.key])
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"{setting.origin}: {setting.key} = {setting.value!r} is refused: "
            f"{choice(setting.key) or e} ({description(setting.key)})"
        ) from e
    values[section][key] = value


def choice(key: str) -> str:
    """The values of a knob that has a few, and how to have none; empty for other knobs."""
    values = ", ".join(named_values(KNOBS[key]))
    is_optional = NoneType in get_args(get_args(KNOBS[key])[0])
    unset = f"; --set {key}= leaves it unset" if is_optional else ""
    return values and f"it is none of {values}{unset}"


def named_values(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for part in get_args(kind) for value in named_values(part))


def description(key: str) -> str:
    """The text that `about` gives, wherever it is among the key's annotations."""
    words = [m.description for m in KNOBS[key].__metadata__ if m.description]
    return words[-1] if words else ""


def to_toml(config: Config) -> str:
    """The resolved config as a file that `load_config` reads back, every key with its meaning."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += ["", f"[{section}]  # {cls.__doc__}"]
        for key in cls.__struct_fields__:
            value = getattr(getattr(config, section), key)
            # TOML has no null: an unset key is shown as a comment.
            text = f"# {key} =" if value is None else f"{key} = {toml_value(value)}"
            lines.append(f"{text}  # {description(f'{section}.{key}')}")
    return "\n".join(lines[1:]) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {', '.join(items)} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        # A JSON string is a TOML string, except that TOML wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)
