"""From a config to an engine that is ready to step: models, pool, drafter, threads."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.config import Config
from specserve.engine.draft_model import DraftModel
from specserve.engine.engine import Engine
from specserve.engine.runner import Runner
from specserve.engine.step_input import RowGroup, build_step_input
from specserve.errors import ConfigError
from specserve.memory import Arena, BlockPool, BlockTable
from specserve.memory.arena import block_bytes, tokens_that_fit
from specserve.models.decoder import Decoder
from specserve.models.families import DecoderConfig
from specserve.models.folder import Scaled, resolve, scaled_from
from specserve.models.loader import load_decoder, weight_bytes
from specserve.scheduling import Scheduler
from specserve.scheduling.scheduler import StepBudget
from specserve_drafters import Drafter, DrafterError, make_drafter
from specserve_drafters.base import drafter_options, find_drafter
from specserve_drafters.tree import MAX_NODES
from specserve_kernels import DeviceError, Ops, Threads, load

TREE_SLOTS = MAX_NODES + 1
Progress = Callable[[str, int, int], None]  # phase, done, total
Source = tuple[str, str, str, int | None]  # folder, device, dtype, max_model_len


class Model:
    """A model that has been loaded: any number of engines can share it."""

    def __init__(self, decoder: Decoder, source: Source) -> None:
        self.decoder, self.source = decoder, source
        self.threads: tuple[Threads, str] | None = None  # as timed, and in words

    def tune(self, runner: Runner, pool: BlockPool, config: Config, max_len: int) -> str:
        """Settle the runner's threads, timing them if nobody has; what was settled, in words."""
        if self.threads is None or config.model.threads is not None:
            words = tune(runner, pool, config, max_len)
            assert runner.threads is not None
            self.threads = runner.threads, words
        runner.threads, words = self.threads
        return words


class Weights(NamedTuple):
    target: Model
    draft: Model | None


class Loaded(NamedTuple):
    """An engine, and what its users need to know of it."""

    engine: Engine
    weights: Weights
    max_model_len: int
    drafter: str
    phases: dict[str, str]  # of the start-up, in words


class Phases:
    """Times the phases of the start-up."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        note = self.table.get(name, "")
        self.table[name] = f"{perf_counter() - start:.2f} s{note and ': '}{note}"

    def note(self, name: str, text: str) -> None:
        self.table[name] = text


def build(
    config: Config,
    progress: Progress | None = None,
    phases: Phases | None = None,
    known: Iterable[Model | None] = (),
) -> Loaded:
    """Load the models that the config names; ConfigError tells what to change.

    Models that are `known` from engines built before are shared with them.
    """
    phases = phases or Phases()
    weights = load_weights(config, progress, phases, known)
    target, draft = weights
    max_len = context_length(config, target.decoder.config)
    with phases.phase("pool"):
        engine = assemble(config, target.decoder, draft.decoder if draft else None, max_len)
        phases.note("pool", memory_plan(config, engine.pool))
    runners = {"target threads": (target, engine.target)}
    if engine.draft_model is not None and draft is not None:
        runners["draft threads"] = draft, engine.draft_model.runner
    for name, (model, runner) in runners.items():
        with phases.phase(name):
            phases.note(name, model.tune(runner, engine.pool, config, max_len))
    return Loaded(engine, weights, max_len, config.drafter_name, phases.table)


def load_weights(
    config: Config, progress: Progress | None, phases: Phases, known: Iterable[Model | None]
) -> Weights:
    """The models that the config needs; one that is known is not loaded again."""
    loaded = {model.source: model for model in known if model is not None}

    def get(name: str, path: Path) -> Model:
        chosen = config.model.device, config.model.dtype, config.scheduler.max_model_len
        source = (str(path.resolve()), *chosen)
        if source not in loaded:
            with phases.phase(name):
                loaded[source] = Model(load_model(path, config, ops, progress), source)
        return loaded[source]

    with phases.phase("kernels"):
        ops = load_ops(config)
    target = get("target", resolve_model(config))
    context_length(config, target.decoder.config)  # refused before the next load
    draft = get("draft model", resolve_draft(config)) if needs_draft_model(config) else None
    return Weights(target, draft)


def load_ops(config: Config) -> Ops:
    try:
        return load(config.model.device)
    except DeviceError as e:
        raise ConfigError(f"model.device = {config.model.device!r}: {e}") from e


def check_device(config: Config) -> None:
    """Refuse a GPU that is not there, before a model is fetched for it."""
    if config.model.device not in ("auto", "cpu"):
        load_ops(config)


def memory_plan(config: Config, pool: BlockPool) -> str:
    mib = pool.num_blocks * pool.block_bytes / 2**20
    return f"{pool.num_blocks} blocks of {config.memory.block_size} target tokens, {mib:.0f} MiB"


def assemble(config: Config, target: Decoder, draft: Decoder | None, max_len: int) -> Engine:
    """An engine around models that have been loaded."""
    runners, pool = build_pool(config, target, draft, max_len)
    scheduler = Scheduler(step_budget(config), pool)
    draft_model = DraftModel(runners[1], scheduler) if len(runners) > 1 else None
    drafter = build_drafter(config, draft_model)
    names = kv_names(config, target, draft) if config.memory.prefix_cache else None
    return Engine(runners[0], scheduler, drafter, draft_model, names)


def kv_names(config: Config, target: Decoder, draft: Decoder | None) -> dict[str, str]:
    """The model and the dtype that each kind of KV comes from."""
    return {
        "target": f"target {config.target} {target.dtype}",
        "draft": f"draft {config.draft} {draft.dtype if draft else None}",
    }


def resolve_model(config: Config) -> Path:
    return resolve(config.target)


def load_model(folder: Path, config: Config, ops: Ops, progress: Progress | None) -> Decoder:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(folder.name, done, total)

    try:
        return load_decoder(folder, config.model.dtype, ops, config.scheduler.max_model_len, report)
    except torch.OutOfMemoryError as e:
        raise ConfigError(
            f"{folder}: its {weight_bytes(folder, config.model.dtype, ops) / 2**30:.1f} GiB of "
            f"weights do not fit ({asked_for(e)}): free some memory, set model.dtype = 'bf16', or "
            "take a smaller model or another model.device"
        ) from e


def asked_for(e: BaseException) -> str:
    """The sentences of torch's complaint that tell how much was asked for, and what was free."""
    return ". ".join(str(e).split(". ")[:3]).strip(" .")


def resolve_draft(config: Config) -> Path:
    if config.draft is None:
        raise ConfigError(
            f"drafter {config.drafter_name!r} needs a draft model: set drafter.model, or say "
            "--draft-model"
        )
    return resolve(config.draft)


def scaled_models(config: Config) -> list[Scaled]:
    """Of those that the config needs, which are demos at another model's cost."""
    folders = [resolve_model(config)]
    if needs_draft_model(config):
        folders.append(resolve_draft(config))
    return [scaled for folder in folders if (scaled := scaled_from(folder)) is not None]


def needs_draft_model(config: Config) -> bool:
    """Asked of the drafter's class, whoever it is."""
    if config.drafter_name == "none":
        return False
    try:
        return bool(getattr(find_drafter(config.drafter_name), "needs_executor", False))
    except DrafterError as e:
        raise ConfigError(f"drafter.name: {e}") from e


def check_drafter(config: Config) -> None:
    """Whether there is such a drafter with such options, without loading any model."""
    if config.drafter_name == "none":
        return
    try:
        drafter_options(config.drafter_name, config.drafter.options)
    except DrafterError as e:
        raise ConfigError(str(e)) from e


def build_drafter(config: Config, draft_model: DraftModel | None) -> Drafter | None:
    if config.drafter_name == "none":
        return None
    try:
        return make_drafter(config.drafter_name, config.drafter.options, draft_model)
    except DrafterError as e:
        raise ConfigError(str(e)) from e


def context_length(config: Config, target: DecoderConfig) -> int:
    longest, asked = target.max_positions, config.scheduler.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(
            f"scheduler.max_model_len = {asked} is more than the model's {longest} positions: "
            "lower it, or leave it out"
        )
    return asked or longest


def step_budget(config: Config) -> StepBudget:
    c, has_drafter = config.scheduler, config.drafter_name != "none"
    return StepBudget(
        max_running=c.max_running,
        max_batched_tokens=c.max_batched_tokens,
        prefill_chunk=c.prefill_chunk,
        max_nodes=config.speculation.max_nodes if has_drafter else 0,
        max_step_nodes=config.speculation.max_step_nodes if has_drafter else 0,
    )


def build_pool(
    config: Config, target: Decoder, draft: Decoder | None, max_len: int
) -> tuple[list[Runner], BlockPool]:
    """One arena for both models, no larger than `max_running` requests of full length need."""
    models = [target] if draft is None else [target, draft]
    size = block_bytes(
        target.kv_layouts, config.memory.block_size, () if draft is None else draft.kv_layouts
    )
    block_sizes = [config.memory.block_size]
    if draft is not None:
        fits = tokens_that_fit(draft.kv_layouts, size)
        block_sizes.append(draft_block_size(config.memory.draft_block_size, fits))
    per_request = [-(-(max_len + TREE_SLOTS) // b) for b in block_sizes]
    allowed = kv_bytes(config, target.ops)
    num_blocks = min(allowed // size, sum(per_request) * config.scheduler.max_running)
    if num_blocks < per_request[0]:
        fit = num_blocks * block_sizes[0] - TREE_SLOTS
        shorter = f"set scheduler.max_model_len to at most {fit}, or " if fit >= 2 else ""
        raise ConfigError(
            f"a request of {max_len} tokens and its tree need {per_request[0] * size} bytes of KV, "
            f"and memory allows {allowed}: {shorter}raise memory.kv_bytes or "
            "memory.kv_fraction, or lower memory.block_size"
        )
    try:
        arena = Arena(target.ops.allocate(num_blocks * size), size)
    except (OSError, OverflowError, torch.OutOfMemoryError) as e:
        raise ConfigError(
            f"the system refuses {num_blocks * size} bytes for the KV pool ({asked_for(e)}): lower "
            "memory.kv_bytes or memory.kv_fraction"
        ) from e
    runners = []
    for name, model, block_size in zip(("target", "draft"), models, block_sizes, strict=False):
        arena.add_view(name, model.kv_layouts, block_size)
        runners.append(Runner(model, arena, name))
    return runners, BlockPool(num_blocks, size)


def draft_block_size(asked: int | None, fits: int) -> int:
    if asked is not None and asked > fits:
        raise ConfigError(
            f"memory.draft_block_size = {asked} is more than the {fits} draft tokens that fit into "
            "a block: lower it, or raise memory.block_size"
        )
    return asked or fits


def kv_bytes(config: Config, ops: Ops) -> int:
    if config.memory.kv_bytes is not None:
        return config.memory.kv_bytes
    try:
        return int(config.memory.kv_fraction * ops.free_memory())
    except DeviceError as e:
        raise ConfigError(f"{e}: set memory.kv_bytes") from e


@torch.inference_mode()
def tune(runner: Runner, pool: BlockPool, config: Config, max_len: int) -> str:
    """Settle the number of threads on the model's own steps, at a middling context."""
    table = BlockTable(pool, runner.kv.block_size)
    positions = min(max_len + TREE_SLOTS, len(runner.decoder.rotary.cos))  # a draft may have fewer
    positions = min(positions, pool.num_blocks * table.block_size)
    start = max(0, min(256, positions - TREE_SLOTS))
    most = min(config.scheduler.max_batched_tokens, positions - start)
    table.try_reserve(start + max(most, TREE_SLOTS))

    def step(rows: int) -> Tensor:
        group = RowGroup(table, [0] * rows, start, num_read=1)
        return runner.launch(build_step_input([group], pool.updates)).logits

    try:
        runner.threads, words = runner.ops.tune(step, most, config.model.threads)
    except ValueError as e:
        raise ConfigError(f"model.threads: {e}") from e
    except torch.OutOfMemoryError as e:
        raise ConfigError(
            f"beside weights and KV pool too little memory is left for a step of {most} rows "
            f"({asked_for(e)}): lower memory.kv_bytes or memory.kv_fraction, or "
            "scheduler.max_batched_tokens"
        ) from e
    finally:
        table.clear()
    return words
