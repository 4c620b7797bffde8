"""The HTTP process's end of the engine's socket: sends requests and receives their outputs."""

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from signal import SIGKILL
from socket import SHUT_WR
from subprocess import TimeoutExpired
from typing import Any, Literal, Protocol, cast

import msgspec

from specserve.config import Config
from specserve.errors import (
    ConfigError,
    EndsEngines,
    EngineDied,
    Overloaded,
    Sleeping,
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
    SessionReport,
    SessionTask,
    SpeculationState,
    StepOutput,
    frame,
    packed,
)
from specserve.exchange.messages import decode_reply as decode
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.sleep import AWAKE, SleepState
from specserve.exchange.spawn import Forked, Spawned
from specserve.memory.blocks import Keys

log = logging.getLogger("specserve")

LAST_SECONDS = 0.5  # seconds for the engine process to exit by itself, after its current step
SAVE_SECONDS = 60.0  # the same, if it writes KV blocks to disk
PAUSES = (0.0, 0.5, 1.0, 2.0)  # seconds before the 1st, 2nd, ... restart after recent deaths
RETRIES = (1.0, 2.0, 4.0, 8.0)  # seconds before each further try if no process can be started
END_SECONDS = 10.0  # seconds for a killed process to exit; a device may delay it
MOST_DEATHS = len(PAUSES) + 1  # engine deaths within DEATHS_SECONDS after which restarts stop
DEATHS_SECONDS = 60.0
GUILTY = 3  # engine deaths, with fewer than FEW steps in between, after which a request fails
FEW = 8  # steps; a fatal step may come some steps after a request was added
ENDED = "the engine process has ended. The response cannot be completed"
REPLACED = "the engine process has ended and is being restarted. Retry in a moment"
ENDS_ENGINES = (
    "the engine process has ended each time it ran this request. The server drops the request and "
    "continues without it"
)


class Listener(Protocol):
    """Receives the outputs of one request."""

    def push(self, output: StepOutput) -> None: ...

    def fail(self, error: SpecserveError) -> None:
        """End the request with an error; no more outputs follow."""
        ...


class Live:
    """A request that has not ended, with everything a new engine process needs to resume it."""

    __slots__ = "add", "index", "listener", "num_deaths", "num_scored", "num_steps", "output"

    def __init__(self, add: Add, index: int, listener: Listener) -> None:
        self.add, self.index, self.listener = add, index, listener
        self.output, self.num_scored = array("i"), 0
        self.num_deaths = 0  # deaths of engine processes that ran it, with few steps in between
        self.num_steps = 0  # steps of this engine process that gave it tokens

    def push(self, output: StepOutput) -> None:
        self.output.extend(output.tokens)
        self.num_scored += len(output.prompt_logprobs)
        self.num_steps += len(output.tokens) > 0
        if self.num_steps >= FEW:
            self.num_deaths = 0
        self.listener.push(output)

    def resumed(self) -> Add | None:
        """The command that resumes this choice only. Choice 0 reports the prompt's logprobs. With
        beam search, which has no output before its end, choice 0 sends all of it again.
        """
        add, self.num_steps = self.add, 0
        if add.sampling.beam_search is not None:
            return add if self.index == 0 else None
        num_scored = self.num_scored if self.index == 0 else len(add.token_ids) - 1
        resume = ResumeState(self.output.tolist(), num_scored)
        seeds = [add.seeds[self.index]]
        return msgspec.structs.replace(add, id=self.number, seeds=seeds, resume=resume)

    @property
    def words(self) -> str:
        """A description for the log: token counts and numeric parameters, no text."""
        sampling = msgspec.structs.asdict(self.add.sampling)
        numbers = {k: value for k, value in sampling.items() if isinstance(value, int | float)}
        return f"{len(self.add.token_ids)} prompt tokens, {len(self.output)} completed, {numbers}"

    @property
    def request_id(self) -> str:
        return "" if self.add.caller is None else self.add.caller.request_id

    @property
    def number(self) -> int:
        """The choice's id in the engine."""
        return self.add.id + self.index


class EngineClient(asyncio.Protocol):
    """A client of the engine process for one event loop.

    `respawn` starts a new process after one dies. The new process resumes all requests; their
    listeners only see a pause. `died` is set if there is no `respawn`, after `MOST_DEATHS` within
    a minute, or if no process can be started. A request that engines repeatedly die of fails, and
    the others continue: see `resume`.
    """

    def __init__(
        self,
        spawned: Spawned,
        respawn: Callable[[], Spawned] | None = None,
        saves_blocks: bool = False,
    ) -> None:
        """`saves_blocks`: the engine process writes KV blocks to disk before it exits."""
        self.process, self.socket = spawned
        self.last_seconds = SAVE_SECONDS if saves_blocks else LAST_SECONDS
        self.respawn = respawn
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self.loop.create_future()
        self.ready.add_done_callback(retrieve)
        self.died = asyncio.Event()
        self.live: dict[int, Live] = {}
        self.held: deque[Live] = deque()  # after a death: requests that wait for the suspects
        self.is_up = True  # commands may be sent
        self.deaths: deque[float] = deque(maxlen=MOST_DEATHS)  # times of the last deaths
        # The last start of another process, which may still load; None: it exited in its sleep
        self.reviving: asyncio.Task[None] | None = None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_loading: Callable[[str, int, int], None] = lambda name, done, total: None
        self.on_report: Callable[[Report], None] = lambda report: None
        self.on_change: Callable[[Config | None, Ready], None] = lambda config, ready: None
        # Sets the config of the next process. None, also in `on_change`, is the first config.
        self.begin_with: Callable[[Config | None, tuple[str, ...]], None] = lambda *_: None
        self.owed_since: float | None = None  # since when a message of the engine is due
        self.next_id, self.num_tasks, self.frames = 0, 0, Frames()
        self.adds: list[Add] = []
        self.finishes: list[int] = []
        self.resets: dict[asyncio.Future[None], int] = {}  # -> num_resets that completes each
        self.num_resets = 0  # resets sent to the engine
        self.is_reset_due = False
        self.asking: dict[asyncio.Future[SpeculationState], int] = {}  # -> the tenant
        self.is_state_due = False
        self.loads: list[str] = []  # folders of adapters
        self.forgets: list[str] = []  # digests of adapters
        self.loading: dict[asyncio.Future[AdapterRef], str] = {}  # -> the folder
        self.tasks: list[SessionTask] = []  # not yet sent
        self.reporting: dict[int, asyncio.Future[SessionReport]] = {}  # by task
        self.changes = asyncio.Lock()  # one at a time
        self.change_due: Config | None = None
        self.changing: tuple[Config, asyncio.Future[Ready]] | None = None
        self.config: Config | None = None  # of the last change
        self.known_sources: tuple[str, ...] = ()  # see `EngineStart`; empty before a change
        self.sleep_state, self.is_falling_asleep = AWAKE, False  # set by `SleepControl`
        self.sleep_due, self.wake_due = 0, list[str]()  # a level, and tags
        self.sleeping: asyncio.Future[SleepState] | None = None  # the reply
        self.transport: asyncio.WriteTransport | None = None
        self.tried: Live | None = None  # the suspect that runs with the cleared requests

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
        # The engine gets no stop strings: this process searches for them.
        first = samplings[0]
        shared = msgspec.structs.replace(first, stop=()) if first.stop else first
        seeds = [s.seed for s in samplings]
        add = Add(id, packed(token_ids), shared, seeds, keys or {}, caller, adapter=adapter)
        choices = [Live(add, index, each) for index, each in enumerate(listeners)]
        self.live.update(zip(ids, choices, strict=True))
        if self.is_up and not self.held:
            self.flush_soon()
            self.adds.append(add)
        else:
            self.held.extend(choices)
        return ids

    def finish(self, id: int) -> None:
        """Remove a request, and stop it if it still runs."""
        if self.live.pop(id, None) is not None and self.is_up:
            self.flush_soon()
            self.finishes.append(id)
            self.release_held()

    async def reset_cache(self) -> None:
        """Empty the prefix cache. A new engine process starts with an empty one.

        EngineDied if the engine process has ended and is not restarted.
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
        """Return the state of speculation for a tenant. A new engine process is asked again.

        EngineDied if the engine process has ended and is not restarted.
        """
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        if not self.is_up:
            self.check_awake()  # the next process starts at wake-up
        future: asyncio.Future[SpeculationState] = self.loop.create_future()
        self.asking[future] = tenant
        self.ask_state()
        return await future

    def ask_state(self) -> None:
        if self.asking and self.is_up:
            self.flush_soon()
            self.is_state_due = True

    async def ask_sleep(self, level: int = 0, wake_up: Sequence[str] = ()) -> SleepState:
        """Send a level to sleep at, or tags to wake up; return the engine's reply. Overloaded if
        the process ends first.
        """
        self.flush_soon()
        self.sleep_due, self.wake_due = level, [*wake_up]
        self.sleeping = self.loop.create_future()
        try:
            return await self.sleeping
        finally:
            self.sleeping = None

    def check_awake(self) -> None:
        """Raise Sleeping if the engine sleeps, or is about to."""
        if self.sleep_state.level > 0 or self.is_falling_asleep:
            raise Sleeping

    def abort(self, error: SpecserveError) -> None:
        """End all requests with an error."""
        for number, live in [*self.live.items()]:
            self.finish(number)
            live.listener.fail(error)

    async def load_adapter(self, folder: str) -> AdapterRef:
        """Load an adapter. ConfigError if it cannot be used; Overloaded if the engine process ends
        first.
        """
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        if not self.is_up:
            raise Overloaded(REPLACED)
        self.check_awake()
        self.flush_soon()
        self.loads.append(folder)
        future: asyncio.Future[AdapterRef] = self.loop.create_future()
        self.loading[future] = folder
        return await future

    async def session(
        self, action: Literal["save", "load", "pin", "unpin"], session: str
    ) -> SessionReport:
        """Run a task for the KV of a session. Overloaded if the engine process ends first."""
        if self.died.is_set():
            raise EngineDied("the engine process has ended")
        self.check_awake()
        if not self.is_up:
            raise Overloaded(REPLACED)
        self.flush_soon()
        self.num_tasks += 1
        self.tasks.append(SessionTask(self.num_tasks, action, session))
        future: asyncio.Future[SessionReport] = self.loop.create_future()
        self.reporting[self.num_tasks] = future
        return await future

    def forget_adapter(self, digest: str) -> None:
        """Free an adapter that no request will use. A new engine process never has it."""
        if self.is_up:
            self.flush_soon()
            self.forgets.append(digest)

    def adapter_loaded(self, reply: AdapterLoaded) -> None:
        future = next(each for each, folder in self.loading.items() if folder == reply.folder)
        del self.loading[future]
        if future.done():  # the caller was cancelled
            return
        if reply.adapter is None:
            future.set_exception(ConfigError(reply.refusal))
        else:
            future.set_result(reply.adapter)

    async def change(self, find: Callable[[], Awaitable[Config]]) -> Ready:
        """Change speculation to the config that `find` returns, and return the engine's new state.

        `find` is called when earlier changes are complete. ConfigError if the config cannot be
        used; Overloaded if the process ends first. Speculation is then unchanged.
        """
        changing = asyncio.create_task(self.change_alone(find))
        return await asyncio.shield(changing)  # the engine completes a change that was sent

    async def change_alone(self, find: Callable[[], Awaitable[Config]]) -> Ready:
        async with self.changes:
            config = await find()
            if self.died.is_set():
                raise EngineDied("the engine process has ended")
            if not self.is_up:
                raise Overloaded(REPLACED)
            self.check_awake()
            self.flush_soon()
            future: asyncio.Future[Ready] = self.loop.create_future()
            self.change_due, self.changing = config, (config, future)
            return await future

    def changed(self, reply: Changed) -> None:
        assert self.changing is not None, "the engine replied to no change"
        (config, future), self.changing = self.changing, None
        if reply.ready is None:
            future.set_exception(ConfigError(reply.refusal))
            return
        self.config, self.known_sources = config, reply.ready.known_sources
        self.begin_with(config, self.known_sources)
        self.on_change(config, reply.ready)
        future.set_result(reply.ready)

    def flush_soon(self) -> None:
        """Send everything that is queued in one turn of the event loop as one message."""
        lists = self.adds, self.finishes, self.loads, self.forgets, self.tasks
        others = self.is_reset_due, self.is_state_due, self.change_due
        if not any((*lists, *others, self.sleep_due, self.wake_due)):
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        if not self.is_up:
            return  # `resume` sends everything to the next process
        if self.owed_since is None:  # the engine replies to every message
            self.owed_since = self.loop.time()
        tenants = sorted({*self.asking.values()}) if self.is_state_due else []
        due = self.is_reset_due, tenants, self.change_due
        adapters, sleep = (self.loads, self.forgets), (self.sleep_due, self.wake_due)
        commands = EngineCommands(self.adds, self.finishes, *due, *adapters, *sleep, self.tasks)
        self.num_resets += self.is_reset_due
        self.clear_queue()
        if self.transport is not None and not self.died.is_set():
            self.transport.write(frame(commands))

    def clear_queue(self) -> None:
        """Drop everything that the next message would send."""
        self.adds, self.finishes, self.loads, self.forgets, self.tasks = [], [], [], [], []
        self.is_reset_due, self.is_state_due, self.change_due = False, False, None
        self.sleep_due, self.wake_due = 0, []

    async def leave(self) -> None:
        """Do the same as `close`, without blocking the event loop."""
        self.respawn = None
        if self.ready.done() and not self.died.is_set():
            with suppress(OSError, TimeoutError):
                self.socket.shutdown(SHUT_WR)
                async with asyncio.timeout(self.last_seconds):
                    await self.died.wait()
        self.kill()

    def close(self) -> None:
        """End the engine process. If it was ready, it first has time to store its step costs."""
        self.respawn = None
        if self.ready.done() and not self.died.is_set():
            with suppress(OSError, TimeoutExpired):
                self.socket.shutdown(SHUT_WR)
                self.process.wait(self.last_seconds)
        self.kill()

    def kill(self) -> None:
        self.respawn = None
        if self.reviving is not None:
            self.reviving.cancel()
        if not (self.is_up or self.died.is_set() or self.loop.is_closed()):
            self.die(ENDED)  # `connection_lost` was called before and did not
        if self.transport is not None and not self.loop.is_closed():
            self.transport.close()
        self.process.end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop has another class

    def data_received(self, data: bytes) -> None:
        for payload in self.frames.feed(data):
            match decode(payload):
                case Report() as report:
                    self.deliver(report)
                case SpeculationState() as state:
                    self.deliver_state(state)
                case Changed() as changed:
                    self.changed(changed)
                case AdapterLoaded() as loaded:
                    self.adapter_loaded(loaded)
                case SleepState() as slept:
                    if self.sleeping is not None and not self.sleeping.done():
                        self.sleeping.set_result(slept)
                case SessionReport(id) as report:
                    future = self.reporting.pop(id)
                    if not future.done():  # else the caller was cancelled
                        future.set_result(report)
                case Loading(name, done, total):
                    self.on_loading(name, done, total)
                case Ready() as ready:
                    if not self.ready.done():
                        self.ready.set_result(ready)
                    elif not self.ready.cancelled():  # else the server is shutting down
                        self.on_change(self.config, ready)
                        self.resume(ready)
                case Failed(message):
                    if not self.ready.done():
                        self.ready.set_exception(ConfigError(message))
                    elif self.config is not None:
                        log.error("%s. The next engine process drafts as at the start", message)
                        self.config = None
                        self.begin_with(None, self.known_sources)
                    elif not self.ready.cancelled():
                        self.die(f"{ENDED}. Starting a new engine process failed: {message}")
        self.owed_since = self.loop.time() if self.live else None

    def deliver(self, report: Report) -> None:
        for output in report.outputs:
            live = self.live.get(output.id)
            if output.finish_reason is not None:  # the engine has removed it
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

    def deliver_state(self, state: SpeculationState) -> None:
        for future in [each for each, tenant in self.asking.items() if tenant == state.tenant]:
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
        reporting, self.reporting = self.reporting, {}
        futures: list[asyncio.Future[Any]] = [*loading, *reporting.values()]
        futures += [] if self.sleeping is None else [self.sleeping]
        for future in futures:
            if not future.done():
                future.set_exception(Overloaded(REPLACED))
        if not self.ready.done():
            self.ready.set_exception(EngineDied("the engine process ended while it was loading"))
        is_known = not self.ready.cancelled() and self.ready.exception() is None
        if self.respawn is None or not is_known or self.is_hopeless:
            self.die(ENDED)
        elif self.sleep_state.level > 0:
            self.reviving = None
            log.error("Engine process exited in its sleep. The next one starts at wake-up")
        else:
            self.reviving = self.loop.create_task(self.revive(self.respawn, had_requests))

    async def revived(self) -> None:
        """Start a new process if the last one exited in its sleep, and wait for it. EngineDied if
        none can be started.
        """
        while not (self.is_up or self.died.is_set()):
            if self.reviving is None and self.respawn is not None:
                self.reviving = self.loop.create_task(self.revive(self.respawn, False))
            await asyncio.sleep(0.05)
        if self.died.is_set():
            raise EngineDied(ENDED)

    @property
    def is_hopeless(self) -> bool:
        """Whether too many processes died within DEATHS_SECONDS."""
        first, last = self.deaths[0], self.deaths[-1]
        return len(self.deaths) == MOST_DEATHS and last - first < DEATHS_SECONDS

    def die(self, message: str) -> None:
        """Fail all pending requests."""
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
        """Start a new engine process after one died; it may have died while it was loading."""
        code = await asyncio.to_thread(ended, self.process)
        if had_requests:
            self.blame()
        recent = sum(self.loop.time() - at < DEATHS_SECONDS for at in self.deaths)
        pause = PAUSES[min(recent, len(PAUSES)) - 1]
        log.error(
            "Engine process exited (%s). Restarting in %g s; %d requests will resume",
            f"signal {-code}" if code < 0 else f"exit code {code}",
            pause,
            len(self.live),
        )
        for future in self.resets:  # the cache of a new process is empty
            if not future.done():
                future.set_result(None)
        self.resets, self.num_resets = {}, 0
        for seconds in (pause, *RETRIES):
            await asyncio.sleep(seconds)
            try:  # in this thread, because a process ends with the thread that started it
                self.process, self.socket = respawn()
                self.frames = Frames()
                await self.connect()
            except OSError as e:  # e.g. too many open files, for a moment
                log.error("starting a new engine process failed: %s", e)
                reason = str(e)
            else:
                return
        self.die(f"{ENDED}. Starting a new engine process failed: {reason}")

    def blame(self) -> None:
        """Count the death for each request that the engine ran; fail requests with too many."""
        held = {id(each) for each in self.held}
        for number, live in list(self.live.items()):
            live.num_deaths += id(live) not in held
            if live.num_deaths >= GUILTY:
                log.error("%s: %s", ENDS_ENGINES, live.words, extra={"request_id": live.request_id})
                del self.live[number]
                live.listener.fail(EndsEngines(ENDS_ENGINES))

    def resume(self, ready: Ready) -> None:
        """Send all requests to a new engine process.

        A request is a suspect if it ran in two engines that died, with few steps in between.
        Suspects are sent first, each one after the previous suspect ran a few steps. All other
        requests follow. If a third engine dies, the last suspect caused it.
        """
        if same_text(ready) != same_text(self.ready.result()):
            self.process.kill()
            self.respawn = None
            return  # `connection_lost` fails all requests
        self.is_up, self.tried = True, None
        self.on_restart()
        waiting = [self.live[number] for number in sorted(self.live)]
        self.held = deque(sorted(waiting, key=lambda each: each.num_deaths < GUILTY - 1))
        self.release_held()
        self.ask_state()

    def release_held(self) -> None:
        """Send held requests up to the next suspect, if the last suspect is cleared."""
        tried = self.tried
        if tried is not None and tried.num_deaths and tried.number in self.live:
            return
        self.tried = None
        while self.held and self.tried is None:
            live = self.held.popleft()
            if live.number in self.live:
                self.flush_soon()
                if (add := live.resumed()) is not None:
                    self.adds.append(add)
                if live.num_deaths >= GUILTY - 1:
                    self.tried = live

    async def watch(self, seconds: float) -> None:
        """Kill an engine process that owes a message for longer than `seconds`."""
        while not self.died.is_set():
            await asyncio.sleep(min(1.0, seconds / 4))
            if self.is_up and self.silence > seconds:
                message = "the engine process completed no step for %.0f s. Killing it"
                log.error(message, self.silence)
                self.process.kill()

    @property
    def silence(self) -> float:
        """Seconds since a message of the engine became due; 0 if none is due, or if it sleeps."""
        is_asleep = self.sleep_state.level > 0
        return 0.0 if self.owed_since is None or is_asleep else self.loop.time() - self.owed_since


def ended(process: Forked) -> int:
    """Kill an engine process and return its exit code. If the fork server does not report the
    exit, kill that too.
    """
    process.kill()
    try:
        return process.wait(END_SECONDS)
    except TimeoutExpired:
        process.end()
        return -SIGKILL


def same_text(ready: Ready) -> Ready:
    """Return `ready` without the fields that do not affect texts."""
    target = {model: of for model, of in ready.kv_formats.items() if model != "draft"}
    no_drafter = {"drafter": "", "sources": (), "known_sources": (), "draft_weights": None}
    no_drafter["draft_head"] = None
    return msgspec.structs.replace(ready, phases={}, num_blocks=0, kv_formats=target, **no_drafter)


def retrieve(future: asyncio.Future[Ready]) -> None:
    """Read the future's exception, because asyncio warns about exceptions that are never read."""
    if not future.cancelled():
        future.exception()
