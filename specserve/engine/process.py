"""Runs the engine in a separate process, and changes its drafters while requests run."""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import NamedTuple, cast

import torch

from specserve.config import Config
from specserve.engine.build import (
    DrafterParts,
    Loaded,
    build,
    build_speculator,
    kept_costs,
    known_acceptance,
    kv_tables,
    step_budget,
)
from specserve.engine.cache import kv_identities
from specserve.engine.engine import Engine
from specserve.engine.grammars import Vocabulary
from specserve.engine.loading import Model, Progress, Weights, load_models, settled
from specserve.engine.pool_plan import another_draft
from specserve.engine.sleep import Sleeper
from specserve.engine.tuning import KeptCosts, tune
from specserve.errors import ConfigError, RequestError
from specserve.exchange.messages import (
    AdapterLoaded,
    AdapterRef,
    Add,
    Changed,
    DraftHeadCard,
    EngineCommands,
    EngineStart,
    Failed,
    Link,
    Loading,
    Ready,
    Report,
    SessionReport,
    SessionTask,
    StepOutput,
    decode_commands,
)
from specserve.exchange.phases import Phases
from specserve.exchange.sleep import SleepState
from specserve.exchange.speculation_control import NO_HEAD
from specserve.models.decoder import TargetModel
from specserve.models.folder import name_of
from specserve.models.reader import name_of_dtype
from specserve.models.selection import check_drafter, resolve_drafters
from specserve.process import keep_objects
from specserve.speculation.draft_model import DraftModel
from specserve_drafters.base import EAGLE
from specserve_kernels import is_out_of_memory


class Prepared(NamedTuple):
    """Drafters and a draft model that are ready for use."""

    config: Config
    draft: Model | None
    draft_model: DraftModel | None


class Control:
    """Changes the drafters of one engine; its requests keep their texts."""

    def __init__(self, loaded: Loaded, known: Iterable[Model | None] = ()) -> None:
        """Models in `known` are not loaded again."""
        self.loaded, self.known = loaded, [*known]
        self.sleeper = Sleeper(loaded)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="draft model")
        self.preparing: Future[Prepared] | None = None

    @property
    def engine(self) -> Engine:
        return self.loaded.engine

    def ask(self, config: Config) -> None:
        """Prepare the config's drafters in a thread that uses one core. A niced thread would delay
        steps while it holds the GIL without a CPU.
        """
        assert self.preparing is None, "changes run one at a time"
        self.preparing = self.thread.submit(self.prepare_beside_steps, config)

    def wait(self, seconds: float) -> None:
        if self.preparing is not None:
            wait_for([self.preparing], seconds)

    @property
    def is_preparing(self) -> bool:
        return self.preparing is not None

    @property
    def is_due(self) -> bool:
        """Return whether `finish` can run without waiting."""
        return self.preparing is not None and self.preparing.done()

    def finish(self) -> None:
        """Apply the prepared change, between two steps. ConfigError if that is impossible."""
        assert self.preparing is not None, "no change was requested"
        prepared, self.preparing = self.preparing, None
        self.put(prepared.result())

    def prepare_beside_steps(self, config: Config) -> Prepared:
        torch.set_num_threads(1)  # only for this thread
        return self.prepare(config)

    def prepare(self, config: Config) -> Prepared:
        """Load the draft model if it is a new one; ConfigError if it cannot be used. It may run
        during steps.
        """
        check_drafter(config)
        drafters = resolve_drafters(config)
        if self.engine.head is None and drafters.sources == (EAGLE,):
            raise ConfigError(NO_HEAD)
        if settled(config, self.loaded.weights.target) != config and config.drafter_name != "none":
            raise ConfigError(
                "speculation is off: results of this model depend on the batch, so draft tokens "
                "could change the text. See `row_invariant` in GET /v1/models"
            )
        known = [*self.known, *self.loaded.weights]
        weights = load_models(config, drafters, None, Phases(), known)
        if weights.draft is None or weights.draft is self.loaded.weights.draft:
            kept = None if weights.draft is None else self.engine.draft_model
            return Prepared(config, weights.draft, kept)
        try:
            with torch.inference_mode():
                runner = another_draft(config, self.engine.target.arena, weights.draft.decoder)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            words = (
                f"drafter.model = {config.draft!r}: too little memory ({e}). Choose a smaller one"
            )
            raise ConfigError(words) from e
        assert weights.num_ids is not None, "the draft model has ids"
        draft_model = DraftModel(runner, self.engine.scheduler, weights.num_ids)
        return Prepared(config, weights.draft, draft_model)

    def put(self, prepared: Prepared) -> None:
        """Use the prepared drafters from the next step on. ConfigError, without any change, if that
        is impossible.
        """
        config, draft, draft_model = prepared
        engine, weights = self.engine, self.loaded.weights
        vocab_size = weights.target.decoder.config.vocab_size
        known = known_acceptance(config, weights.target.decoder)
        own = engine.scheduler, vocab_size, draft_model, engine.head, engine.stats
        parts = DrafterParts(*own, known)
        speculator = build_speculator(config, parts, engine.speculator)
        if draft_model is not engine.draft_model:
            kept = list[KeptCosts]()
            if draft_model is not None and draft is not None:
                runner, most = draft_model.runner, self.loaded.max_model_len
                tune(draft, runner, engine.pool, config, most)
                kept = [kept_costs(config, runner, draft_model.costs)]
            identities = kv_identities(config, weights._replace(draft=draft))
            named = identities, engine.tables.tenants
            tables = kv_tables(config, engine.pool, engine.target, draft_model, *named)
            engine.change_draft_model(draft_model, tables, kept)
        decoders = weights.target.decoder, None if draft is None else draft.decoder
        engine.change_speculator(speculator, step_budget(config, *decoders))
        self.loaded = self.loaded._replace(
            weights=weights._replace(draft=draft), drafter=config.drafter_name
        )
        if draft is not None:
            draft.engines.add(engine)
        self.thread.submit(let_go, weights)  # to free gigabytes takes time

    @property
    def is_asleep(self) -> bool:
        return self.sleeper.state.level > 0

    def sleep(self, level: int) -> SleepState:
        """Release memory, see `Sleeper.sleep`. No change may be in preparation."""
        state = self.sleeper.sleep(self.loaded, level)
        if level == 2:
            spare = [m for m in self.known if m is not None and m not in self.loaded.weights]
            for model in spare:
                self.sleeper.ops.release(model.storages)
            self.known = []
        return state

    def wake_up(self, tags: Collection[str]) -> SleepState:
        return self.sleeper.wake_up(self.loaded, tags)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def let_go(_: Weights) -> None:
    """Hold weights until a thread runs this."""


MOMENT = 0.01  # seconds that an idle engine waits for a change before it looks for requests


class Shared(NamedTuple):
    """Data of all engine processes, read once for all of them."""

    models: Iterable[Model | None] = ()
    vocabulary: Callable[[], Vocabulary] | None = None


NOTHING = Shared()


def run(
    link: Link, begin: EngineStart, phases: Phases | None = None, shared: Shared = NOTHING
) -> None:
    """Build an engine, and run steps until the other end closes the socket: EOFError."""
    try:
        first, tenants = begin.first, begin.tenants
        given = *shared, True, begin.sources, first, tenants
        loaded = build(begin.config, progress_to(link), phases, *given)
    except ConfigError as e:
        link.send(Failed(str(e)))
        return
    control = Control(loaded, shared.models)
    keep_objects()
    try:
        link.send(ready(loaded))
        serve(link, control)
    finally:  # the process is killed if this takes long
        control.close()
        loaded.engine.close()


def progress_to(link: Link) -> Progress:
    return lambda name, done, total: link.send(Loading(name, done, total))


def serve(link: Link, control: Control) -> None:
    """Run all received commands and a step, and send a report; block while idle."""
    engine = control.engine
    link.send(report(engine, []))
    sleep_due = 0  # level
    while True:
        refused: list[StepOutput] = []
        if engine.is_idle:
            engine.rest()
        is_preparing = control.is_preparing or engine.is_loading
        is_still = engine.is_idle or control.is_asleep
        for payload in link.receive(wait=is_still and not is_preparing):
            commands = decode_commands(payload)
            for asked in commands.add:
                refused += add(engine, asked)
            for id in commands.finish:
                engine.finish(id)
            if commands.reset_cache:
                engine.reset_cache()
            for tenant in commands.report_speculation:
                link.send(engine.speculation(tenant))
            if commands.change is not None:
                control.ask(commands.change)
            change_adapters(engine, commands)
            sleep_due = commands.sleep or sleep_due
            if commands.wake_up:
                link.send(slept(partial(control.wake_up, commands.wake_up)))
            for task in commands.sessions:
                if (report_now := begin_task(engine, task)) is not None:
                    link.send(report_now)
        if control.is_preparing and engine.is_idle:
            control.wait(MOMENT)
        if control.is_due:
            link.send(change(control))
        for answer in (*loaded_adapters(engine), *finished_tasks(engine)):
            link.send(answer)
        if sleep_due and not (control.is_preparing or engine.is_loading):
            link.send(slept(partial(control.sleep, sleep_due)))
            sleep_due = 0
        outputs = [] if control.is_asleep else engine.step()
        link.send(report(engine, refused + outputs))


def slept(run: Callable[[], SleepState]) -> SleepState:
    """Run a command of sleep or wake-up, and report the result."""
    try:
        return run()
    except ConfigError as e:
        return SleepState(refusal=str(e))


def change_adapters(engine: Engine, commands: EngineCommands) -> None:
    if not (commands.load_adapters or commands.forget_adapters):
        return
    assert engine.adapters is not None, "the server checks for adapters"
    for digest in commands.forget_adapters:
        engine.adapters.forget(digest)
    for folder in commands.load_adapters:
        engine.adapters.load(folder)


def loaded_adapters(engine: Engine) -> Iterator[AdapterLoaded]:
    """Yield adapters that were read since the last step."""
    for folder, found in () if engine.adapters is None else engine.adapters.loaded():
        if isinstance(found, AdapterRef):
            yield AdapterLoaded(folder, found)
        else:
            yield AdapterLoaded(folder, None, found)


NO_TIERS = "this server keeps no conversations. Its operator can set memory.host_bytes"
NO_DISK = "this server has no disk tier. Its operator can set memory.disk_path"


def begin_task(engine: Engine, task: SessionTask) -> SessionReport | None:
    """Begin a task for sessions; return its report if it has ended already."""
    sessions = engine.scheduler.sessions
    if sessions is None:
        return SessionReport(task.id, refusal=NO_TIERS)
    if task.action in ("pin", "unpin"):
        sessions.pin(task.session, task.action == "pin")
        return SessionReport(task.id, *sessions.count(task.session))
    if sessions.tiers.disk is None:
        return SessionReport(task.id, refusal=NO_DISK)
    begin = sessions.save if task.action == "save" else sessions.load
    begin(task.id, task.session)
    return None


def finished_tasks(engine: Engine) -> Iterator[SessionReport]:
    """Yield the reports of session tasks that have ended since the last step."""
    sessions = engine.scheduler.sessions
    if sessions is None:
        return
    for id, name, failure in sessions.finished():
        refusal = failure and f"memory.disk_path: {failure}"
        yield SessionReport(id, *sessions.count(name), refusal)


def change(control: Control) -> Changed:
    """Apply the prepared change, and report the result."""
    try:
        control.finish()
    except ConfigError as e:
        return Changed(None, str(e))
    return Changed(ready(control.loaded))


def add(engine: Engine, asked: Add) -> list[StepOutput]:
    """Queue a prompt's requests; if the prompt is refused, return an error output for each of
    them.
    """
    try:
        engine.add_choices(
            asked.token_ids,
            asked.samplings,
            asked.id,
            asked.keys,
            asked.caller,
            resume=asked.resume,
            adapter=asked.adapter,
        )
    except RequestError as e:
        ids = range(asked.id, asked.id + len(asked.seeds))
        text, blamed = str(e), e.param or "prompt"
        return [
            StepOutput(id, [], "error", False, 0, 0, 0.0, failure=text, blamed=blamed) for id in ids
        ]
    return []


def ready(loaded: Loaded) -> Ready:
    engine, decoder, draft = loaded.engine, loaded.weights.target.decoder, loaded.weights.draft
    kv_dtype = engine.target.kv.layers[0].k.dtype
    return Ready(
        phases=loaded.phases,
        has_head=cast(TargetModel, decoder).has_head,
        drafter=loaded.drafter,
        implementation=decoder.config.implementation,
        row_invariant=loaded.weights.target.is_row_invariant,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        dtype=name_of_dtype(decoder.dtype),
        kv_dtype=name_of_dtype(kv_dtype),
        arithmetic=decoder.ops.arithmetic(),
        block_size=engine.target.kv.block_size,
        num_blocks=engine.pool.num_blocks,
        kv_formats=engine.tables.formats,
        weights=decoder.forms,
        sources=engine.sources,
        known_sources=engine.known_sources,
        draft_weights=None if draft is None else draft.decoder.forms,
        draft_head=draft_head_card(loaded.weights),
    )


def draft_head_card(weights: Weights) -> DraftHeadCard | None:
    head = weights.draft_head
    if weights.head is None or head is None:
        return None
    folder = weights.head.key.folder
    name = "mtp" if folder == weights.target.key.folder else name_of(folder)
    return DraftHeadCard(name, head.aux_layer_ids, head.draft_vocab_size, head.forms)


def report(engine: Engine, outputs: list[StepOutput]) -> Report:
    scheduler = engine.scheduler
    if scheduler.tiers is not None:
        engine.stats.tiers = scheduler.tiers.stats
    pool, stats = engine.pool, engine.stats
    stats.num_checkpoints = len(pool.checkpoints)
    stats.num_checkpoint_hits = pool.num_checkpoint_hits
    return Report(
        outputs=outputs,
        num_running=len(scheduler.running),
        num_waiting=len(engine.requests) - len(scheduler.running),
        num_preempted=scheduler.num_preempted,
        blocks=engine.pool.holders(),
        stats=engine.stats,
    )
