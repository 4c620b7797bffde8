"""Renders chat templates in child processes, so that a slow one delays only its own chat."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from specserve.errors import Overloaded, RequestError
from specserve.exchange.frames import Frames, pack
from specserve.exchange.spawn import start_process
from specserve.models.chat_template import ChatOptions, ChatTemplate, Message
from specserve.server import template_process
from specserve.server.template_process import FromProcess, Refused, Rendered, Started

NUM_PROCESSES = 2  # while one chat runs to its deadline, the other process renders all others

log = logging.getLogger("specserve")
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(FromProcess).decode


def packed(value: Any, field: str) -> msgspec.Raw:
    try:
        return msgspec.Raw(encode(value))
    except (TypeError, ValueError, OverflowError) as e:
        raise RequestError(f"{field}: no valid text: {e}", field) from e


class TemplateProcesses:
    """Renders one chat at a time in each process; other chats wait, in order.

    So a chat waits for no longer than a deadline and the start of a process, unless several
    templates that run to their deadlines are ahead of it.
    """

    def __init__(self, template: ChatTemplate, seconds: float) -> None:
        self.template, self.seconds = template, seconds
        self.num_chats = 0  # that are rendered or wait for it
        self.free: asyncio.Queue[TemplateProcess] = asyncio.Queue()
        self.processes = [TemplateProcess(template) for _ in range(NUM_PROCESSES)]
        for process in self.processes:
            self.free.put_nowait(process)

    async def render(
        self,
        messages: Sequence[Message],
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> str:
        """The chat as text; RequestError if the template refuses it or exceeds the deadline."""
        payload = encode((packed(messages, "messages"), packed(options, "chat_template_kwargs")))
        self.num_chats += 1
        try:
            return await self.render_encoded(payload)
        finally:
            self.num_chats -= 1

    async def render_encoded(self, payload: bytes) -> str:
        process = await self.free.get()
        try:
            if process.has_ended:
                process = self.replace(process)
            reply = await process.ask(payload, self.seconds)
        except TimeoutError as e:
            log.warning(
                "a chat template ran for more than %g s: its process is killed and replaced",
                self.seconds,
            )
            raise RequestError(
                f"messages: the chat template ran for more than {self.seconds:g} s: send fewer",
                "messages",
            ) from e
        finally:
            if process.is_rendering:
                process.close()
            self.free.put_nowait(process)
        if isinstance(reply, Refused):
            raise RequestError(reply.message, reply.param or "messages")
        return reply.text

    def replace(self, old: "TemplateProcess") -> "TemplateProcess":
        try:
            new = TemplateProcess(self.template)
        except OSError as e:
            raise Overloaded(f"no process can be started for the chat template: {e}") from e
        self.processes[self.processes.index(old)] = new
        return new

    async def close(self) -> None:
        for process in self.processes:
            process.close()
            await process.ended.wait()


class TemplateProcess(asyncio.Protocol):
    """One child process, and the chat that it is rendering, if any."""

    def __init__(self, template: ChatTemplate) -> None:
        self.process, sock = start_process(template_process.__name__, encode(template))
        self.loop = asyncio.get_running_loop()
        self.connecting = self.loop.create_task(self.connect(sock))
        self.transport: asyncio.WriteTransport | None = None
        self.frames = Frames()
        self.reply: asyncio.Future[Rendered | Refused] | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.has_ended = False  # or has been killed

    async def connect(self, sock: socket.socket) -> None:
        await self.loop.create_connection(lambda: self, sock=sock)

    @property
    def is_rendering(self) -> bool:
        return self.reply is not None

    async def ask(self, messages: bytes, seconds: float) -> Rendered | Refused:
        """Render messages; TimeoutError after `seconds`, which exclude the process's start."""
        await self.started.wait()
        if self.has_ended or self.transport is None:
            raise Overloaded("the process for the chat template has ended: ask again in a moment")
        self.reply = self.loop.create_future()
        self.transport.write(pack(messages))
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
                case Started():
                    self.started.set()
                case reply if self.reply is not None and not self.reply.done():
                    if isinstance(reply, Refused) and reply.is_last:
                        self.close()
                    self.reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = True
        self.process.wait()  # its socket is closed, so it is ending: this does not block
        self.started.set()  # wakes `ask`, which then sees has_ended
        self.ended.set()
        if self.reply is not None and not self.reply.done():
            error = Overloaded("the process of the chat template ended: ask again")
            self.reply.set_exception(error)
