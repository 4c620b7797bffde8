"""Bodies, chat templates and grammars, in bounded processes that do one thing each at a time: so a
slow one delays only its own.
"""

import asyncio
import logging
import signal
import socket
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import msgspec

from specserve.errors import Overloaded, RequestError
from specserve.exchange.fair_queue import FairTurns, current_tenant, owner
from specserve.exchange.messages import Frames, pack
from specserve.exchange.spawn import start_process
from specserve.server import grammar_process, template_process
from specserve.server.body import LARGE, BodyKind
from specserve.server.bounded_process import Data, Done, FromProcess, ProcessStarted, Refused, Reply
from specserve.server.grammar_process import SECONDS, TOO_MUCH, GrammarSetup
from specserve.text.chat_template import ChatOptions, ChatTemplate
from specserve.text.grammars.compiled import Verdicts
from specserve.text.template_messages import Message

T = TypeVar("T")
NUM_PROCESSES = 2  # while one runs to its deadline, the other does all else
SOON = 1.0  # seconds from the server's start to that of a first process that is not urgent
PATIENCE = 4 * SECONDS  # for a grammar, on the clock: other processes may need the CPU, too

log = logging.getLogger("specserve")
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(FromProcess).decode


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
        self.processes = [self.begun() for _ in range(NUM_PROCESSES if is_urgent else 0)]
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
            self.processes.append(self.begun())
            self.free.put_nowait(self.processes[-1])

    def begun(self) -> "Process":
        self.check_open()
        try:
            return Process(self.module, self.first)
        except OSError as e:
            raise Overloaded(f"no process can be started for the {self.name}: {e}") from e

    def check_open(self) -> None:
        if self.is_closed:
            raise Overloaded("the server is about to end: ask another one", retry_after=None)

    def replace(self, old: "Process") -> "Process":
        new = self.processes[self.processes.index(old)] = self.begun()
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
