"""The HTTP process's end of the engine's socket: sends requests, receives their outputs."""

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from signal import SIGKILL
from socket import SHUT_WR
from subprocess import TimeoutExpired
from typing import Any, Protocol, cast

import msgspec

from specserve.config import Config
from specserve.errors import (
    ConfigError,
    EndsEngines,
    EngineDied,
    Overloaded,
    SpecserveError,
)
from specserve.exchange.messages import (
    AdapterLoaded,
    AdapterRef,
    Add,
    Caller,
    Changed,
    EngineCommands,
    Failed,
    Frames,
    Loading,
    Ready,
    Report,
    ResumeState,
    SpeculationState,
    StepOutput,
    frame,
    packed,
)
from specserve.exchange.messages import decode_reply as decode
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.spawn import Forked, Spawned
from specserve.memory.blocks import Keys

log = logging.getLogger("specserve")

LAST_SECONDS = 0.5  # for the engine process to end by itself; it has to end its step first
PAUSES = (0.0, 0.5, 1.0, 2.0)  # seconds before the first, second, ... start after deaths in a row
RETRIES = (1.0, 2.0, 4.0, 8.0)  # seconds before further tries where none can be started
END_SECONDS = 10.0  # for a killed process to be gone; a device may hold it up
MOST_DEATHS = len(PAUSES) + 1  # of engine processes within
DEATHS_SECONDS = 60.0
GUILTY = 3  # deaths of engines, with few steps in between, that end a request
FEW = 8  # steps: the one that is fatal may come some steps after a request was taken up
ENDED = "the engine process has ended: the answer cannot be finished"
REPLACED = "the engine process has ended, and another one takes its place: ask again in a moment"
ENDS_ENGINES = (
    "the engine process has ended each time that it went on with this request, and goes on without "
    "it"
)


class Listener(Protocol):
    """Receives the outputs of one request."""

    def push(self, output: StepOutput) -> None: ...

    def fail(self, error: SpecserveError) -> None:
        """No more outputs will come."""
        ...


class Live:
    """A request that has not ended, with all that another engine process needs to go on with it."""

    __slots__ = "add", "index", "listener", "num_deaths", "num_scored", "num_steps", "output"

    def __init__(self, add: Add, index: int, listener: Listener) -> None:
        self.add, self.index, self.listener = add, index, listener
        self.output, self.num_scored = array("i"), 0
        self.num_deaths = 0  # of engine processes that had it, with few steps in between
        self.num_steps = 0  # that gave it tokens, in this engine process

    def push(self, output: StepOutput) -> None:
        self.output.extend(output.tokens)
        self.num_scored += len(output.prompt_logprobs)
        self.num_steps += len(output.tokens) > 0
        if self.num_steps >= FEW:
            self.num_deaths = 0
        self.listener.push(output)

    def resumed(self) -> Add:
        """Its choice alone: the first choice of a prompt tells the prompt's logprobs."""
        add, self.num_steps = self.add, 0
        told = self.num_scored if self.index == 0 else len(add.token_ids) - 1
        resume = ResumeState(self.output.tolist(), told)
        seeds = [add.seeds[self.index]]
        return msgspec.structs.replace(add, id=self.number, seeds=seeds, resume=resume)

    @property
    def words(self) -> str:
        """For the log: counts and numbers, no text."""
        asked = msgspec.structs.asdict(self.add.sampling)
        told = {name: value for name, value in asked.items() if isinstance(value, int | float)}
        return f"{len(self.add.token_ids)} prompt tokens, {len(self.output)} completed, {told}"

    @property
    def request_id(self) -> str:
        return "" if self.add.caller is None else self.add.caller.request_id

    @property
    def number(self) -> int:
        """Its id."""
        return self.add.id + self.index


class EngineClient(asyncio.Protocol):
    """A client of the engine process for one event loop.

    With `respawn` another process takes the place of one that dies, and goes on with all requests:
    their listeners notice a pause. Without it, or after `MOST_DEATHS` within a minute, or where no
    other process can be had, `died` is set. A request of which engines die each time is ended
    alone, with an error: see `resume`.
    """

    def __init__(self, spawned: Spawned, respawn: Callable[[], Spawned] | None = None) -> None:
        self.process, self.socket = spawned
        self.respawn = respawn
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self.loop.create_future()
        self.ready.add_done_callback(retrieve)
        self.died = asyncio.Event()
        self.live: dict[int, Live] = {}
        self.held: deque[Live] = deque()  # after a death: those that wait for the suspects
        self.is_up = True  # commands may be sent
        self.deaths: deque[float] = deque(maxlen=MOST_DEATHS)  # when
        self.reviving: asyncio.Task[None] | None = None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_loading: Callable[[str, int, int], None] = lambda name, done, total: None
        self.on_report: Callable[[Report], None] = lambda report: None
        self.on_change: Callable[[Config | None, Ready], None] = lambda config, ready: None
        # What the next process is to be; of both, None is the config that the first one had.
        self.begin_with: Callable[[Config | None, tuple[str, ...]], None] = lambda *_: None
        self.owed_since: float | None = None  # no message has come, and one has to
        self.next_id, self.frames = 0, Frames()
        self.adds: list[Add] = []
        self.finishes: list[int] = []
        self.resets: dict[asyncio.Future[None], int] = {}  # -> num_resets that completes it
        self.num_resets = 0  # sent to the engine
        self.is_reset_due = False
        self.asking: dict[asyncio.Future[SpeculationState], int] = {}  # -> the tenant
        self.is_state_due = False
        self.loads: list[str] = []  # folders of adapters
        self.forgets: list[str] = []  # digests of adapters
        self.loading: dict[asyncio.Future[AdapterRef], str] = {}  # -> the folder
        self.changes = asyncio.Lock()  # one at a time
        self.change_due: Config | None = None
        self.changing: tuple[Config, asyncio.Future[Ready]] | None = None
        self.config: Config | None = None  # that the engine was changed to
        self.known_sources: tuple[str, ...] = ()  # see `Begin`; none before a change
        self.transport: asyncio.WriteTransport | None = None
        self.tried: Live | None = None  # the suspect that runs beside those that are cleared

    async def connect(self) -> None:
        await self.loop.create_connection(lambda: self, sock=self.socket)

    def add(
        self,
        token_ids: Sequence[int],
        samplings: Sequence[Sampling],
        listeners: Sequence[Listener],
        keys: Keys | None = None,
        caller: Caller | None = None,
        adapter: AdapterRef | None = None,
    ) -> list[int]:
        """Queue a prompt's choices, which differ only in their seeds, and return their ids.

        No listener is called before this returns.
        """
        assert not self.died.is_set(), "the engine process has ended: no request can be added"
        id = self.next_id
        self.next_id += len(samplings)
        ids = list(range(id, self.next_id))
        # Stop strings are looked for in this process.
        first = samplings[0]
        shared = msgspec.structs.replace(first, stop=()) if first.stop else first
        seeds = [s.seed for s in samplings]
        add = Add(id, packed(token_ids), shared, seeds, keys or {}, caller, adapter=adapter)
        asked = [Live(add, index, each) for index, each in enumerate(listeners)]
        self.live.update(zip(ids, asked, strict=True))
        if self.is_up and not self.held:
            self.flush_soon()
            self.adds.append(add)
        else:
            self.held.extend(asked)
        return ids

    def finish(self, id: int) -> None:
        """Forget a request, and stop it if it still runs."""
        if self.live.pop(id, None) is not None and self.is_up:
            self.flush_soon()
            self.finishes.append(id)
            self.release_held()

    async def reset_cache(self) -> None:
        """Empty the prefix cache; EngineDied if the engine process ends before it has. That of
        another process that takes its place is empty.
        """
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        if not self.is_up:
            return
        self.flush_soon()
        self.is_reset_due = True
        future = self.loop.create_future()
        self.resets[future] = self.num_resets + 1
        await future

    async def speculation(self, tenant: int = 0) -> SpeculationState:
        """What the engine's speculation goes by for a tenant; EngineDied if the process ends before
        it tells.
        """
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        future: asyncio.Future[SpeculationState] = self.loop.create_future()
        self.asking[future] = tenant
        self.ask_state()
        return await future

    def ask_state(self) -> None:
        if self.asking and self.is_up:
            self.flush_soon()
            self.is_state_due = True

    async def load_adapter(self, folder: str) -> AdapterRef:
        """Read an adapter; ConfigError if it cannot be used, and Overloaded if the engine process
        ends before that is known.
        """
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        if not self.is_up:
            raise Overloaded(REPLACED)
        self.flush_soon()
        self.loads.append(folder)
        future: asyncio.Future[AdapterRef] = self.loop.create_future()
        self.loading[future] = folder
        return await future

    def forget_adapter(self, digest: str) -> None:
        """Say that no request will have it. Another engine process has not heard of it anyway."""
        if self.is_up:
            self.flush_soon()
            self.forgets.append(digest)

    def adapter_loaded(self, told: AdapterLoaded) -> None:
        future = next(asked for asked, folder in self.loading.items() if folder == told.folder)
        del self.loading[future]
        if future.done():  # the caller was cancelled
            return
        if told.adapter is None:
            future.set_exception(ConfigError(told.refusal))
        else:
            future.set_result(told.adapter)

    async def change(self, find: Callable[[], Awaitable[Config]]) -> Ready:
        """Have the engine guess by the config that is found once the change before is done: what it
        is then. ConfigError if it cannot, and Overloaded if the process ends meanwhile: then it
        guesses as before.
        """
        changing = asyncio.create_task(self.change_alone(find))
        return await asyncio.shield(changing)  # the engine finishes what it was told

    async def change_alone(self, find: Callable[[], Awaitable[Config]]) -> Ready:
        async with self.changes:
            config = await find()
            if self.died.is_set():
                raise EngineDied("the engine process has ended")
            if not self.is_up:
                raise Overloaded(REPLACED)
            self.flush_soon()
            future: asyncio.Future[Ready] = self.loop.create_future()
            self.change_due, self.changing = config, (config, future)
            return await future

    def changed(self, told: Changed) -> None:
        assert self.changing is not None, "nothing was to be changed"
        (config, future), self.changing = self.changing, None
        if told.ready is None:
            future.set_exception(ConfigError(told.refusal))
            return
        self.config, self.known_sources = config, told.ready.known_sources
        self.begin_with(config, self.known_sources)
        self.on_change(config, told.ready)
        future.set_result(told.ready)

    def flush_soon(self) -> None:
        """Send everything that is queued in one turn of the event loop as one message."""
        lists = self.adds, self.finishes, self.loads, self.forgets
        if not any((*lists, self.is_reset_due, self.is_state_due, self.change_due)):
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        if not self.is_up:
            return  # `resume` tells another process
        if self.owed_since is None:  # an engine answers whatever it is told
            self.owed_since = self.loop.time()
        tenants = sorted({*self.asking.values()}) if self.is_state_due else []
        due = self.is_reset_due, tenants, self.change_due
        commands = EngineCommands(self.adds, self.finishes, *due, self.loads, self.forgets)
        self.num_resets += self.is_reset_due
        self.clear_queue()
        if self.transport is not None and not self.died.is_set():
            self.transport.write(frame(commands))

    def clear_queue(self) -> None:
        """Of what the next message would have told."""
        self.adds, self.finishes, self.loads, self.forgets = [], [], [], []
        self.is_reset_due, self.is_state_due, self.change_due = False, False, None

    async def leave(self) -> None:
        """`close`, without blocking the event loop while the engine process ends by itself."""
        self.respawn = None
        if self.ready.done() and not self.died.is_set():
            with suppress(OSError, TimeoutError):
                self.socket.shutdown(SHUT_WR)
                async with asyncio.timeout(LAST_SECONDS):
                    await self.died.wait()
        self.kill()

    def close(self) -> None:
        """End the engine process. If it has been ready, it has a moment to keep what steps cost."""
        self.respawn = None
        if self.ready.done() and not self.died.is_set():
            with suppress(OSError, TimeoutExpired):
                self.socket.shutdown(SHUT_WR)
                self.process.wait(LAST_SECONDS)
        self.kill()

    def kill(self) -> None:
        self.respawn = None
        if self.reviving is not None:
            self.reviving.cancel()
            if not (self.is_up or self.died.is_set() or self.loop.is_closed()):
                self.die(ENDED)  # nobody else does, as its connection is lost already
        if self.transport is not None and not self.loop.is_closed():
            self.transport.close()
        self.process.end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop has a class of its own

    def data_received(self, data: bytes) -> None:
        for payload in self.frames.feed(data):
            match decode(payload):
                case Report() as report:
                    self.deliver(report)
                case SpeculationState() as state:
                    self.tell(state)
                case Changed() as told:
                    self.changed(told)
                case AdapterLoaded() as told:
                    self.adapter_loaded(told)
                case Loading(name, done, total):
                    self.on_loading(name, done, total)
                case Ready() as ready:
                    if not self.ready.done():
                        self.ready.set_result(ready)
                    elif not self.ready.cancelled():  # else the server ends
                        self.on_change(self.config, ready)
                        self.resume(ready)
                case Failed(message):
                    if not self.ready.done():
                        self.ready.set_exception(ConfigError(message))
                    elif self.config is not None:
                        log.error("%s: the next engine process guesses as the first", message)
                        self.config = None
                        self.begin_with(None, self.known_sources)
                    elif not self.ready.cancelled():
                        self.die(f"{ENDED}, and no other one can be started: {message}")
        self.owed_since = self.loop.time() if self.live else None

    def deliver(self, report: Report) -> None:
        for output in report.outputs:
            live = self.live.get(output.id)
            if output.finish_reason is not None:  # the engine has forgotten it
                self.live.pop(output.id, None)
            if live is not None:  # else it was finished while the step ran
                live.push(output)
        self.release_held()
        for future, count in [*self.resets.items()]:
            if report.stats.num_resets >= count:
                del self.resets[future]
                if not future.done():  # else the caller was cancelled
                    future.set_result(None)
        self.on_report(report)

    def tell(self, state: SpeculationState) -> None:
        for future in [asked for asked, tenant in self.asking.items() if tenant == state.tenant]:
            del self.asking[future]
            if not future.done():  # else the caller was cancelled
                future.set_result(state)

    def connection_lost(self, exc: Exception | None) -> None:
        had_requests, self.is_up, self.owed_since = self.is_up, False, None
        self.deaths.append(self.loop.time())
        self.clear_queue()
        if self.changing is not None:
            (_, future), self.changing = self.changing, None
            future.set_exception(Overloaded(REPLACED))
        loading, self.loading = self.loading, {}
        for asked in loading:
            if not asked.done():
                asked.set_exception(Overloaded(REPLACED))
        if not self.ready.done():
            self.ready.set_exception(EngineDied("the engine process ended while it was loading"))
        is_known = not self.ready.cancelled() and self.ready.exception() is None
        if self.respawn is None or not is_known or self.is_hopeless:
            self.die(ENDED)
        else:
            self.reviving = self.loop.create_task(self.revive(self.respawn, had_requests))

    @property
    def is_hopeless(self) -> bool:
        """Whether too many processes have died of late."""
        first, last = self.deaths[0], self.deaths[-1]
        return len(self.deaths) == MOST_DEATHS and last - first < DEATHS_SECONDS

    def die(self, message: str) -> None:
        """Give up: nobody gets anything more."""
        self.died.set()
        self.respawn = None
        waiting: list[asyncio.Future[Any]] = [*self.resets, *self.asking]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDied(message))
        live, self.live = self.live, {}
        for each in live.values():
            each.listener.fail(EngineDied(message))

    async def revive(self, respawn: Callable[[], Spawned], had_requests: bool) -> None:
        """Start another engine process in the place of one that has died, maybe while it loaded."""
        code = await asyncio.to_thread(ended, self.process)
        if had_requests:
            self.blame()
        recent = sum(self.loop.time() - at < DEATHS_SECONDS for at in self.deaths)
        pause = PAUSES[min(recent, len(PAUSES)) - 1]
        log.error(
            "the engine process has ended (%s); in %g s another one starts, and goes on with "
            "%d requests",
            f"signal {-code}" if code < 0 else f"exit code {code}",
            pause,
            len(self.live),
        )
        for future in self.resets:  # its cache has gone with it
            if not future.done():
                future.set_result(None)
        self.resets, self.num_resets = {}, 0
        for seconds in (pause, *RETRIES):
            await asyncio.sleep(seconds)
            try:  # in this thread: a process ends with the thread that starts it
                self.process, self.socket = respawn()
                self.frames = Frames()
                await self.connect()
            except OSError as e:  # there may be too many open files, for a moment
                log.error("no other engine process can be started: %s", e)
                reason = str(e)
            else:
                return
        self.die(f"{ENDED}, and no other one can be started: {reason}")

    def blame(self) -> None:
        """Note a death with each request that the engine had, and end those that cause them."""
        held = {id(each) for each in self.held}
        for number, live in list(self.live.items()):
            live.num_deaths += id(live) not in held
            if live.num_deaths >= GUILTY:
                log.error("%s: %s", ENDS_ENGINES, live.words, extra={"request_id": live.request_id})
                del self.live[number]
                live.listener.fail(EndsEngines(ENDS_ENGINES))

    def resume(self, ready: Ready) -> None:
        """Hand all requests to another engine process.

        Two deaths with few steps in between make suspects of the requests that both engines had.
        They come one at a time, each when the one before has had a few steps, and all others after
        them: so if an engine dies a third time, the one that came last is to blame.
        """
        if same_text(ready) != same_text(self.ready.result()):
            self.process.kill()
            self.respawn = None
            return  # `connection_lost` tells everybody
        self.is_up, self.tried = True, None
        self.on_restart()
        waiting = [self.live[number] for number in sorted(self.live)]
        self.held = deque(sorted(waiting, key=lambda each: each.num_deaths < GUILTY - 1))
        self.release_held()
        self.ask_state()

    def release_held(self) -> None:
        """Send held requests, up to and with the next suspect, if the last one is cleared."""
        tried = self.tried
        if tried is not None and tried.num_deaths and tried.number in self.live:
            return
        self.tried = None
        while self.held and self.tried is None:
            live = self.held.popleft()
            if live.number in self.live:
                self.flush_soon()
                self.adds.append(live.resumed())
                if live.num_deaths >= GUILTY - 1:
                    self.tried = live

    async def watch(self, seconds: float) -> None:
        """End an engine process that has requests and has ended no step for so long."""
        while not self.died.is_set():
            await asyncio.sleep(min(1.0, seconds / 4))
            if self.is_up and self.silence > seconds:
                words = "the engine process has ended no step for %.0f s: it is ended"
                log.error(words, self.silence)
                self.process.kill()

    @property
    def silence(self) -> float:
        """Seconds for which the engine process has owed a message."""
        return 0.0 if self.owed_since is None else self.loop.time() - self.owed_since


def ended(process: Forked) -> int:
    """Kill an engine process, and with it the fork server if that does not tell of the end."""
    process.kill()
    try:
        return process.wait(END_SECONDS)
    except TimeoutExpired:
        process.end()
        return -SIGKILL


def same_text(ready: Ready) -> Ready:
    """What has to be the same of two engines for them to give the same texts."""
    target = {model: of for model, of in ready.kv_formats.items() if model != "draft"}
    guesses = {"drafter": "", "sources": (), "known_sources": (), "draft_weights": None}
    guesses["draft_head"] = None
    return msgspec.structs.replace(ready, phases={}, num_blocks=0, kv_formats=target, **guesses)


def retrieve(future: asyncio.Future[Ready]) -> None:
    """Take note of its exception: asyncio warns of one that nobody has asked for."""
    if not future.cancelled():
        future.exception()
