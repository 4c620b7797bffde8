"""Bounded processes that do one thing each at a time, so that a slow one delays only its own."""

import asyncio
import logging
import socket
from typing import cast

import msgspec

from specserve.errors import Overloaded
from specserve.exchange.frames import Frames, pack
from specserve.exchange.spawn import start_process
from specserve.server.bounded_process import Done, FromProcess, Refused, Started

NUM_PROCESSES = 2  # while one runs to its deadline, the other does all else

log = logging.getLogger("specserve")
decode = msgspec.msgpack.Decoder(FromProcess).decode


class Ended(Exception):
    """The process has ended while it was at work."""


class Processes:
    """What is asked waits for a free process, in order.

    So it waits for no longer than a deadline and the start of a process, unless several that run to
    their deadlines are ahead of it.
    """

    def __init__(
        self, module: str, first: bytes, seconds: float, name: str, at_start: int = NUM_PROCESSES
    ) -> None:
        """`first` is a process's first frame; `name` tells in messages what it works on. Beyond
        `at_start`, processes start when all others are at work.
        """
        self.module, self.first, self.seconds, self.name = module, first, seconds, name
        self.num_asked = 0  # that are done or wait for it
        self.free: asyncio.Queue[Process] = asyncio.Queue()
        self.processes = [self.begun() for _ in range(at_start)]
        for process in self.processes:
            self.free.put_nowait(process)

    async def ask(self, payload: bytes) -> Done | Refused:
        """TimeoutError after the deadline, `Ended` if the process has ended."""
        self.num_asked += 1
        try:
            return await self.ask_next(payload)
        finally:
            self.num_asked -= 1

    async def ask_next(self, payload: bytes) -> Done | Refused:
        if self.free.empty() and len(self.processes) < NUM_PROCESSES:
            self.processes.append(self.begun())
            self.free.put_nowait(self.processes[-1])
        process = await self.free.get()
        try:
            if process.has_ended:
                process = self.replace(process)
            return await process.ask(payload, self.seconds)
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
            self.free.put_nowait(process)

    def begun(self) -> "Process":
        try:
            return Process(self.module, self.first)
        except OSError as e:
            raise Overloaded(f"no process can be started for the {self.name}: {e}") from e

    def replace(self, old: "Process") -> "Process":
        new = self.processes[self.processes.index(old)] = self.begun()
        return new

    async def close(self) -> None:
        for process in self.processes:
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
        self.reply: asyncio.Future[Done | Refused] | None = None
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.has_ended = False  # or has been killed

    async def connect(self, sock: socket.socket) -> None:
        await self.loop.create_connection(lambda: self, sock=sock)

    @property
    def is_at_work(self) -> bool:
        return self.reply is not None

    async def ask(self, payload: bytes, seconds: float) -> Done | Refused:
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
            self.reply.set_exception(Ended())
