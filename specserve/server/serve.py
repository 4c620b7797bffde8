"""`specserve serve`: start-up in parallel to the engine process, and graceful shutdown."""

import asyncio
import logging
import os
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from threading import current_thread, main_thread
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import uvicorn
import uvloop

from specserve import logs
from specserve.api.input_processor import load_text_files, make_input_processor
from specserve.api.lora import modules_of
from specserve.api.poolers import poolers_of
from specserve.api.progress import LoadProgress, show_phases
from specserve.config import DEMO, Config
from specserve.errors import EngineDied, Overloaded
from specserve.exchange.client import EngineClient
from specserve.exchange.messages import AdapterRef, Ready
from specserve.exchange.phases import Phases
from specserve.exchange.spawn import ForkServer, Spawned
from specserve.models.preflight import Folders
from specserve.models.selection import scaled_models
from specserve.process import (
    AT_ONCE,
    ENDING,
    keep_objects,
    keep_stderr_from_blocking,
    return_freed_memory,
    switch_threads_often,
    tell,
)
from specserve.server.app import make_app
from specserve.server.completion import ServedModel, Service, fingerprint
from specserve.server.connection import SPARE, bounded
from specserve.server.tls import TLS, Handshakes, handshake_log
from specserve.server.tracing import Tracer, start_tracing
from specserve.text.answer.formats import formats_of

ENGINE_DIED = 70  # exit code; EX_SOFTWARE of sysexits.h
FLUSH_SECONDS = 5.0  # maximum seconds to send the last bytes at shutdown

log = logging.getLogger("specserve")


class EngineDiedWhileUp(EngineDied):
    """The engine died after start-up. The error goes to the log instead of plain stderr."""


class Start(NamedTuple):
    """The results of `specserve serve` before the import of this module."""

    config: Config
    folders: Folders
    engines: ForkServer
    spawned: Spawned  # the first engine process
    listener: socket.socket
    started_at: float  # perf_counter
    tls: TLS | None = None
    keys: Sequence[str] | None = None  # API keys, see `make_app`


def serve(start: Start) -> int:
    """Serve until a signal arrives or the engine dies, and return the exit code."""
    return_freed_memory()
    switch_threads_often()
    keep_stderr_from_blocking()
    logs.configure(start.config.server.log_format)
    raise_file_limit(start.config.server.max_connections)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(start))
    except EngineDiedWhileUp as e:
        log.error("error: %s", e)
        return ENGINE_DIED
    except EngineDied as e:
        tell(f"error: {e}")
        return ENGINE_DIED


async def run(start: Start) -> int:
    saves_blocks = start.config.memory.disk_path is not None
    engine = EngineClient(start.spawned, start.engines.start, saves_blocks)
    engine.begin_with = start.engines.begin_with
    service = Service(start.config, engine)
    service.sleep_control.release_shared = start.engines.release
    tracer = start_tracing(os.environ, service.name)
    server = Server(service, start.tls, tracer, start.keys)
    await engine.connect()  # last, because waiting messages are handled at once
    serving = asyncio.create_task(server.serve(sockets=[start.listener]))
    living = asyncio.create_task(live(service, start))
    watching = asyncio.create_task(engine.watch(start.config.server.hang_seconds))
    sampling = asyncio.create_task(service.history.run())
    signalled = asyncio.create_task(server.signals.get())
    renewing = None if start.tls is None else asyncio.create_task(start.tls.renew())
    try:
        await asyncio.wait((living, signalled), return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()  # raises its error
        return await drain(service, server)
    finally:
        living.cancel()
        watching.cancel()
        sampling.cancel()
        if renewing is not None:
            renewing.cancel()
        await server.leave(serving)
        await service.close()
        engine.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def live(service: Service, start: Start) -> NoReturn:
    """Load the model, and wait until the engine dies."""
    ready = await load(service, start)
    seconds = perf_counter() - start.started_at
    url = url_of(start.listener.getsockname(), "http" if start.tls is None else "https")
    for line in introduction(service, ready, url, seconds):
        tell(line, number=1)
    await service.engine.died.wait()
    raise EngineDiedWhileUp("the engine process has ended. The server exits")


async def load(service: Service, start: Start) -> Ready:
    """Read the tokenizer while the engine process loads, and open the service."""
    phases = Phases()
    phases.note("imports", f"{perf_counter() - start.started_at:.2f} s")
    folders = start.folders
    with LoadProgress(sys.stderr.isatty()) as bar:
        service.engine.on_loading = bar
        with phases.phase("tokenizer"):
            paths = folders.target, folders.draft, service.config.model.chat_template
            files = await asyncio.to_thread(load_text_files, *paths)
            asked = service.config, folders.target, files.tokenizer
            poolers = await asyncio.to_thread(poolers_of, *asked)
        service.prompts.start_templates(files.tokenizer.chat_template)
        ready = await service.engine.ready
        modules = await asyncio.to_thread(modules_of, service.config, service.name)
        for name, folder in modules.items():
            service.adapters.put(name, await load_adapter(service.engine, str(folder)))
    served = ServedModel(
        model=service.name,
        fingerprint=fingerprint(folders.target, ready, files.tokenizer.chat_template),
        drafter=ready.drafter,
        max_nodes=0 if ready.drafter == "none" else start.config.max_nodes,
        scaled=scaled_models((folders.target, folders.draft, folders.head)),
        kv_dtype=ready.kv_dtype,
        weights=ready.weights,
        draft_weights=ready.draft_weights,
        draft_head=ready.draft_head,
        sources=ready.sources,
        formats=formats_of(
            files.tokenizer, service.limits.tool_parser, service.limits.reasoning_parser
        ),
        implementation=ready.implementation,
        row_invariant=ready.row_invariant,
        has_head=ready.has_head,
        is_demo=folders.target.resolve().is_relative_to(DEMO.parent.resolve()),
        known_sources=[*ready.known_sources],
    )
    limits = ready.vocab_size, ready.max_model_len
    processor = make_input_processor(files, *limits, ready.sources, served.formats)
    service.open(processor, served, ready, poolers)
    service.prompts.start_grammars(folders.target)
    if service.limits.log_format == "json":
        log.info("start-up", extra={"fields": {"phases": phases.table | ready.phases}})
    else:
        show_phases(phases.table | ready.phases)
    keep_objects()
    return ready


async def load_adapter(engine: EngineClient, folder: str) -> AdapterRef:
    """Load an adapter at start-up. Retry if the engine process dies meanwhile."""
    while True:
        try:
            return await engine.load_adapter(folder)
        except Overloaded:
            await asyncio.sleep(0.5)


def adapters_words(service: Service) -> str:
    lora, known = service.config.lora, service.adapters.known
    slots = f"up to {lora.num_slots} at once, of rank up to {lora.max_rank}"
    return f"adapters: {', '.join(known) or 'none loaded'}, {slots}"


async def drain(service: Service, server: "Server") -> int:
    """Refuse new requests, and wait for running ones until a second signal or the time limit."""
    service.is_draining = True
    # Requests that a sleep keeps would not end.
    seconds = 0.0 if service.is_asleep else service.limits.drain_seconds
    if number := len(service.completions):
        running = "1 request has" if number == 1 else f"{number} requests have"
        log.info(
            "%s %g s to finish (server.drain_seconds); another SIGTERM or SIGINT aborts them",
            *(running, seconds),
        )
    else:
        log.info("shutting down: no request is running")
    drained = asyncio.create_task(service.drained())
    again = asyncio.create_task(server.signals.get())
    await asyncio.wait((drained, again), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    left = list(service.completions)
    for completion in left:
        message = "the server shut down before the response was complete"
        completion.end(Overloaded(message, retry_after=None))
    if number:
        log.info("shutting down: %d requests finished, %d aborted", number - len(left), len(left))
    if service.engine.died.is_set():
        raise EngineDiedWhileUp("the engine process has ended before its last responses")
    if not again.done():
        return 0
    server.flush_seconds = 0.5
    return 128 + again.result()


class Server(uvicorn.Server):
    """uvicorn's server, with a queue of signals for `run` and `drain`, and limited handshakes."""

    flush_seconds = FLUSH_SECONDS

    def __init__(
        self,
        service: Service,
        tls: TLS | None = None,
        tracer: Tracer | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        config = uvicorn.Config(
            make_app(service, tracer, keys),
            http=bounded(service.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=60,  # seconds; clients close idle connections earlier
            ssl_context_factory=None if tls is None else lambda *_: tls.context,
        )
        super().__init__(config)
        handshake_log.disabled = not service.limits.access_log
        self.limits = service.limits
        self.signals: asyncio.Queue[int] = asyncio.Queue()
        self.is_signalled = False
        self.running_loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn, but limit the time of TLS handshakes, and log failed ones."""
        self.handle_other_signals()
        await self.lifespan.startup()
        its, loop = self.config, asyncio.get_running_loop()
        kind: Any = its.http_protocol_class
        known = {"server_state": self.server_state, "app_state": self.lifespan.state}
        self.servers: list[Any] = []
        made = partial(kind, config=its, **known)
        for each in sockets or ():
            if its.ssl is None:
                self.servers.append(await loop.create_server(made, sock=each, backlog=its.backlog))
            else:
                each.listen(its.backlog)
                limits = self.limits.header_seconds, self.limits.max_connections
                self.servers.append(Handshakes(each, its.ssl, *limits, made))
        self.started = True

    def handle_other_signals(self) -> None:
        """Handle other signals that end a process, unless they are ignored (nohup)."""
        if current_thread() is main_thread():  # Python forbids handlers in other threads
            for number in ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Queue a signal. A drain ignores all but SIGTERM and SIGINT: systemd also sends SIGHUP."""
        if self.is_signalled and sig not in AT_ONCE:
            return
        self.is_signalled = True
        self.running_loop.call_soon_threadsafe(self.signals.put_nowait, sig)

    async def leave(self, serving: "asyncio.Task[None]") -> None:
        """Shut down: send the last bytes, then abort connections that do not read them."""
        self.should_exit = True
        await asyncio.wait((serving,), timeout=self.flush_seconds)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True
        await serving


def raise_file_limit(max_connections: int) -> None:
    """Raise the limit on open files to the hard limit, because every connection is a file.

    Warn if the hard limit is too low.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = max_connections + SPARE + 64  # 64 files that are not connections
    if hard != resource.RLIM_INFINITY and hard < needed:
        log.warning(
            "server.max_connections = %d needs %d open files, and %d are allowed. Raise the limit "
            "(ulimit -n), or lower the setting",
            *(max_connections, needed, hard),
        )


def url_of(address: Sequence[object], scheme: str) -> str:
    """Return the URL of a socket's address on this machine."""
    host, port = address[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}"


def introduction(service: Service, ready: Ready, url: str, seconds: float) -> list[str]:
    """Return the start-up message: model, drafter, memory, URL, and a curl command to try."""
    config, served = service.config, service.served
    sources = f" (sources: {', '.join(ready.sources)})" if ready.drafter == "auto" else ""
    limits = f"{sources}, up to {config.max_nodes} draft tokens per request and step"
    has_chat = bool(service.prompts.processor.tokenizer.chat_template)
    question = "What does shutil.copytree do?" if config.model.path is None else "Hello"
    chat = '{"messages": [{"role": "user", "content": "' + question + '"}]'
    body = chat if has_chat else '{"prompt": "def "'
    body += ', "max_tokens": 64, "temperature": 0, "stream": true}'
    variant = "results of this model depend on the batch, so speculation and prefix caching are off"
    own_code = "computed by transformers' modules in eager mode"
    route = "chat/completions" if has_chat else "completions"
    file = config.server.api_key_file
    first = f"grep -m 1 '^[^#]' {shlex.quote(file)}" if file else ""
    key = f' -H "Authorization: Bearer $({first})"' if file else ""
    return [
        f"serving {config.target} as {service.name}",
        *(f"demo: {s.source}, padded to {s.like} compute (same text)" for s in served.scaled),
        f"drafter {ready.drafter}{limits if ready.drafter != 'none' else ', speculation is off'}",
        *([adapters_words(service)] if config.lora.num_slots else []),
        *([own_code] if ready.implementation == "transformers" else []),
        *([variant] if ready.row_invariant is False else []),
        *([served.formats.words] if has_chat else []),
        f"memory {ready.phases['pool'].partition(': ')[2]}; up to "
        f"{service.prompts.processor.max_model_len} tokens per request",
        f"ready in {seconds:.1f} s at {url}",
        f"open {url} in a browser, or send a request:"
        if has_chat
        else "this model has no chat template: send completions, or set --chat-template FILE",
        f"curl -N {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'",
    ]
