"""The command `specserve`. Imports the engine only for subcommands that need it."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Generator, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from specserve.config import (
    TLS_FILES,
    USUAL_LORAS,
    Config,
    Setting,
    load_config,
    parse_overrides,
    to_toml,
)
from specserve.errors import ConfigError, RequestError, SpecserveError
from specserve.models.folder import is_full
from specserve.process import ensure_streams, keep_stderr_from_failing, raising_signals
from specserve.version import VERSION

if TYPE_CHECKING:
    from specserve.api.outputs import Output
    from specserve.models.folder import Scaled

INTERRUPTED = 130  # exit status after Ctrl-C, as in shells
BROKEN_PIPE = 141  # exit status if the output pipe was closed, as in shells
COMPLETING = "_ARGCOMPLETE"  # environment variable that a shell sets to get completions
DETAILS = "return_speculation_details"


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        ensure_streams()
        keep_stderr_from_failing()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack some characters
        return run(argv)
    except SpecserveError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout again at exit; /dev/null receives it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as e:  # safetensors raises its own error class for a full disk
        if not is_full(e):
            raise
        place = getattr(e, "filename", None) or "the output"
        print(f"error: {place}: the disk is full. Free some space", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(argv: list[str]) -> int:
    others = {e.name: e for e in entry_points(group="specserve.commands")}
    if COMPLETING in os.environ:
        from specserve.cli.completion import complete

        complete(parser(others), others)
    if argv and argv[0] in others:
        command: Callable[[list[str]], int] = others[argv[0]].load()
        return command(argv[1:])
    args, unknown = parser(others).parse_known_args(argv)
    if unknown:
        from specserve.api.vllm_arguments import flag_words

        words = f"unrecognized arguments: {' '.join(unknown)}{flag_words(unknown)}"
        args.command.error(words)  # prints the usage of the subcommand
    action: Callable[[argparse.Namespace], int | None] = args.action
    code = action(args)
    sys.stdout.flush()  # before `main` returns, which still handles a broken pipe
    return code or 0


# Help of the commands in `specserve_bench`, without importing it.
OTHER_HELP = {
    "bench": "measure drafters, latency under load, and other servers",
    "demo": "train a draft head for your model",
    "doctor": "measure this machine with your model, and advise what to change",
}


def parser(others: dict[str, EntryPoint]) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="specserve",
        description="A low-latency LLM inference engine and server.",
    )
    top.add_argument("--version", action="version", version=f"specserve {VERSION}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_generate(
        commands.add_parser("generate", help="generate text from prompts", allow_abbrev=False)
    )
    add_serve(
        commands.add_parser(
            "serve", help="serve a model over HTTP with the OpenAI API", allow_abbrev=False
        )
    )
    add_chat(
        commands.add_parser(
            "chat", help="chat with a server or with a local model", allow_abbrev=False
        )
    )
    add_quantize(
        commands.add_parser(
            "quantize", help="write a copy with 8- or 4-bit weights", allow_abbrev=False
        )
    )
    add_tune(
        commands.add_parser(
            "tune",
            help="learn from your texts which draft tokens are accepted, for later starts",
            allow_abbrev=False,
        )
    )
    add_rank(
        commands.add_parser(
            "rank",
            help="run a part of the model for an engine on another machine",
            allow_abbrev=False,
        )
    )
    config = commands.add_parser(
        "config", help="show or check the resolved configuration", allow_abbrev=False
    )
    config.add_argument("what", choices=["show", "check"])
    add_settings(config)
    config.set_defaults(action=show_config, command=config)
    shells = commands.add_parser("completion", help="print a completion script", allow_abbrev=False)
    shells.add_argument("shell", choices=["bash", "zsh", "fish"])
    shells.set_defaults(action=print_completion, command=shells)
    for name in others:  # for help and completion: `run` starts these commands itself
        commands.add_parser(name, help=OTHER_HELP.get(name, "a command of another package"))
    return top


def add_generate(p: argparse.ArgumentParser) -> None:
    p.add_argument("prompts", nargs="+", metavar="PROMPT")
    p.add_argument(
        "--model", help="a local folder, a .gguf file or a hub id; default: the demo models"
    )
    add_drafting(p)
    add_sampling(p)
    how = p.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON line per prompt")
    how.add_argument(
        "--watch",
        action="store_true",
        help="draw the tree of draft tokens of each step, and which ones were accepted",
    )
    add_settings(p)
    p.set_defaults(action=generate, command=p)


def add_serve(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "model",
        nargs="?",
        help="a local folder, a .gguf file, a hub id, ID:TYPE or ollama:NAME:TAG; default: the "
        "demo models",
    )
    add_drafting(p)
    p.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="model name for clients; default: the folder's, or the hub id. Repeat it for aliases",
    )
    p.add_argument(
        "--any-model-name",
        action="store_true",
        default=None,
        help="every unknown model name means this model; default: it is an error",
    )
    p.add_argument(
        "--task",
        metavar="auto|embed|rank",
        help="besides generating text: embed returns embeddings, rank returns scores of documents; "
        "default: auto, by the model's files",
    )
    p.add_argument("--host", help="address to listen on; default: 127.0.0.1")
    p.add_argument("--port", type=int, help="port to listen on; 0: any free port; default: 8000")
    p.add_argument("--api-key-file", help="file with the accepted API keys, one per line")
    p.add_argument(
        "--admin-key-file",
        help="file with admin keys, one per line: they may change speculation, load adapters and "
        "reset the cache",
    )
    p.add_argument(
        "--allow-no-keys",
        action="store_const",
        const=True,
        help="allow a --host that other machines reach although no API key is required",
    )
    p.add_argument(
        "--tls-certificate-file",
        "--ssl-certfile",
        metavar="FILE",
        help="serve HTTPS with this certificate in PEM; default: HTTP",
    )
    p.add_argument(
        "--tls-key-file",
        "--ssl-keyfile",
        metavar="FILE",
        help="private key of the certificate in PEM",
    )
    p.add_argument(
        "--tool-parser",
        "--tool-call-parser",
        metavar="NAME",
        help="format of the model's tool calls: auto, hermes, llama3_json, mistral, command_r, "
        "template or none; default: auto",
    )
    p.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="accepted for vLLM; automatic tool choice is on unless --tool-parser is none",
    )
    p.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of the model's reasoning: auto, think or none; default: auto",
    )
    add_template(p)
    p.add_argument(
        "--enable-lora",
        action="store_true",
        help="enable LoRA adapters; --lora-modules and --max-loras enable them, too",
    )
    p.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help="adapters to load: their names in requests, and their folders or hub ids",
    )
    p.add_argument(
        "--max-loras",
        type=int,
        help="maximum adapters in use concurrently; default: the number of modules, at least 4",
    )
    p.add_argument("--max-lora-rank", type=int, help="maximum rank of an adapter; default: 16")
    p.add_argument(
        "--tensor-parallel-size",
        type=int,
        help="processes that share the columns of each layer, with the same text; default: 1",
    )
    p.add_argument(
        "--pipeline-parallel-size",
        type=int,
        help="stages of processes, each with a range of layers, with the same text; default: 1",
    )
    p.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help="each of these processes holds whole experts of a mixture; default: columns of all",
    )
    add_settings(p)
    p.set_defaults(action=serve, command=p)


def add_rank(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="parallel.address of rank 0; default: MASTER_ADDR and MASTER_PORT, as set by torchrun",
    )
    p.add_argument(
        "--rank",
        type=int,
        help="the number of this rank, from 1; default: RANK, as set by torchrun",
    )
    p.add_argument("--secret-file", required=True, help="file with parallel.secret_file's secret")
    p.add_argument("--model", help="the model's place on this machine; default: as for rank 0")
    p.set_defaults(action=rank, command=p)


def rank(args: argparse.Namespace) -> None:
    from specserve.cli.rank import run_rank
    from specserve.engine.rank_network import parse_address, read_secret

    known = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    torchrun = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if known else None
    address = args.address or torchrun
    number = args.rank if args.rank is not None else int(os.environ.get("RANK", "0"))
    if address is None:
        raise ConfigError("the address of rank 0 is unknown. Name HOST:PORT")
    if number < 1:
        raise ConfigError(
            f"--rank {number} is not the number of a further rank. Use 1, 2, ...; rank 0 is the "
            "server with parallel.address"
        )
    run_rank(parse_address(address), read_secret(args.secret_file), number, args.model)


def add_chat(p: argparse.ArgumentParser) -> None:
    p.add_argument("--url", help="server to chat with; default: a model in this process")
    p.add_argument(
        "--model",
        help="a local folder, a .gguf file, a hub id, ID:TYPE or ollama:NAME:TAG; default: the "
        "demo models; with --url: the model's name on the server",
    )
    p.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="with --url: file with the API key"
    )
    add_template(p)
    add_drafting(p)
    p.add_argument("--system", metavar="TEXT", help="system message; default: none")
    p.add_argument(
        "--session",
        type=Path,
        metavar="FILE",
        help="file that keeps the conversation; a later chat with the same file continues it",
    )
    p.add_argument(
        "--show-drafts",
        action="store_true",
        help="color each token by the drafter that proposed it",
    )
    add_sampling(p)
    add_settings(p)
    p.set_defaults(action=chat, command=p)


def add_sampling(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--max-tokens", type=int, help="maximum output tokens; default: the rest of the context"
    )
    p.add_argument(
        "--temperature", type=float, help="0 is greedy; default: the model's default, else 1"
    )
    p.add_argument(
        "--seed", type=int, help="the same seed gives the same text; default: a random seed"
    )


def add_drafting(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--demo-compute",
        metavar="qwen3-0.6b|llama-3.1-8b",
        help="pad the demo models to the compute of this model, with the same text",
    )
    p.add_argument(
        "--quantize",
        metavar="w8a8|w8|w4",
        help="quantize the weights at loading: w8 to 8 bits, w4 to 4 bits, w8a8 to 8 bits with "
        "8-bit activations; default: as stored",
    )
    p.add_argument(
        "--draft-model", help="a small draft model with the same vocabulary, or an EAGLE-3 head"
    )
    p.add_argument("--draft-head", help="an EAGLE-3 head trained for the model")
    p.add_argument(
        "--draft-quantize",
        metavar="w8a8|w8|w4",
        help="quantize the weights of the draft model; default: as stored",
    )
    p.add_argument(
        "--drafter",
        help="auto, none, ngram, model, eagle or package.module:Class; default: auto",
    )


def add_template(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file with the chat template in Jinja; default: the model's own template",
    )


def add_quantize(p: argparse.ArgumentParser) -> None:
    p.add_argument("source", help="the model to read: a local folder or a hub id")
    p.add_argument("target", type=Path, help="the folder to write; must not exist")
    p.add_argument(
        "--to", choices=["w8a8", "w8", "w4"], required=True, help="quantization of the layers"
    )
    p.add_argument(
        "--head",
        choices=["none", "w8", "w4"],
        default="w8",
        help="quantization of the LM head; default: w8",
    )
    p.set_defaults(action=quantize, command=p)


def add_tune(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", help="a local folder, a .gguf file or a hub id, as for serve")
    p.add_argument(
        "texts",
        nargs="+",
        type=Path,
        metavar="TEXT",
        help="typical prompts of your users: text files with one prompt each, or .jsonl "
        'files with a line {"messages": [...]} or {"prompt": "..."} each',
    )
    p.add_argument(
        "--max-tokens", type=int, default=256, help="tokens to generate per prompt; default: 256"
    )
    add_drafting(p)
    add_template(p)
    add_settings(p)
    p.set_defaults(action=tune, command=p)


def add_settings(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="settings in TOML; may be repeated, later files win",
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="one setting, which overrides the files; without VALUE: the default; mappings of one "
        "key are merged; `specserve config show` lists the keys",
    )
    p.add_argument(
        "--hf-token",
        metavar="TOKEN",
        action=SetsToken,
        help="token for downloads from the hub; default: the environment variable HF_TOKEN, or the "
        "login of the hub's client",
    )


class SetsToken(argparse.Action):
    """Passes the token on in HF_TOKEN, which the hub's client reads, also in other processes."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        os.environ["HF_TOKEN"] = values


def show_config(args: argparse.Namespace) -> None:
    config = load_config(args.config, parse_overrides(args.set))
    if args.what == "show":
        print(to_toml(config), end="")
        return
    from specserve.models.selection import check_drafter
    from specserve.server.tls import tls_of

    check_drafter(config)
    tls_of(config.server)
    print("OK: settings, drafter and drafter options are valid. Models were not checked")


def print_completion(args: argparse.Namespace) -> None:
    from specserve.cli.completion import script

    print(script(args.shell), end="")


def quantize(args: argparse.Namespace) -> None:
    from specserve.models import preflight
    from specserve.models.folder import resolve
    from specserve.models.hub import GGUF

    source = resolve(args.source)
    if source.is_file():
        raise ConfigError(f"{source} is a file. Name the folder that it was converted from")
    if args.target.suffix.lower() == GGUF:
        raise ConfigError(f"{args.target}: quantize cannot write GGUF files. Name a folder")
    if source.resolve() in Path(os.path.realpath(args.target)).parents:
        raise ConfigError(f"{args.target} is inside the source folder. Name another folder")
    if (told := preflight.check_model(source).quantization) is not None:
        raise ConfigError(
            f"{source} is quantized already ({told.words}). Name the unquantized model"
        )
    from specserve.api.progress import LoadProgress
    from specserve.cli.quantize import quantize
    from specserve.models.weight import Rounding

    with raising_signals(), LoadProgress(sys.stderr.isatty()) as bar:
        rounding = Rounding.named(args.to, args.head)
        num_bytes, num_odd = quantize(source, args.target, rounding, partial(bar, source.name))
    odd = f", {num_odd} maps in 8 bits because 64 does not divide their width" if num_odd else ""
    print(f"{args.target}: {num_bytes / 2**20:.0f} MiB of weights: {rounding.words}{odd}")


def generate(args: argparse.Namespace) -> None:
    sampled, settings = checked_sampling(args), checked(args)
    start = perf_counter()
    from specserve import LLM, SamplingParams
    from specserve.api.watch import draw_stream
    from specserve.cli.chat import measured
    from specserve.models.selection import scaled_models

    if not args.json:
        print(f"imports took {perf_counter() - start:.2f} s", file=sys.stderr)
    params = SamplingParams(**sampled | ({DETAILS: True} if args.watch else {}))
    with LLM(config=args.config, progress=not args.json, **settings) as llm:
        if args.json:
            for output in llm.generate(args.prompts, params):
                print(msgspec.json.encode(output).decode())
            return
        steps: Callable[..., Any] = llm.watch if args.watch else llm.stream
        streams = [steps(prompt, params) for prompt in args.prompts]  # checks all prompts
        say_scaled(scaled_models(llm.folders[:3]))
        if args.watch:
            show_legend(llm.speculation().known_sources)
        for number, stream in enumerate(streams, 1):
            if len(streams) > 1:
                print(f"[prompt {number} of {len(streams)}]", file=sys.stderr, flush=True)
            draw = partial(draw_stream, text_of=lambda token: llm.tokenizer.decode([token]))
            done = draw(stream) if args.watch else print_stream(stream)
            # On stderr, so that a pipe receives only the text.
            print(measured(done).footer(), file=sys.stderr)


def tune(args: argparse.Namespace) -> None:
    from specserve.cli.tune import read_prompts, tune

    if (name := configured(args).drafter_name) != "auto":
        raise ConfigError(f"drafter.name = {name!r}: only auto learns from texts. Set auto")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {args.max_tokens}: must be at least 1")
    prompts, settings = read_prompts(args.texts), checked(args)
    print(tune(prompts, args.max_tokens, args.config, settings))


def serve(args: argparse.Namespace) -> int:
    started_at = perf_counter()
    config = configured(args)
    if args.enable_auto_tool_choice and config.server.tool_parser == "none":
        raise ConfigError(
            "--enable-auto-tool-choice contradicts server.tool_parser = 'none'. Remove one of them"
        )
    from specserve import logs
    from specserve.api.lora import modules_of
    from specserve.exchange.spawn import ForkServer, tenants_of
    from specserve.models import preflight
    from specserve.models.selection import served_name
    from specserve.server.keys import read_admin_keys, read_keys
    from specserve.server.listen import listen
    from specserve.server.tls import tls_of

    logs.configure(config.server.log_format)
    key_file = config.server.api_key_file
    keys = None if key_file is None else read_keys(Path(key_file))
    if config.server.admin_key_file is not None:
        read_admin_keys(Path(config.server.admin_key_file))
    tls = tls_of(config.server)
    folders = preflight.check(config)
    modules_of(config, served_name(config))
    with listen(config.server) as listener:
        engines = ForkServer(config, folders.drafters, tenants_of(config, keys or ()))
        spawned = engines.start()  # imports and loads in parallel with this process
        from specserve.server.serve import Start, serve

        return serve(Start(config, folders, engines, spawned, listener, started_at, tls, keys))


def chat(args: argparse.Namespace) -> None:
    from specserve.api.watch import Colored
    from specserve.cli.chat import ChatSession, LocalModel, converse, earlier_messages

    if args.url is not None:
        from specserve.cli.remote import Remote
        from specserve.server.keys import read_keys

        refuse_with_url(args)
        key = None if args.api_key_file is None else read_keys(args.api_key_file)[0]
        session = None if args.session is None else args.session.stem
        asked = {"model": args.model, "prompt_cache_key": session, **sampling(args)}
        colored = Colored() if args.show_drafts else None
        remote = Remote(args.url, key, asked, colored, True)
        say_scaled(remote.card.scaled)
        if args.show_drafts:
            show_legend(remote.card.sources)
        converse(ChatSession(remote, args.system, args.session))
        return
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file needs a server. Name the server with --url")
    sampled, settings = checked_sampling(args), checked(args)
    earlier_messages(args.session, args.system)  # errors come before the model is loaded
    if sys.stderr.isatty():  # importing torch takes seconds without any output
        print("loading the model", file=sys.stderr)
    from specserve import LLM, SamplingParams
    from specserve.models.selection import scaled_models

    params = SamplingParams(**sampled | ({DETAILS: True} if args.show_drafts else {}))
    with LLM(config=args.config, **settings) as llm:
        local = LocalModel(llm, params, Colored() if args.show_drafts else None)
        say_scaled(scaled_models(llm.folders[:3]))
        if args.show_drafts:
            show_legend(llm.speculation().known_sources)
        converse(ChatSession(local, args.system, args.session))
        if args.session is not None and llm.config.memory.disk_path is not None:
            llm.save_cache()


def say_scaled(models: "Sequence[Scaled]") -> None:
    for model in models:
        print(f"demo: {model.source}, padded to {model.like} compute (same text)", file=sys.stderr)


def show_legend(sources: Sequence[str]) -> None:
    from specserve.api.watch import legend

    print(legend(sources) if sources else "speculation is off", file=sys.stderr)


def refuse_with_url(args: argparse.Namespace) -> None:
    models = "demo_compute", "quantize", "chat_template"
    drafting = "draft_model", "draft_head", "draft_quantize", "drafter"
    for flag in (*models, *drafting, "config", "set"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} has no effect with --url. Set it on the server")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = "max_tokens", "temperature", "seed"
    return {name: getattr(args, name) for name in names}


def checked_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters for a model in this process; ConfigError if one is invalid."""
    from specserve.exchange.sampling_params import SamplingParams, check

    given = sampling(args)
    ranges = {
        "max_tokens": "1 or more",
        "temperature": "0, or 0.0001 to 10000",
        "seed": "-2^63 to 2^63 - 1",
    }
    for name, value in given.items():
        try:
            check(SamplingParams(**{name: value}))
        except RequestError as e:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value} is invalid. Pass {ranges[name]}") from e
    return given


def checked(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments for `LLM`, checked before torch is imported."""
    from specserve.models import preflight

    config = configured(args)
    preflight.check(config)
    flags = {
        "model.demo_compute": args.demo_compute,
        "model.chat_template": getattr(args, "chat_template", None),
    }
    own = {key: value for key, value in flags.items() if value is not None}
    return {
        "model": config.model.path,
        "quantize": args.quantize,
        "draft_model": args.draft_model,
        "draft_head": args.draft_head,
        "draft_quantize": args.draft_quantize,
        "drafter": args.drafter,
        "set": parse_overrides(args.set) | own,
    }


def configured(args: argparse.Namespace) -> Config:
    """The config from files and flags: --set wins over files, the other flags win over both."""
    flags = {
        "MODEL" if args.action is serve else "--model": ("model.path", args.model),
        "--demo-compute": ("model.demo_compute", args.demo_compute),
        "--quantize": ("model.quantize", args.quantize),
        "--chat-template": ("model.chat_template", getattr(args, "chat_template", None)),
        "--draft-model": ("drafter.model", args.draft_model),
        "--draft-head": ("drafter.head", args.draft_head),
        "--draft-quantize": ("drafter.quantize", args.draft_quantize),
        "--drafter": ("drafter.name", args.drafter),
    }
    if args.action is serve:
        files = "api_key_file", "admin_key_file", *TLS_FILES
        others = "tool_parser", "reasoning_parser"
        names = args.served_model_name or [None]
        flags |= {
            "--served-model-name": ("server.served_model_name", names[0]),
            "--served-model-name (again)": ("server.model_aliases", names[1:] or None),
        }
        for key in ("host", "port", "any_model_name", "allow_no_keys", *files, *others):
            flags[f"--{key.replace('_', '-')}"] = f"server.{key}", getattr(args, key)
        flags |= {
            "--task": ("model.task", args.task),
            "--lora-modules": ("lora.modules", named_paths(args.lora_modules)),
            "--max-loras": ("lora.max_loras", args.max_loras),
            "--max-lora-rank": ("lora.max_rank", args.max_lora_rank),
            "--tensor-parallel-size": ("parallel.tensor", args.tensor_parallel_size),
            "--pipeline-parallel-size": ("parallel.pipeline", args.pipeline_parallel_size),
            "--enable-expert-parallel": ("parallel.expert", args.enable_expert_parallel),
        }
    given = [Setting(flag, *setting) for flag, setting in flags.items() if setting[1] is not None]
    config = load_config(args.config, parse_overrides(args.set), given)
    if args.action is serve and args.enable_lora and config.lora.max_loras == 0:
        raise ConfigError("--enable-lora contradicts lora.max_loras = 0. Remove one of them")
    if args.action is serve and args.enable_lora and config.lora.num_slots == 0:
        given.append(Setting("--enable-lora", "lora.max_loras", USUAL_LORAS))
        config = load_config(args.config, parse_overrides(args.set), given)
    return config


def named_paths(given: Sequence[str] | None) -> dict[str, str] | None:
    """Parse NAME=PATH arguments; ConfigError if a name occurs twice."""
    if given is None:
        return None
    found = dict[str, str]()
    for text in given:
        name, _, path = text.partition("=")
        if not (name and path) or text.startswith("{"):
            raise ConfigError(
                f"--lora-modules {text} is not NAME=PATH. Write NAME=PATH, and put the model "
                "before this flag"
            )
        if name in found:
            raise ConfigError(
                f"--lora-modules {text} repeats the name {name!r}. Use each name only once"
            )
        found[name] = path
    return found


def print_stream(steps: "Generator[tuple[str, list[int]], None, Output]") -> "Output":
    while True:
        try:
            text, _ = next(steps)
        except StopIteration as end:
            print(flush=True)
            output: Output = end.value
            return output
        print(text, end="", flush=True)
