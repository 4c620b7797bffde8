"""Prepares prompts: the chat template, tokens, parameters, grammars and block keys of a request.

Large bodies, chat templates and grammars run in bounded processes, one job at a time per process.
A slow job then does not delay the event loop.
"""

import asyncio
import logging
import signal
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from specserve.api.input_processor import InputProcessor, last
from specserve.config import ServerConfig
from specserve.errors import Overloaded, RequestError
from specserve.exchange.fair_queue import FairThreads, FairTurns, current_tenant, owner
from specserve.exchange.messages import Frames, Ready, pack
from specserve.exchange.sampling_params import Sampling, SamplingParams, check_ends, ruled
from specserve.exchange.spawn import start_process
from specserve.memory.blocks import Keys, KVFormat, prompt_keys
from specserve.server import grammar_process, template_process
from specserve.server.body import LARGE, BodyKind, is_short
from specserve.server.bounded_process import Data, Done, FromProcess, ProcessStarted, Refused, Reply
from specserve.server.grammar_process import SECONDS, TOO_MUCH, GrammarSetup
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.grammars.compiled import Verdicts
from specserve.text.template_messages import Message

LONG = 1 << 12  # tokens of prompts; hashing more takes a large part of a millisecond
NUM_PROCESSES = 2  # per kind, so that one is free while another runs to its deadline
SOON = 1.0  # seconds from the server's start to the start of processes that are not urgent
PATIENCE = 4 * SECONDS  # wall time for a grammar, because other processes also use the CPU

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("specserve")
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(FromProcess).decode


class PromptProcessor:
    """Converts bodies to prompts. Long work runs in threads and bounded processes.

    Call `open` and both `start_` methods in the event loop's thread: processes end with the thread
    that started them.
    """

    def __init__(self, limits: ServerConfig, min_tpot_ms: float | None) -> None:
        self.limits, self.min_tpot_ms = limits, min_tpot_ms
        # Threads are enough: tokenizing releases the GIL.
        self.threads = FairThreads(2, "text")
        self.readers: BodyProcesses | None = None
        self.templates: TemplateProcesses | None = None
        self.grammars: GrammarProcesses | None = None
        self.loaded: InputProcessor | None = None
        self.kv_formats: Mapping[str, KVFormat] = {}  # of the models with a prefix cache

    @property
    def processor(self) -> InputProcessor:
        assert self.loaded is not None, "routes call check_open first"
        return self.loaded

    @property
    def processes(self) -> "list[Processes]":
        return [each for each in (self.readers, self.templates, self.grammars) if each is not None]

    def start_templates(self, template: ChatTemplate | None) -> None:
        if template is not None:
            self.templates = TemplateProcesses(template, self.limits.template_seconds)

    def open(self, processor: InputProcessor, kv_formats: Mapping[str, KVFormat]) -> None:
        self.readers = BodyProcesses(self.limits.max_body_items)
        self.loaded, self.kv_formats = processor, kv_formats

    def start_grammars(self, model: Path) -> None:
        """Start the grammar processes, after `open`."""
        ends = self.processor.defaults.eos_token_ids
        if ends:
            setup = GrammarSetup(str(model), self.processor.vocab_size, tuple(ends))
            self.grammars = GrammarProcesses(setup)

    def change(self, ready: Ready) -> None:
        """Store the engine's state after a change of speculation."""
        self.kv_formats = ready.kv_formats
        self.loaded = msgspec.structs.replace(self.processor, sources=ready.sources)

    async def in_thread(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on text in a thread, so that a long prompt does not delay streams."""
        future = self.threads.submit(owner.get(), lambda: do(*args, **kwargs))
        return await asyncio.wrap_future(future)

    async def parse(self, raw: bytes, kind: BodyKind[T]) -> T:
        """Read a body. Large bodies are read in a process."""
        if is_short(raw):
            return kind.read(raw)
        assert self.readers is not None, "routes call check_open first"
        return await self.readers.read(raw, kind)

    async def render(self, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
        """Return the conversation as text. The chat template has a deadline."""
        with blaming("messages"):
            self.processor.check_chat()
        assert self.templates is not None, "the template's processes start before requests"
        return await self.templates.render(messages, options)

    async def tokenize(
        self, text: str, field: str, add_special_tokens: bool, kept: int | None = None
    ) -> list[int]:
        """Return the text's tokens, or the last `kept`, of any length. Errors name `field`."""
        with blaming(field):
            return await self.in_thread(self.processor.encode, text, add_special_tokens, kept)

    async def with_history(
        self, sampling: Sampling, messages: Sequence[Message], text: str, prompt: list[int]
    ) -> Sampling:
        """Return the parameters with the tokens before the newest message of a conversation, if the
        model's prefix cache needs them.
        """
        if not any(of.has_state for of in self.kv_formats.values()):
            return sampling
        found = await self.in_thread(self.processor.num_history, messages, text, prompt)
        return msgspec.structs.replace(sampling, num_history=found)

    async def read_all(
        self,
        prompts: Sequence[str | list[int]],
        kept: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Return every prompt's tokens, or the last `kept` of each; stop at an invalid prompt."""
        read = self.processor.read
        with blaming("prompt"):
            for prompt in prompts:
                if not isinstance(prompt, str):  # before any text is tokenized
                    self.processor.check_length(last(prompt, kept))
            return [await self.in_thread(read, p, kept, add_special_tokens) for p in prompts]

    async def hash(
        self, prompts: Sequence[list[int]], salt: str, adapter: str, tenant: int
    ) -> list[Keys]:
        """Return the keys of each prompt's blocks. Many tokens are hashed in a thread."""

        def hash_all() -> list[Keys]:
            formats = self.kv_formats
            return [prompt_keys(formats, prompt, salt, adapter, tenant) for prompt in prompts]

        is_long = sum(map(len, prompts)) > LONG
        return await self.in_thread(hash_all) if is_long else hash_all()

    async def resolve(self, params: SamplingParams) -> Sampling:
        """Check and resolve the parameters, except for the grammar.

        RequestError if the engine or the operator's limits exclude them.
        """
        num_stop, most = len(params.stop_strings), self.limits.max_stop_strings
        if most is not None and num_stop > most:
            message = f"stop: {num_stop} strings. At most {most} are allowed"
            raise RequestError(f"{message} (server.max_stop_strings)", "stop")
        if params.priority < self.limits.min_priority:
            raise RequestError(
                f"priority = {params.priority} is below the minimum of this server, "
                f"{self.limits.min_priority} (server.min_priority). Increase it, or omit it",
                "priority",
            )
        self.check_tpot(None if params.slo is None else params.slo.tpot_ms)
        resolve = self.processor.resolve
        # Tokenizing bad words and converting schemas can take long.
        is_long = params.bad_words or params.structured_outputs is not None
        return await self.in_thread(lambda: resolve(params)) if is_long else resolve(params)

    def check_tpot(self, asked: float | None) -> None:
        """Refuse a tight TPOT target, because it reduces the prompt rows of other requests."""
        least = self.min_tpot_ms
        if asked is None or (least is not None and asked >= least):
            return
        why = (
            "clients cannot set this target at this server. Omit it"
            if least is None
            else f"the minimum at this server is {least:g}. Send at least that"
        )
        raise RequestError(
            f"slo.tpot_ms = {asked:g}: {why}, or ask its operator to set server.min_tpot_ms",
            "slo.tpot_ms",
        )

    async def check_grammar(self, grammar: str, field: str, salt: str = "") -> None:
        """RequestError for a grammar that cannot be compiled in time. It names `field`."""
        assert self.grammars is not None, "grammars are refused for models without end tokens"
        await self.grammars.check(grammar, field, salt)

    async def with_grammar(self, sampling: Sampling, grammar: str) -> Sampling:
        """Return the parameters with a grammar of tools."""
        ends = self.processor.defaults
        check_ends(sampling.min_tokens, ends, "tools")
        if sampling.grammar:
            raise RequestError(
                "tools: enforced or strict calls cannot be combined with another format of the "
                "text. Omit one of them",
                "tools",
            )
        await self.check_grammar(grammar, "tools", sampling.cache_salt)
        return ruled(sampling, grammar, ends.eos_token_ids)

    async def close(self) -> None:
        for processes in self.processes:
            await processes.close()
        self.threads.close()


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Name `field` in a RequestError that the block raises."""
    try:
        yield
    except RequestError as e:
        e.param = field
        raise


class ProcessEnded(Exception):
    """A process ended during a job, with this exit status."""

    def __init__(self, status: int) -> None:
        self.status = status


class Processes:
    """Bounded processes of one kind. Jobs wait for a free process in the order of a fair queue.

    A job waits at most for one deadline and the start of a process, unless earlier jobs of its
    owner also run to their deadlines.
    """

    def __init__(
        self, module: str, first: bytes, seconds: float, name: str, is_urgent: bool = False
    ) -> None:
        """`first` is the first frame to each process; messages use `name`.

        Urgent processes start now. Others start after the server's own start, or on first use.
        """
        self.module, self.first, self.seconds, self.name = module, first, seconds, name
        self.asked = Counter[Hashable]()  # running and waiting jobs, by owner
        self.is_closed = False
        self.turns = FairTurns(NUM_PROCESSES)
        self.free: asyncio.Queue[Process] = asyncio.Queue()
        self.processes = [self.new_process() for _ in range(NUM_PROCESSES if is_urgent else 0)]
        self.replaced: list[Process] = []  # killed processes that have not ended yet
        for process in self.processes:
            self.free.put_nowait(process)
        self.timer = asyncio.get_running_loop().call_later(SOON, self.begin_first)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a job during the block."""
        tenant = owner.get()
        self.asked[tenant] += 1
        try:
            yield
        finally:
            self.asked[tenant] -= 1
            if not self.asked[tenant]:
                del self.asked[tenant]

    async def ask(self, payload: bytes) -> Reply:
        """Run a job and return its reply.

        TimeoutError after the deadline, `ProcessEnded` if the process ends during the job.
        """
        async with self.turns.turn(is_large=len(payload) > LARGE):
            return await self.ask_now(payload)

    async def ask_now(self, payload: bytes) -> Reply:
        if not self.processes:
            self.begin_another()
        process = await self.free.get()
        try:
            with self.logging_failure():
                self.begin_another()  # in case this process has to be killed
            if process.has_ended:
                process = self.replace(process)
            return await process.ask(payload, self.seconds)
        except Overloaded:  # the process ended during its start
            self.check_open()
            raise
        except TimeoutError:
            log.warning(
                "a %s ran for more than %g s. Its process is killed and replaced",
                self.name,
                self.seconds,
            )
            raise
        finally:
            if process.is_at_work:
                process.close()
                with self.logging_failure():
                    process = self.replace(process)
            self.free.put_nowait(process)  # the next job replaces it if it has ended

    @contextmanager
    def logging_failure(self) -> Iterator[None]:
        """Log a failed start of a process instead of raising."""
        try:
            yield
        except Overloaded as e:
            log.warning("%s", e)

    def begin_another(self) -> None:
        """Start one more process, up to NUM_PROCESSES."""
        if len(self.processes) < NUM_PROCESSES:
            self.processes.append(self.new_process())
            self.free.put_nowait(self.processes[-1])

    def new_process(self) -> "Process":
        self.check_open()
        try:
            return Process(self.module, self.first)
        except OSError as e:
            message = f"the process for the {self.name} could not be started ({e}). Retry later"
            raise Overloaded(message) from e

    def check_open(self) -> None:
        if self.is_closed:
            raise Overloaded("the server is shutting down. Use another server", retry_after=None)

    def replace(self, old: "Process") -> "Process":
        new = self.processes[self.processes.index(old)] = self.new_process()
        self.replaced = [p for p in [*self.replaced, old] if not p.ended.is_set()]
        return new

    def begin_first(self) -> None:
        if not self.processes:
            with suppress(Overloaded):  # the first job tries again
                self.begin_another()

    async def close(self) -> None:
        self.timer.cancel()
        self.is_closed = True
        for process in [*self.processes, *self.replaced]:
            process.close()
            await process.ended.wait()


class Process(asyncio.Protocol):
    """A child process, and the pending reply of its job."""

    def __init__(self, module: str, first: bytes) -> None:
        self.process, sock = start_process(module, first)
        self.loop = asyncio.get_running_loop()
        self.connecting = self.loop.create_task(self.connect(sock))
        self.transport: asyncio.WriteTransport | None = None
        self.frames = Frames()
        self.reply: asyncio.Future[Reply] | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.has_ended = False  # or was killed

    async def connect(self, sock: socket.socket) -> None:
        await self.loop.create_connection(lambda: self, sock=sock)

    @property
    def is_at_work(self) -> bool:
        return self.reply is not None

    async def ask(self, payload: bytes, seconds: float) -> Reply:
        """Return the reply. TimeoutError after `seconds`, not counting the process's start."""
        await self.started.wait()
        if self.has_ended or self.transport is None:
            raise Overloaded("the process for this job has ended. Retry in a moment")
        self.reply = self.loop.create_future()
        self.transport.write(pack(payload))
        async with asyncio.timeout(seconds):
            reply = await self.reply
        self.reply = None
        return reply

    def close(self) -> None:
        self.has_ended = True
        self.process.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop has another class

    def data_received(self, data: bytes) -> None:
        for payload in self.frames.feed(data):
            match decode(payload):
                case ProcessStarted():
                    self.started.set()
                case reply if self.reply is not None and not self.reply.done():
                    if isinstance(reply, Refused) and reply.is_last:
                        self.close()
                    self.reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = True
        status = self.process.wait()  # its socket is closed, so this does not block
        self.started.set()  # wakes `ask`, which then sees has_ended
        self.ended.set()
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(ProcessEnded(status))


def packed(value: Any, field: str) -> msgspec.Raw:
    try:
        return msgspec.Raw(encode(value))
    except (TypeError, ValueError, OverflowError) as e:
        raise RequestError(f"{field}: not valid text: {e}", field) from e


class TemplateProcesses(Processes):
    def __init__(self, template: ChatTemplate, seconds: float) -> None:
        module = template_process.__name__
        super().__init__(module, encode(template), seconds, "chat template", is_urgent=True)

    async def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> str:
        """Return the chat as text. RequestError if the template refuses it or takes too long."""
        payload = encode((packed(messages, "messages"), packed(options, "chat_template_kwargs")))
        try:
            with self.counted():
                reply = await self.ask(payload)
        except TimeoutError as e:
            raise RequestError(
                f"messages: the chat template ran for more than {self.seconds:g} s. Send fewer "
                "messages",
                "messages",
            ) from e
        except ProcessEnded as e:
            raise Overloaded("the process of the chat template ended. Retry") from e
        match reply:
            case Done(text):
                return text
            case Refused(message, param):
                raise RequestError(message, param or "messages")
        raise TypeError(reply)


class Check(msgspec.Struct):
    """The check of a grammar, and the number of requests that wait for it."""

    task: asyncio.Task[str]
    num_waiting: int = 0


class BodyProcesses(Processes):
    def __init__(self, max_items: int) -> None:
        """Bodies have at most `max_items` items."""
        # A name, because the module imports this one. 8 s are wall time.
        module = "specserve.server.body_process"
        super().__init__(module, encode(max_items), 8.0, "request body")

    async def read(self, raw: bytes, kind: BodyKind[T]) -> T:
        """Read a body. RequestError if it is invalid or takes too long."""
        try:
            with self.counted():
                reply = await self.ask(encode((kind.name, raw)))
        except TimeoutError as e:
            raise Overloaded("the CPU is overloaded. Retry") from e
        except ProcessEnded as e:
            if e.status == -signal.SIGPROF:
                raise RequestError("the body takes too long to read. Send fewer items") from e
            raise Overloaded("the process that reads the body ended. Retry") from e
        match reply:
            case Data(content):
                value: T = msgspec.json.decode(content, type=kind.result)
                return value
            case Refused(message, param, code):
                error = RequestError(message, param)
                error.code = code
                raise error
        raise TypeError(reply)


class GrammarProcesses(Processes):
    def __init__(self, setup: GrammarSetup) -> None:
        first = msgspec.msgpack.encode(setup)
        super().__init__(grammar_process.__name__, first, PATIENCE, "grammar")
        self.verdicts = Verdicts()
        # Running and waiting checks, by owner, grammar and salt.
        self.checks: dict[tuple[Hashable, str, str], Check] = {}

    async def check(self, grammar: str, field: str, salt: str) -> None:
        """RequestError for a grammar that cannot be compiled in time.

        Overloaded if the check could not be completed.
        """
        sender = f"{current_tenant()} {salt}"
        wrong = self.verdicts.find(grammar, sender)
        if wrong is None:
            with self.counted():
                wrong = await self.shared(grammar, salt)
            self.verdicts.keep(grammar, wrong, sender)
        if wrong:
            raise RequestError(f"{field}: {wrong}", field)

    async def shared(self, grammar: str, salt: str) -> str:
        """Return the grammar's error. Requests of one owner share a check of the same grammar.

        The check is cancelled when no request waits for it.
        """
        key = owner.get(), grammar, salt
        if key not in self.checks:
            self.checks[key] = Check(asyncio.create_task(self.compile(grammar)))
        check = self.checks[key]
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting:
                check.task.cancel()
                del self.checks[key]

    async def compile(self, grammar: str) -> str:
        """Return the grammar's error; empty if it compiles. Retry if the process was killed."""
        for _ in range(2):
            try:
                reply = await self.ask(grammar.encode())
                return reply.message if isinstance(reply, Refused) else ""
            except TimeoutError as e:
                raise Overloaded("the CPU is overloaded. Retry") from e
            except ProcessEnded as e:
                if e.status == -signal.SIGPROF:
                    log.warning("a grammar took more than %g s. Its process is replaced", SECONDS)
                    return f"compiling takes more than {SECONDS:g} s. Send a simpler one"
                # Signals after a lack of memory or stack.
                if -e.status in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
                    return TOO_MUCH
        raise Overloaded("the process that compiles the grammar ended. Retry")
