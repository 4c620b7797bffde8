"""The engine process: it reads commands from a socket, runs a step, and sends a report."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from specserve.engine.build import Loaded, build
from specserve.engine.control import Control
from specserve.engine.engine import Engine
from specserve.engine.grammars import Vocabulary
from specserve.engine.loading import Model, Progress, Weights
from specserve.errors import ConfigError, RequestError
from specserve.exchange.adapter import AdapterRef
from specserve.exchange.frames import Link
from specserve.exchange.messages import (
    AdapterLoaded,
    Add,
    Begin,
    Changed,
    DraftHeadCard,
    EngineCommands,
    Failed,
    Loading,
    Ready,
    Report,
    decode_commands,
)
from specserve.exchange.phases import Phases
from specserve.exchange.step_output import StepOutput
from specserve.models.folder import name_of
from specserve.models.loader import name_of_dtype
from specserve.process import keep_objects

MOMENT = 0.01  # seconds that an idle engine waits for a change before it looks for requests


class Shared(NamedTuple):
    """What engine processes have in common, read once for all of them."""

    models: Iterable[Model | None] = ()
    vocabulary: Callable[[], Vocabulary] | None = None


NOTHING = Shared()


def run(link: Link, begin: Begin, phases: Phases | None = None, shared: Shared = NOTHING) -> None:
    """Make an engine, and run steps until the other end of the socket is closed: EOFError."""
    try:
        began = begin.sources, begin.first
        loaded = build(begin.config, progress_to(link), phases, *shared, True, *began)
    except ConfigError as e:
        link.send(Failed(str(e)))
        return
    control = Control(loaded, shared.models)
    keep_objects()
    try:
        link.send(ready(loaded))
        serve(link, control)
    finally:  # it is killed if this takes long
        control.close()
        loaded.engine.close()


def progress_to(link: Link) -> Progress:
    return lambda name, done, total: link.send(Loading(name, done, total))


def serve(link: Link, control: Control) -> None:
    """Carry out all commands that have come, run a step, send a report; block while idle."""
    engine = control.engine
    link.send(report(engine, []))
    while True:
        refused: list[StepOutput] = []
        if engine.is_idle:
            engine.rest()
        is_preparing = control.is_preparing or engine.is_loading
        for payload in link.receive(wait=engine.is_idle and not is_preparing):
            commands = decode_commands(payload)
            for asked in commands.add:
                refused += add(engine, asked)
            for id in commands.finish:
                engine.finish(id)
            if commands.reset_cache:
                engine.reset_cache()
            for tenant in commands.tell_speculation:
                link.send(engine.speculation(tenant))
            if commands.change is not None:
                control.ask(commands.change)
            change_adapters(engine, commands)
        if control.is_preparing and engine.is_idle:
            control.wait(MOMENT)
        if control.is_due:
            link.send(change(control))
        for answer in loaded_adapters(engine):
            link.send(answer)
        link.send(report(engine, refused + engine.step()))


def change_adapters(engine: Engine, commands: EngineCommands) -> None:
    if not (commands.load_adapters or commands.forget_adapters):
        return
    assert engine.adapters is not None, "the server knows whether there can be adapters"
    for digest in commands.forget_adapters:
        engine.adapters.forget(digest)
    for folder in commands.load_adapters:
        engine.adapters.load(folder)


def loaded_adapters(engine: Engine) -> Iterator[AdapterLoaded]:
    """Those that have been read since the last step, if any."""
    for folder, found in () if engine.adapters is None else engine.adapters.loaded():
        if isinstance(found, AdapterRef):
            yield AdapterLoaded(folder, found)
        else:
            yield AdapterLoaded(folder, None, found)


def change(control: Control) -> Changed:
    """Put in place what has been prepared."""
    try:
        control.finish()
    except ConfigError as e:
        return Changed(None, str(e))
    return Changed(ready(control.loaded))


def add(engine: Engine, asked: Add) -> list[StepOutput]:
    """Queue a prompt's choices; if the prompt is refused, an error output for each of them."""
    try:
        engine.add_choices(
            asked.token_ids,
            asked.samplings,
            asked.id,
            asked.keys,
            asked.caller,
            begun=asked.begun,
            adapter=asked.adapter,
        )
    except RequestError as e:
        ids = range(asked.id, asked.id + len(asked.seeds))
        return [StepOutput(id, [], "error", False, 0, 0, 0.0, failure=str(e)) for id in ids]
    return []


def ready(loaded: Loaded) -> Ready:
    engine, decoder, draft = loaded.engine, loaded.weights.target.decoder, loaded.weights.draft
    kv_dtype = engine.target.kv.layers[0].k.dtype
    return Ready(
        phases=loaded.phases,
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
        kv_formats=engine.formats,
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
    return DraftHeadCard(name, head.taps, head.draft_vocab_size, head.forms)


def report(engine: Engine, outputs: list[StepOutput]) -> Report:
    scheduler = engine.scheduler
    return Report(
        outputs=outputs,
        num_running=len(scheduler.running),
        num_waiting=len(engine.requests) - len(scheduler.running),
        num_preempted=scheduler.num_preempted,
        blocks=engine.memory(),
        stats=engine.stats,
    )
