"""Prompts: the chat template, tokens, parameters, grammars and block keys of a request.

Large bodies, chat templates and grammars go to bounded processes that do one thing each at a time:
so a slow one delays only its own.
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

LONG = 1 << 12  # tokens of prompts from which hashing takes a good part of a millisecond
NUM_PROCESSES = 2  # while one runs to its deadline, the other does all else
SOON = 1.0  # seconds from the server's start to that of a first process that is not urgent
PATIENCE = 4 * SECONDS  # for a grammar, on the clock: other processes may need the CPU, too

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("specserve")
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(FromProcess).decode


class PromptProcessor:
    """Turns bodies into prompts. Work that may be long runs in threads and bounded processes.

    Processes end with the thread that starts them: call `open` and both `start_` methods in the
    event loop's thread.
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
        assert self.loaded is not None, "a route reads only after check_open"
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
        """To be called after `open`."""
        ends = self.processor.defaults.eos_token_ids
        if ends:
            setup = GrammarSetup(str(model), self.processor.vocab_size, tuple(ends))
            self.grammars = GrammarProcesses(setup)

    def change(self, ready: Ready) -> None:
        """Note what the engine has from now on."""
        self.kv_formats = ready.kv_formats
        self.loaded = msgspec.structs.replace(self.processor, sources=ready.sources)

    async def in_thread(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on text in a thread, so that a long prompt does not delay streams."""
        future = self.threads.submit(owner.get(), lambda: do(*args, **kwargs))
        return await asyncio.wrap_future(future)

    async def parse(self, raw: bytes, kind: BodyKind[T]) -> T:
        """Read a body; one that may take long in a process."""
        if is_short(raw):
            return kind.read(raw)
        assert self.readers is not None, "a route reads only after check_open"
        return await self.readers.read(raw, kind)

    async def render(self, messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
        """The conversation as text, by the chat template, which has a deadline."""
        with blaming("messages"):
            self.processor.check_chat()
        assert self.templates is not None, "a template has its processes before requests come"
        return await self.templates.render(messages, options)

    async def tokenize(
        self, text: str, field: str, add_special_tokens: bool, kept: int | None = None
    ) -> list[int]:
        """The text's tokens, or the last `kept`, without `check_length`; errors name `field`."""
        with blaming(field):
            return await self.in_thread(self.processor.encode, text, add_special_tokens, kept)

    async def read_all(
        self,
        prompts: Sequence[str | list[int]],
        kept: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Every prompt's tokens, or the last `kept` of each; tokenizing stops at the first prompt
        that does not fit.
        """
        read = self.processor.read
        with blaming("prompt"):
            for prompt in prompts:
                if not isinstance(prompt, str):  # before any text is tokenized
                    self.processor.check_length(last(prompt, kept))
            return [await self.in_thread(read, p, kept, add_special_tokens) for p in prompts]

    async def hash(
        self, prompts: Sequence[list[int]], salt: str, adapter: str, tenant: int
    ) -> list[Keys]:
        """The keys of each prompt's blocks; many tokens are hashed in a thread."""

        def hash_all() -> list[Keys]:
            formats = self.kv_formats
            return [prompt_keys(formats, prompt, salt, adapter, tenant) for prompt in prompts]

        is_long = sum(map(len, prompts)) > LONG
        return await self.in_thread(hash_all) if is_long else hash_all()

    async def resolve(self, params: SamplingParams) -> Sampling:
        """The parameters, checked and resolved; RequestError for what the engine or the operator's
        limits exclude. Their grammar is not checked yet.
        """
        num_stop, most = len(params.stop_strings), self.limits.max_stop_strings
        if most is not None and num_stop > most:
            raise RequestError(f"stop: {num_stop} strings, and {most} are allowed", "stop")
        if params.priority < self.limits.min_priority:
            raise RequestError(
                f"priority: {params.priority} is below {self.limits.min_priority}, the most urgent "
                "that this server lets clients have: send a larger one, or none; its operator can "
                "lower server.min_priority",
                "priority",
            )
        self.check_tpot(None if params.slo is None else params.slo.tpot_ms)
        resolve = self.processor.resolve
        # Bad words are tokenized, and schemas written, which may take long.
        is_long = params.bad_words or params.structured_outputs is not None
        return await self.in_thread(lambda: resolve(params)) if is_long else resolve(params)

    def check_tpot(self, asked: float | None) -> None:
        """Refuse a target so tight that other requests would pay for it: their prompts get the rows
        that it leaves.
        """
        least = self.min_tpot_ms
        if asked is None or (least is not None and asked >= least):
            return
        why = (
            "this server lets clients set no such target: leave it out"
            if least is None
            else f"this server allows no tighter target than {least:g}: ask for {least:g} or more"
        )
        raise RequestError(
            f"slo.tpot_ms = {asked:g}: {why}; its operator can set server.min_tpot_ms to the "
            "smallest that may be asked for",
            "slo.tpot_ms",
        )

    async def check_grammar(self, grammar: str, field: str, salt: str = "") -> None:
        """RequestError, which names `field`, for a grammar that cannot be compiled in time."""
        assert self.grammars is not None, "what resolves to a grammar has ends of text"
        await self.grammars.check(grammar, field, salt)

    async def with_grammar(self, sampling: Sampling, grammar: str) -> Sampling:
        """The same parameters for a text that obeys the grammar, which is of tools."""
        ends = self.processor.defaults
        check_ends(sampling.min_tokens, ends, "tools")
        if sampling.grammar:
            raise RequestError(
                "tools: the text has one form: leave out the calls that have to be made, or "
                "strict, or the form of the answer",
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
    """The process has ended while it was at work, with this status."""

    def __init__(self, status: int) -> None:
        self.status = status


class Processes:
    """What is asked waits for a free process, in the order of a fair queue.

    So it waits for no longer than a deadline and the start of a process, unless others of its owner
    that run to their deadlines are ahead of it.
    """

    def __init__(
        self, module: str, first: bytes, seconds: float, name: str, is_urgent: bool = False
    ) -> None:
        """`first` is a process's first frame; `name` tells in messages what it works on. Unless it
        is urgent, the first process starts after the server's own start, or once it is needed.
        """
        self.module, self.first, self.seconds, self.name = module, first, seconds, name
        self.asked = Counter[Hashable]()  # by owner: what is done or waits for it
        self.is_closed = False
        self.turns = FairTurns(NUM_PROCESSES)
        self.free: asyncio.Queue[Process] = asyncio.Queue()
        self.processes = [self.resume() for _ in range(NUM_PROCESSES if is_urgent else 0)]
        self.replaced: list[Process] = []  # those that have not ended yet
        for process in self.processes:
            self.free.put_nowait(process)
        self.timer = asyncio.get_running_loop().call_later(SOON, self.begin_first)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What is asked within the block is done or waits for it."""
        who = owner.get()
        self.asked[who] += 1
        try:
            yield
        finally:
            self.asked[who] -= 1
            if not self.asked[who]:
                del self.asked[who]

    async def ask(self, payload: bytes) -> Reply:
        """TimeoutError after the deadline, `ProcessEnded` if the process has ended."""
        async with self.turns.turn(is_large=len(payload) > LARGE):
            return await self.ask_now(payload)

    async def ask_now(self, payload: bytes) -> Reply:
        if not self.processes:
            self.begin_another()
        process = await self.free.get()
        try:
            with self.logging_failure():
                self.begin_another()  # for when this one has to be killed
            if process.has_ended:
                process = self.replace(process)
            return await process.ask(payload, self.seconds)
        except Overloaded:  # the process ended before it had started
            self.check_open()
            raise
        except TimeoutError:
            log.warning(
                "a %s ran for more than %g s: its process is killed and replaced",
                self.name,
                self.seconds,
            )
            raise
        finally:
            if process.is_at_work:
                process.close()
                with self.logging_failure():
                    process = self.replace(process)
            self.free.put_nowait(process)  # if it has ended, it is replaced when it is needed

    @contextmanager
    def logging_failure(self) -> Iterator[None]:
        """For a start of a process that nobody waits for."""
        try:
            yield
        except Overloaded as e:
            log.warning("%s", e)

    def begin_another(self) -> None:
        """Start one more, unless there are as many as there may be."""
        if len(self.processes) < NUM_PROCESSES:
            self.processes.append(self.resume())
            self.free.put_nowait(self.processes[-1])

    def resume(self) -> "Process":
        self.check_open()
        try:
            return Process(self.module, self.first)
        except OSError as e:
            raise Overloaded(f"no process can be started for the {self.name}: {e}") from e

    def check_open(self) -> None:
        if self.is_closed:
            raise Overloaded("the server is about to end: ask another one", retry_after=None)

    def replace(self, old: "Process") -> "Process":
        new = self.processes[self.processes.index(old)] = self.resume()
        self.replaced = [p for p in [*self.replaced, old] if not p.ended.is_set()]
        return new

    def begin_first(self) -> None:
        if not self.processes:
            with suppress(Overloaded):  # whoever needs it tries again
                self.begin_another()

    async def close(self) -> None:
        self.timer.cancel()
        self.is_closed = True
        for process in [*self.processes, *self.replaced]:
            process.close()
            await process.ended.wait()


class Process(asyncio.Protocol):
    """One child process, and the reply that it owes, if any."""

    def __init__(self, module: str, first: bytes) -> None:
        self.process, sock = start_process(module, first)
        self.loop = asyncio.get_running_loop()
        self.connecting = self.loop.create_task(self.connect(sock))
        self.transport: asyncio.WriteTransport | None = None
        self.frames = Frames()
        self.reply: asyncio.Future[Reply] | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.has_ended = False  # or has been killed

    async def connect(self, sock: socket.socket) -> None:
        await self.loop.create_connection(lambda: self, sock=sock)

    @property
    def is_at_work(self) -> bool:
        return self.reply is not None

    async def ask(self, payload: bytes, seconds: float) -> Reply:
        """The reply; TimeoutError after `seconds`, which exclude the process's start."""
        await self.started.wait()
        if self.has_ended or self.transport is None:
            raise Overloaded("the process for this has ended: ask again in a moment")
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
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop has a class of its own

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
        raise RequestError(f"{field}: no valid text: {e}", field) from e


class TemplateProcesses(Processes):
    def __init__(self, template: ChatTemplate, seconds: float) -> None:
        module = template_process.__name__
        super().__init__(module, encode(template), seconds, "chat template", is_urgent=True)

    async def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> str:
        """The chat as text; RequestError if the template refuses it or exceeds the deadline."""
        payload = encode((packed(messages, "messages"), packed(options, "chat_template_kwargs")))
        try:
            with self.counted():
                reply = await self.ask(payload)
        except TimeoutError as e:
            raise RequestError(
                f"messages: the chat template ran for more than {self.seconds:g} s: send fewer",
                "messages",
            ) from e
        except ProcessEnded as e:
            raise Overloaded("the process of the chat template ended: ask again") from e
        match reply:
            case Done(text):
                return text
            case Refused(message, param):
                raise RequestError(message, param or "messages")
        raise TypeError(reply)


class Check(msgspec.Struct):
    """One grammar's, and how many requests wait for it."""

    task: asyncio.Task[str]
    num_waiting: int = 0


class BodyProcesses(Processes):
    def __init__(self, max_items: int) -> None:
        """Bodies have at most so many items."""
        # The process imports the routes, and these import this module. 8 s are on the clock.
        module = "specserve.server.body_process"
        super().__init__(module, encode(max_items), 8.0, "request body")

    async def read(self, raw: bytes, kind: BodyKind[T]) -> T:
        """RequestError for a body that is refused, or takes too long."""
        try:
            with self.counted():
                reply = await self.ask(encode((kind.name, raw)))
        except TimeoutError as e:
            raise Overloaded("other processes need the CPU: ask again") from e
        except ProcessEnded as e:
            if e.status == -signal.SIGPROF:
                raise RequestError("the body takes too long to read: send fewer items") from e
            raise Overloaded("the process that reads the body ended: ask again") from e
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
        # That run or wait, by owner, grammar and salt.
        self.checks: dict[tuple[Hashable, str, str], Check] = {}

    async def check(self, grammar: str, field: str, salt: str) -> None:
        """RequestError for a grammar that cannot be compiled, or not in time; Overloaded if that
        could not be found out.
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
        """What is wrong with it; an owner's other requests for the same wait for the same check,
        which is given up when nobody waits for it.
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
        """What is wrong with it; a process that something else ended says nothing of it."""
        for _ in range(2):
            try:
                reply = await self.ask(grammar.encode())
                return reply.message if isinstance(reply, Refused) else ""
            except TimeoutError as e:
                raise Overloaded("other processes need the CPU: ask again") from e
            except ProcessEnded as e:
                if e.status == -signal.SIGPROF:
                    log.warning("a grammar took more than %g s: its process is replaced", SECONDS)
                    return f"it takes more than {SECONDS:g} s to compile: send a simpler one"
                # The memory or a stack has ended.
                if -e.status in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
                    return TOO_MUCH
        raise Overloaded("the process that compiles the grammar ended: ask again")
