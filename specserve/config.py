"""All settings with their types, ranges and defaults, and the code that loads them.

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

from specserve.errors import ConfigError, in_json_words
from specserve_drafters.base import EAGLE
from specserve_drafters.candidates import MAX_NODES

# Small models in the package, used if no model is named.
DEMO = Path(__file__).parent / "demo" / "weights"
DEMO_TARGET, DEMO_DRAFT = DEMO / "specserve-demo", DEMO / "specserve-demo-draft"
DEMO_HEAD = DEMO / "specserve-demo-head"  # EAGLE-3 head for DEMO_TARGET
STREAM_INTERVAL = 50.0  # milliseconds
USUAL_LORAS = 4  # default number of adapters that may run concurrently
TLS_FILES = "tls_certificate_file", "tls_key_file"
DEMO_COST = DEMO.parent / "at_cost"  # files that describe scaled demo models
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
NumRanks = Annotated[int, Meta(ge=1, le=64)]
Seconds = Annotated[float, Meta(gt=0.0)]
Milliseconds = Annotated[float, Meta(ge=1e-3)]
Name = Annotated[str, Meta(min_length=1)]


def about(text: str) -> Meta:
    """The description of a setting, shown by `specserve config show` and in errors."""
    return Meta(description=text)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings. Unknown keys are errors."""


class ModelConfig(Section, frozen=True):
    """The target model, which decides every output token."""

    path: Annotated[
        Name | None,
        about(
            "a local folder, a .gguf file, a hub id, ID:TYPE for a GGUF file of a hub repository, "
            "or ollama:NAME:TAG; unset: the demo models"
        ),
    ] = None
    demo_compute: Annotated[
        Literal["qwen3-0.6b", "llama-3.1-8b"] | None,
        about(
            "qwen3-0.6b or llama-3.1-8b: pads the demo models to the compute of that model, with "
            "the same text; unset: no padding"
        ),
    ] = None
    chat_template: Annotated[
        Name | None,
        about("file with the chat template in Jinja; unset: the model's own template"),
    ] = None
    implementation: Annotated[
        Literal["auto", "native", "transformers"],
        about(
            "auto, native or transformers: the code that runs the target model; auto is native if "
            "it supports the architecture, else transformers"
        ),
    ] = "auto"
    task: Annotated[
        Literal["auto", "embed", "rank"],
        about(
            "auto, embed or rank: what the model does besides generating text. auto reads "
            "1_Pooling/config.json and modules.json; embed returns the last token's hidden state; "
            "rank compares the tokens yes and no, as Qwen3-Reranker does"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bf16", "fp32"],
        about("dtype of weights and activations: auto (the checkpoint's), bf16 or fp32"),
    ] = "auto"
    quantize: Annotated[
        Literal["w8a8", "w8", "w4"] | None,
        about(
            "quantizes weights at loading: w8 and w8a8 to 8 bits, w4 to 4 bits; w8a8 quantizes "
            "activations to 8 bits, too; unset: no quantization"
        ),
    ] = None
    quantize_head: Annotated[
        Literal["none", "w8", "w4"],
        about("quantization of the LM head if the layers are quantized: none, w8 or w4"),
    ] = "w8"
    quantize_embedding: Annotated[
        Literal["none", "w8"],
        about("quantization of the embedding if the layers are quantized: none or w8"),
    ] = "none"
    activations: Annotated[
        Literal["auto", "int8", "float"],
        about(
            "auto, int8 or float: the input of linear layers with quantized weights, on CPUs. int8 "
            "rounds each row and group to 8 bits; float keeps model.dtype; auto is int8 for GGUF "
            "files, else as the checkpoint asks. The draft model follows auto and float"
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]?))?)$"),
        about("auto, cpu, cuda, or cuda:1 for the second GPU; auto is a GPU if there is one"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "flashinfer", "triton"],
        about(
            "attention kernels on a GPU: auto, flashinfer or triton; auto uses FlashInfer for "
            "prompts if it is installed"
        ),
    ] = "auto"
    threads: Annotated[
        Positive | None, about("CPU threads, at least 1; unset: chosen by a timing at start-up")
    ] = None


class MemoryConfig(Section, frozen=True):
    """The KV cache: one paged pool for the target model and the draft model."""

    block_size: Annotated[
        Positive | None,
        about(
            "target model tokens per block, at least 1; unset: 64 on CPUs, 16 on GPUs and for "
            "models with recurrent layers"
        ),
    ] = None
    kv_bytes: Annotated[
        Positive | None, about("size of the pool in bytes; unset: kv_fraction sets it")
    ] = None
    kv_fraction: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        about("the pool's share of the memory that the weights leave free, above 0, at most 1"),
    ] = 0.5
    state_interval: Annotated[
        int,
        Meta(ge=0),
        about(
            "for models with recurrent layers: tokens between two copies of a prompt's state in "
            "the prefix cache; 0: only the copies near the ends of prompts and responses"
        ),
    ] = 1024
    draft_block_size: Annotated[
        Positive | None, about("draft model tokens per block, at least 1; unset: as many as fit")
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        about(
            "dtype of the KV cache: auto (the model's), int8 or fp8. Both 8-bit dtypes have one "
            "scale per token and head, and fit about twice as many tokens as bf16"
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool, about("whether requests with a common prefix reuse its KV (prefix caching)")
    ] = True
    share_prefix_cache: Annotated[
        bool,
        about(
            "whether all API keys share one prefix cache; if true, cached_tokens and TTFT reveal "
            "to a key which prefixes other keys have sent"
        ),
    ] = False
    host_bytes: Annotated[
        Natural,
        about(
            "host memory in bytes for KV blocks that leave the pool; requests load them back if "
            "this is faster than computing them; 0: none"
        ),
    ] = 0
    disk_path: Annotated[
        Name | None,
        about(
            "folder for KV blocks that leave the pool, also for the next start; needs host_bytes. "
            "One server at a time uses it. Unset: none"
        ),
    ] = None
    disk_bytes: Annotated[
        Positive | None, about("size of the blocks in disk_path, in bytes; needs disk_path")
    ] = None

    def __post_init__(self) -> None:
        if self.host_bytes and not self.prefix_cache:
            raise ValueError(
                "memory.host_bytes has no effect if memory.prefix_cache = false. Remove one of them"
            )
        if self.disk_path and not self.host_bytes:
            raise ValueError(
                "memory.disk_path needs memory.host_bytes, because blocks pass through host "
                "memory. Set memory.host_bytes, for example to a tenth of memory.disk_bytes"
            )
        if (self.disk_path is None) != (self.disk_bytes is None):
            set_name, other = "disk_path", "disk_bytes"
            if self.disk_path is None:
                set_name, other = other, set_name
            raise ValueError(f"memory.{set_name} needs memory.{other}. Set both or none")


class SchedulerConfig(Section, frozen=True):
    """Limits on running requests and rows per step, and latency targets."""

    max_running: Annotated[Positive, about("maximum concurrent running requests")] = 64
    max_batched_tokens: Annotated[
        Positive,
        about("maximum rows per step, more than max_running; prompts use all if no stream runs"),
    ] = 512
    prefill_chunk: Annotated[
        Positive, about("maximum prompt rows per step while streams run, at least 1")
    ] = 128
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,  # a token of the prompt and one of the output
        about("maximum prompt plus output tokens per request, at least 2; unset: the model's"),
    ] = None
    ttft_ms: Annotated[
        Milliseconds | None,
        about("TTFT target in milliseconds of requests that set none; unset: no target"),
    ] = None
    tpot_ms: Annotated[
        Milliseconds | None,
        about("TPOT target in milliseconds of requests that set none; unset: no target"),
    ] = None

    def __post_init__(self) -> None:
        if self.max_batched_tokens <= self.max_running:
            raise ValueError(
                f"scheduler.max_batched_tokens = {self.max_batched_tokens} must exceed "
                f"scheduler.max_running = {self.max_running}, because every running request has a "
                "row in every step. Raise the first or lower the second"
            )


class SpeculationConfig(Section, frozen=True):
    """Limits on draft tokens."""

    max_nodes: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_NODES)] | None,
        about(
            f"maximum draft tokens per request and step, 0 to {MAX_NODES}; 0 turns speculation "
            f"off; unset: {MAX_NODES} for drafter.name = auto, else 16"
        ),
    ] = None
    max_step_nodes: Annotated[
        Natural | None,
        about(
            "maximum draft tokens per step, over all requests; 0 turns speculation off; unset: 256 "
            "for drafter.name = auto, else 32"
        ),
    ] = None


class DrafterConfig(Section, frozen=True):
    """The drafter, which proposes draft tokens."""

    name: Annotated[
        Name,
        about(
            'auto, none, ngram, model, eagle or a "package.module:Class". `auto` combines n-grams '
            "with a draft model and a draft head, if there are any. It verifies only the draft "
            "tokens that it expects to save time. All proposals of the other drafters are "
            "verified, within the limits of [speculation]"
        ),
    ] = "auto"
    model: Annotated[
        Name | None,
        about(
            "draft model, named as in model.path, or an EAGLE-3 head; unset: none, or the demo's"
        ),
    ] = None
    head: Annotated[
        Name | None,
        about(
            "EAGLE-3 head for the target model, a local folder or a hub id. Unset: drafter.model "
            "if it is a head, else the target model's MTP layers, or the demo head for eagle"
        ),
    ] = None
    quantize: Annotated[
        Literal["w8a8", "w8", "w4"] | None, about("the same as model.quantize, for the draft model")
    ] = None
    options: Annotated[
        dict[str, Any],
        about(
            "options of the drafter; auto has sources, source_options (by drafter name), "
            "max_depth, width and tau"
        ),
    ] = {}

    def __post_init__(self) -> None:
        if "." in self.name and ":" not in self.name:
            raise ValueError(
                f"drafter.name = {self.name!r} is not a built-in drafter (auto, none, ngram, "
                "model, eagle). Name a class as 'package.module:Class'"
            )


class ParallelConfig(Section, frozen=True):
    """Ranks: processes that run the target model together, with the same text as one process."""

    tensor: Annotated[
        NumRanks, about("ranks that share the columns of each layer's linear maps, from 1 to 64")
    ] = 1
    pipeline: Annotated[
        NumRanks,
        about("stages, each with a range of layers, from 1 to 64; each has `tensor` ranks"),
    ] = 1
    expert: Annotated[
        bool,
        about(
            "each of the `tensor` ranks holds whole experts of a mixture, instead of columns of "
            "all experts"
        ),
    ] = False
    address: Annotated[
        Name | None,
        about(
            "HOST:PORT where rank 0 waits for ranks of other machines, which `specserve rank` "
            "starts; unset: rank 0 starts all ranks on its machine"
        ),
    ] = None
    secret_file: Annotated[
        Name | None, about("file with the secret that ranks of several machines share")
    ] = None

    def __post_init__(self) -> None:
        if self.tensor == 1 and self.expert:
            raise ValueError(
                "parallel.expert has no effect with parallel.tensor = 1. Raise parallel.tensor, or "
                "remove parallel.expert"
            )
        if self.size == 1 and self.address is not None:
            raise ValueError(
                "parallel.address has no effect with one rank. Raise parallel.tensor or "
                "parallel.pipeline, or remove it"
            )
        if self.address is None and self.secret_file is not None:
            raise ValueError("parallel.secret_file has no effect without parallel.address")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor * self.pipeline


class LoraConfig(Section, frozen=True):
    """LoRA adapters for the target model, which requests select by name."""

    max_loras: Annotated[
        Natural | None,
        about(
            "maximum adapters in use concurrently, 0 or more; 0: no adapters. Unset: the number of "
            "modules, at least 4, and 0 if modules, folder and allow_hub are unset"
        ),
    ] = None
    max_rank: Annotated[
        Annotated[int, Meta(ge=1, le=512)],
        about("maximum rank of an adapter, 1 to 512; every slot takes memory for this rank"),
    ] = 16
    modules: Annotated[
        dict[Name, Name],
        about("adapters that are loaded at start-up: name -> folder or hub id"),
    ] = {}
    folder: Annotated[
        Name | None,
        about(
            "folder with the adapters that clients with an admin key may load at run time; "
            "unset: none"
        ),
    ] = None
    allow_hub: Annotated[bool, about("whether these clients may load hub ids, too")] = False

    def __post_init__(self) -> None:
        names = "modules", "folder", "allow_hub"
        given = [name for name in names if getattr(self, name)]
        if self.max_loras == 0 and given:
            raise ValueError(
                f"lora.{given[0]} has no effect if lora.max_loras = 0. Raise lora.max_loras, or "
                f"remove lora.{given[0]}"
            )

    @property
    def num_slots(self) -> int:
        """The number of adapter slots of the target model."""
        if self.max_loras is not None:
            return self.max_loras
        is_asked = bool(self.modules or self.folder or self.allow_hub)
        return max(len(self.modules), USUAL_LORAS) if is_asked else 0


ToolParser = Literal[
    "auto",
    "template",
    "generic",
    "none",
    "command_r",
    "deepseek",
    "deepseek_v32",
    "gemma3",
    "gemma4",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "kimi",
    "lfm2",
    "llama3_json",
    "llama4",
    "minimax",
    "mistral",
    "pythonic",
    "qwen3_coder",
]


class ServerConfig(Section, frozen=True):
    """The HTTP server and its limits."""

    host: Annotated[Name, about("address to listen on; 0.0.0.0 is all addresses")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), about("0 to 65535; 0 takes any free port")] = 8000
    served_model_name: Annotated[
        Name | None,
        about("model name for clients; unset: the name of its folder or file, or its hub id"),
    ] = None
    model_aliases: Annotated[
        list[Name], about("further names of the model, for clients that cannot be configured")
    ] = []
    any_model_name: Annotated[
        bool, about("whether every unknown model name means the served model")
    ] = False
    tool_parser: Annotated[
        ToolParser,
        about(
            "format of the model's tool calls: auto (by the tokenizer's response template, else "
            "by the chat template, else generic), template (the response template only), generic "
            "(the server describes tools and calls to the model), none, or the name of a format: "
            "command_r, deepseek, deepseek_v32, gemma3, gemma4, glm, granite, harmony (gpt-oss), "
            "hermes, kimi, lfm2, llama3_json, llama4, minimax, mistral, pythonic, qwen3_coder"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "mistral_think", "none"],
        about(
            "format of the model's reasoning: auto, think (<think>...</think>), mistral_think "
            "([THINK]...[/THINK]) or none"
        ),
    ] = "auto"
    api_key_file: Annotated[
        Name | None,
        about("file with the accepted API keys, one per line; unset: no key is required"),
    ] = None
    admin_key_file: Annotated[
        Name | None,
        about(
            "file with admin keys, one per line: the key, a space, and its scopes separated by "
            "commas (speculation, cache, adapters, sleep). A key without scopes has all. Unset: no "
            "admin calls"
        ),
    ] = None
    open_dashboard: Annotated[
        bool,
        about(
            "whether clients without an API key may read /metrics, /metrics/history, /v1/models "
            "and /v1/speculation, which the page /dashboard shows"
        ),
    ] = False
    allow_no_keys: Annotated[
        bool,
        about(
            "whether a server without API keys may listen on an address that other machines reach: "
            "any host except localhost, 127.0.0.0/8 and ::1"
        ),
    ] = False
    tls_certificate_file: Annotated[
        Name | None,
        about("the server's certificate chain in PEM; unset: HTTP without TLS"),
    ] = None
    tls_key_file: Annotated[
        Name | None, about("the certificate's private key in PEM, not encrypted")
    ] = None
    cors_origins: Annotated[
        tuple[Name, ...],
        about('origins of web pages that may call, e.g. ["https://chat.example"]; ["*"]: all'),
    ] = ()
    hang_seconds: Annotated[
        float,
        Meta(gt=0),
        about(
            "seconds without a completed step after which the engine process is restarted; must "
            "exceed the longest step"
        ),
    ] = 120.0
    access_log: Annotated[
        bool, about("whether each completed request is logged on stderr, one line per request")
    ] = True
    log_format: Annotated[
        Literal["text", "json"],
        about("format of log lines on stderr: text, or json with one object per line"),
    ] = "text"
    log_texts: Annotated[
        bool,
        about(
            "whether the log line of a request contains prompt and output, up to 2000 characters "
            "each; these are texts of your users"
        ),
    ] = False
    max_connections: Annotated[
        int, Meta(ge=1, le=1 << 20), about("maximum concurrent connections, 1 to 1048576")
    ] = 2048
    max_header_bytes: Annotated[
        Positive, about("maximum bytes of a request's first line and headers")
    ] = 65536
    max_body_bytes: Annotated[Positive, about("maximum bytes of a request's body")] = 4 << 20
    max_body_items: Annotated[Positive, about("maximum objects and lists in a request's body")] = (
        16384
    )
    max_incoming_bytes: Annotated[
        Positive,
        about("maximum bytes of all incomplete bodies, beyond 64 KiB each; more return 503"),
    ] = 256 << 20
    header_seconds: Annotated[Seconds, about("time limit for a client's headers")] = 10.0
    body_seconds: Annotated[Seconds, about("time limit for a client's body")] = 30.0
    stall_seconds: Annotated[
        Seconds, about("seconds after which a client that does not read is disconnected")
    ] = 60.0
    template_seconds: Annotated[Seconds, about("time limit for the chat template")] = 2.0
    comment_seconds: Annotated[
        Seconds, about("time between comments in a silent stream, which keep connections open")
    ] = 10.0
    max_queued_requests: Annotated[
        Positive, about("maximum requests without a first token, at least 1; more return 503")
    ] = 512
    max_queued_tokens: Annotated[
        Positive,
        about("maximum prompt tokens of waiting requests, or the context length if that is larger"),
    ] = 1 << 20
    max_prompts: Annotated[Positive, about("maximum prompts per completions request")] = 128
    max_stop_strings: Annotated[
        Natural | None,
        about("maximum stop strings per request, 0 or more; unset: any number, up to 16 KiB"),
    ] = None
    min_priority: Annotated[
        int,
        Meta(ge=-(2**31), le=0),
        about("the smallest (most urgent) priority that clients may set, 0 or less"),
    ] = 0
    min_tpot_ms: Annotated[
        Milliseconds | None,
        about(
            "the smallest slo.tpot_ms that clients may set; unset: scheduler.tpot_ms; if both are "
            "unset, clients may not set slo.tpot_ms"
        ),
    ] = None
    max_requests_per_key: Annotated[
        Positive | None,
        about("maximum concurrent requests per API key, each counted once for any n; unset: none"),
    ] = None
    max_tokens_per_minute_per_key: Annotated[
        Positive | None,
        about(
            "maximum prompt and output tokens per API key and minute; bursts up to one minute's "
            "tokens are allowed; unset: no limit"
        ),
    ] = None
    stream_flush: Annotated[
        Literal["event", "token", "interval"],
        about(
            "when streams send events: event (one per step), token (one per token) or interval. "
            "Padded events at a fixed interval hide how many draft tokens are accepted"
        ),
    ] = "event"
    stream_interval_ms: Annotated[
        float,
        Meta(ge=1, le=10_000),
        about("milliseconds between events if server.stream_flush = interval, 1 to 10000"),
    ] = STREAM_INTERVAL
    timeout_ms: Annotated[
        Milliseconds | None,
        about(
            "milliseconds after arrival at which an unfinished request ends with an error; clients "
            "may set less; unset: only the client's own deadline"
        ),
    ] = None
    drain_seconds: Annotated[
        Annotated[float, Meta(ge=0)], about("time for running requests to complete after SIGTERM")
    ] = 30.0

    def __post_init__(self) -> None:
        if self.served_model_name is not None and not self.served_model_name.isprintable():
            raise ValueError(
                f"server.served_model_name = {self.served_model_name!r} has unprintable "
                "characters. Use only printable characters"
            )
        for key, other in TLS_FILES, TLS_FILES[::-1]:
            if getattr(self, key) is not None and getattr(self, other) is None:
                raise ValueError(
                    f"server.{key} = {getattr(self, key)!r} needs server.{other}. Set both, or none"
                )
        if self.stream_interval_ms != STREAM_INTERVAL and self.stream_flush != "interval":
            raise ValueError(
                f"server.stream_interval_ms = {self.stream_interval_ms:g} has no effect if "
                f"server.stream_flush = {self.stream_flush!r}. Set server.stream_flush = interval, "
                "or remove server.stream_interval_ms"
            )
        for key in ("max_requests_per_key", "max_tokens_per_minute_per_key"):
            if getattr(self, key) is not None and self.api_key_file is None:
                raise ValueError(
                    f"server.{key} = {getattr(self, key)} needs server.api_key_file. Set it "
                    "(--api-key-file): without keys, all clients count as one"
                )
        if self.open_dashboard and self.api_key_file is None:
            raise ValueError(
                "server.open_dashboard = true needs server.api_key_file. Without keys, all routes "
                "are open. Remove server.open_dashboard"
            )
        if self.log_texts and not self.access_log:
            raise ValueError(
                "server.log_texts = true has no effect if server.access_log = false. Remove one of "
                "them"
            )


class Config(Section, frozen=True):
    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    drafter: DrafterConfig = DrafterConfig()
    parallel: ParallelConfig = ParallelConfig()
    lora: LoraConfig = LoraConfig()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        if self.drafter.name == "model" and self.draft is None:
            raise ValueError(
                "drafter.name = 'model' needs a draft model. Set drafter.model (--draft-model), "
                "or use drafter.name = 'ngram', which needs none"
            )
        if self.drafter.quantize is not None and self.draft is None:
            raise ValueError(
                f"drafter.quantize = {self.drafter.quantize!r} needs a draft model. Set "
                "drafter.model (--draft-model), or remove drafter.quantize"
            )
        if self.drafter.name not in ("auto", "eagle") and self.drafter.head is not None:
            raise ValueError(
                f"drafter.name = {self.drafter.name!r} does not use drafter.head = "
                f"{self.drafter.head!r}. Remove one of them"
            )
        if self.drafter.name in ("none", "ngram") and self.drafter.quantize is not None:
            raise ValueError(
                f"drafter.name = {self.drafter.name!r} does not use drafter.quantize = "
                f"{self.drafter.quantize!r}. Remove one of them"
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
                    f"model.{key} = {asked!r} has no effect if no weights are quantized. Set "
                    "model.quantize or drafter.quantize, too, or unset it "
                    f"(--set model.{key}=)"
                )
        if self.model.quantize == "w8a8" and self.model.activations == "float":
            raise ValueError(
                "model.quantize = 'w8a8' quantizes activations, but model.activations is 'float'. "
                "Set model.quantize to w8, or remove model.activations"
            )
        if self.drafter.name == "none" and self.drafter.model is not None:
            raise ValueError(
                f"drafter.name = 'none' does not use drafter.model = {self.drafter.model!r}. "
                "Remove drafter.model (--set drafter.model= unsets it), or drafter.name"
            )
        if self.drafter_name == "ngram" and self.drafter.model is not None:
            raise ValueError(
                f"drafter.name = 'ngram' does not use drafter.model = {self.drafter.model!r}. "
                "Remove drafter.name to use both, or drafter.model to use only n-grams"
            )

    @property
    def min_tpot_ms(self) -> float | None:
        """The smallest TPOT target that clients may set, in milliseconds; None: no TPOT targets."""
        asked = self.server.min_tpot_ms
        return self.scheduler.tpot_ms if asked is None else asked

    @property
    def target(self) -> str:
        """The target model: a folder, a GGUF file or a hub id."""
        return self.model.path or str(self.demo(DEMO_TARGET))

    def demo(self, model: Path) -> Path:
        """A demo model, padded to the compute that `model.demo_compute` asks for."""
        cost = self.model.demo_compute
        return model if cost is None else DEMO_COST / f"{model.name}-{cost}.json"

    @property
    def draft(self) -> str | None:
        """The draft model, or None; drafter.model may name a head instead."""
        return str(self.demo(DEMO_DRAFT)) if self.names_nothing else self.drafter.model

    @property
    def head(self) -> str | None:
        """`drafter.head`, or the demo head if no model is named and `eagle` is selected."""
        sources = self.drafter.options.get("sources", ())
        is_asked = self.drafter.name == EAGLE or EAGLE in sources
        return str(self.demo(DEMO_HEAD)) if self.names_nothing and is_asked else self.drafter.head

    @property
    def names_nothing(self) -> bool:
        """Whether the config names no model, so that the demo models are used."""
        return not (self.model.path or self.drafter.model or self.drafter.head)

    @property
    def drafter_name(self) -> str:
        """The drafter that the settings select; "none" if speculation is off."""
        return "none" if 0 in self.max_draft_tokens else self.drafter.name

    @property
    def max_nodes(self) -> int:
        """Maximum draft tokens per request and step; 0 if speculation is off."""
        return 0 if self.drafter_name == "none" else self.max_draft_tokens[0]

    @property
    def max_step_nodes(self) -> int:
        """Maximum draft tokens per step over all requests; 0 if speculation is off."""
        return 0 if self.drafter_name == "none" else self.max_draft_tokens[1]

    @property
    def max_draft_tokens(self) -> tuple[int, int]:
        """The limits of [speculation]: draft tokens per request, and per step."""
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
    """Load settings from files; `overrides` win over the files, `arguments` win over both.

    A later file wins over earlier ones, and its mappings are merged into theirs. `overrides` are
    the values of --set ("section.key" -> value). Raises ConfigError for an invalid setting.
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
    """Keep the last setting of each key; mappings of one key are merged."""
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
        raise ConfigError(f"{path}: cannot be read ({e.strerror}). Check the path") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not TOML: {e}") from e
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            names = " ".join(f"[{s}]" for s in SECTIONS)
            raise ConfigError(f"{path}: unknown section {section!r}. The sections are {names}")
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
    # vLLM's names
    "block_size": "memory.block_size",
    "device": "model.device",
    "enable_expert_parallel": "parallel.expert",
    "enable_prefix_caching": "memory.prefix_cache",
    "gpu_memory_utilization": "memory.kv_fraction",  # share of free memory, not of all memory
    "kv_cache_dtype": "memory.kv_dtype",
    "kv_cache_memory_bytes": "memory.kv_bytes",
    "max_model_len": "scheduler.max_model_len",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "max_num_seqs": "scheduler.max_running",
    "lora_modules": "lora.modules",
    "model_impl": "model.implementation",
    "task": "model.task",
    "max_lora_rank": "lora.max_rank",
    "max_loras": "lora.max_loras",
    "pipeline_parallel_size": "parallel.pipeline",
    "tensor_parallel_size": "parallel.tensor",
}
DTYPES = {"auto": None, "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}  # vLLM's names


def python_config(
    owner: str,
    arguments: Mapping[str, Any],
    files: str | Path | Sequence[str | Path] | None,
    given: Any,
) -> Config:
    """The config of a class of the Python API. Arguments win over the mapping `given` (its argument
    `set`), which wins over files.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"set = {given!r} is not a mapping. Pass {{'section.key': value}}")
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
    """Parse all --set arguments. Mappings of one key are merged. Two different lists for one key
    are an error, because they could mean the second list or both lists.
    """
    found = dict[str, Any]()
    for text in texts:
        key, value = parse_override(text)
        before = found.get(key)
        if isinstance(before, list) and isinstance(value, list) and before != value:
            raise ConfigError(f"--set {key} has two lists, {before} and {value}. Pass only one")
        if isinstance(value, dict):
            options = {n: found.pop(n) for n in [*found] if n.startswith(f"{key}.")}
            kept = {n: v for n, v in options.items() if n.removeprefix(f"{key}.") not in value}
            found |= {key: (before if isinstance(before, dict) else {}) | value, **kept}
        else:
            found[key] = value
    return found


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `section.key=value`: the value as TOML, or as a string if it is not valid TOML. An
    empty value is None.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text} has no '='. Write --set section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {} if value.strip() else {"value": None}
    # A value with a line break could add a second key. It is read as a string.
    return key.strip(), parsed["value"] if parsed.keys() == {"value"} else value


def put(values: dict[str, dict[str, Any]], setting: Setting) -> None:
    """Check one setting and store it; the value None removes an earlier one. `drafter.options.x`
    sets one option.
    """
    options, _, option = setting.key.partition("drafter.options.")
    if option and not options:
        merged = {**values["drafter"].get("options", {}), option: setting.value}
        kept = {name: value for name, value in merged.items() if value is not None}
        setting = Setting(setting.origin, "drafter.options", kept)
    if setting.key not in KNOBS:
        near = difflib.get_close_matches(setting.key, KNOBS, n=1)
        remedy = f"Did you mean {near[0]}?" if near else "`specserve config show` prints every key"
        raise ConfigError(f"{setting.origin}: unknown key {setting.key!r}. {remedy}")
    section, _, key = setting.key.partition(".")
    if setting.value is None:
        values[section].pop(key, None)
        return
    try:
        value = msgspec.convert(setting.value, KNOBS[setting.key])
    except msgspec.ValidationError as e:
        text = setting.value
        is_table = isinstance(text, str) and text.startswith("{")
        example = '. Write a table like {sources = ["ngram"]}' if is_table else ""
        raise ConfigError(
            f"{setting.origin}: {setting.key} = {text!r} is invalid: "
            f"{choice(setting.key) or in_json_words(str(e))}{example} ({description(setting.key)})"
        ) from e
    values[section][key] = value


def choice(key: str) -> str:
    """The allowed values of an enumerated setting, and how to unset it; "" for other settings."""
    values = ", ".join(named_values(KNOBS[key]))
    is_optional = NoneType in get_args(get_args(KNOBS[key])[0])
    unset = f"; --set {key}= leaves it unset" if is_optional else ""
    return values and f"it must be one of {values}{unset}"


def named_values(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for part in get_args(kind) for value in named_values(part))


def description(key: str) -> str:
    """The description that `about` attached to a setting; "" if there is none."""
    words = [m.description for m in KNOBS[key].__metadata__ if m.description]
    return words[-1] if words else ""


def to_toml(config: Config) -> str:
    """The resolved config as TOML that `load_config` can read, with a description of every key."""
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
        # A JSON string is a TOML string, but TOML requires an escaped DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value, default=str)
