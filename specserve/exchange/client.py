"""The HTTP process's end of the engine's socket: sends requests, receives their outputs."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import SHUT_WR
from subprocess import TimeoutExpired
from typing import Any, Protocol, cast

import msgspec

from specserve.block_keys import Keys
from specserve.errors import ConfigError, EngineDied
from specserve.exchange.caller import Caller
from specserve.exchange.frames import Frames
from specserve.exchange.messages import Add, EngineCommands, Failed, Loading, Ready, Report, frame
from specserve.exchange.messages import decode_reply as decode
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.spawn import Spawned
from specserve.exchange.speculation_state import SpeculationState
from specserve.exchange.step_output import StepOutput

LAST_SECONDS = 0.5  # for the engine process to end by itself; it has to end its step first


class Listener(Protocol):
    """Receives the outputs of one request."""

    def push(self, output: StepOutput) -> None: ...

    def fail(self, message: str) -> None:
        """The engine process has ended: no more outputs will come."""
        ...


class EngineClient(asyncio.Protocol):
    """A client of the engine process for one event loop. `died` is set once the process ends."""

    def __init__(self, spawned: Spawned) -> None:
        self.process, self.socket = spawned
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self.loop.create_future()
        self.ready.add_done_callback(retrieve)
        self.died = asyncio.Event()
        self.listeners: dict[int, Listener] = {}
        self.on_loading: Callable[[str, int, int], None] = lambda name, done, total: None
        self.on_report: Callable[[Report], None] = lambda report: None
        self.heard_at = self.loop.time()
        self.next_id, self.frames = 0, Frames()
        self.adds: list[Add] = []
        self.finishes: list[int] = []
        self.resets: dict[asyncio.Future[None], int] = {}  # -> num_resets that completes it
        self.num_resets = 0  # sent to the engine
        self.is_reset_due = False
        self.asking: list[asyncio.Future[SpeculationState]] = []  # for the next state that comes
        self.is_state_due = False
        self.transport: asyncio.WriteTransport | None = None

    async def connect(self) -> None:
        await self.loop.create_connection(lambda: self, sock=self.socket)

    def add(
        self,
        token_ids: Sequence[int],
        samplings: Sequence[Sampling],
        listeners: Sequence[Listener],
        keys: Keys | None = None,
        caller: Caller | None = None,
    ) -> list[int]:
        """Queue a prompt's choices, which differ only in their seeds, and return their ids.

        No listener is called before this returns.
        """
        assert not self.died.is_set(), "the engine process has ended: no request can be added"
        if not self.listeners:
            self.heard_at = self.loop.time()  # an idle engine sends nothing
        id = self.next_id
        self.next_id += len(samplings)
        ids = list(range(id, self.next_id))
        self.listeners.update(zip(ids, listeners, strict=True))
        self.flush_soon()
        # Stop strings are looked for in this process.
        shared = msgspec.structs.replace(samplings[0], stop=())
        seeds = [s.seed for s in samplings]
        self.adds.append(Add(id, list(token_ids), shared, seeds, keys or {}, caller))
        return ids

    def finish(self, id: int) -> None:
        """Forget a request, and stop it if it still runs."""
        if self.listeners.pop(id, None) is not None and not self.died.is_set():
            self.flush_soon()
            self.finishes.append(id)

    async def reset_cache(self) -> None:
        """Empty the prefix cache; EngineDied if the engine process ends before it has."""
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        self.flush_soon()
        self.is_reset_due = True
        future = self.loop.create_future()
        self.resets[future] = self.num_resets + 1
        await future

    async def speculation(self) -> SpeculationState:
        """What the engine's speculation goes by; EngineDied if the process ends before it tells."""
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        self.flush_soon()
        self.is_state_due = True
        future: asyncio.Future[SpeculationState] = self.loop.create_future()
        self.asking.append(future)
        return await future

    def flush_soon(self) -> None:
        """Send everything that is queued in one turn of the event loop as one message."""
        if not (self.adds or self.finishes or self.is_reset_due or self.is_state_due):
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        due = self.is_reset_due, self.is_state_due
        commands = EngineCommands(self.adds, self.finishes, *due)
        self.num_resets += self.is_reset_due
        self.adds, self.finishes = [], []
        self.is_reset_due = self.is_state_due = False
        if self.transport is not None and not self.died.is_set():
            self.transport.write(frame(commands))

    async def leave(self) -> None:
        """`close`, without blocking the event loop while the engine process ends by itself."""
        if self.ready.done() and not self.died.is_set():
            with suppress(OSError, TimeoutError):
                self.socket.shutdown(SHUT_WR)
                async with asyncio.timeout(LAST_SECONDS):
                    await self.died.wait()
        self.kill()

    def close(self) -> None:
        """End the engine process. If it has been ready, it has a moment to keep what steps cost."""
        if self.ready.done() and not self.died.is_set():
            with suppress(OSError, TimeoutExpired):
                self.socket.shutdown(SHUT_WR)
                self.process.wait(LAST_SECONDS)
        self.kill()

    def kill(self) -> None:
        if self.transport is not None and not self.loop.is_closed():
            self.transport.close()
        self.process.kill()
        self.process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop has a class of its own

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        for payload in self.frames.feed(data):
            match decode(payload):
                case Report() as report:
                    self.deliver(report)
                case SpeculationState() as state:
                    self.tell(state)
                case Loading(name, done, total):
                    self.on_loading(name, done, total)
                case Ready() as ready:
                    if not self.ready.done():  # else the server ends: its wait was cancelled
                        self.ready.set_result(ready)
                case Failed(message):
                    if not self.ready.done():
                        self.ready.set_exception(ConfigError(message))

    def deliver(self, report: Report) -> None:
        for output in report.outputs:
            listener = self.listeners.get(output.id)
            if output.finish_reason is not None:  # the engine has forgotten it
                self.listeners.pop(output.id, None)
            if listener is not None:  # else it was finished while the step ran
                listener.push(output)
        for future, count in [*self.resets.items()]:
            if report.stats.num_resets >= count:
                del self.resets[future]
                if not future.done():  # else the caller was cancelled
                    future.set_result(None)
        self.on_report(report)

    def tell(self, state: SpeculationState) -> None:
        asking, self.asking = self.asking, []
        for future in asking:
            if not future.done():  # else the caller was cancelled
                future.set_result(state)

    def connection_lost(self, exc: Exception | None) -> None:
        self.died.set()
        message = "the engine process has ended: the answer cannot be finished"
        if not self.ready.done():
            self.ready.set_exception(EngineDied("the engine process ended while it was loading"))
        waiting: list[asyncio.Future[Any]] = [*self.resets, *self.asking]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDied(message))
        listeners, self.listeners = self.listeners, {}
        for listener in listeners.values():
            listener.fail(message)


def retrieve(future: asyncio.Future[Ready]) -> None:
    """Take note of its exception: asyncio warns of one that nobody has asked for."""
    if not future.cancelled():
        future.exception()
