"""Builds an engine from a config."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from specserve.config import Config
from specserve.engine.adapters import Adapters
from specserve.engine.cache import NO_IDENTITIES, build_sessions, kv_identities, tier_words
from specserve.engine.engine import Engine
from specserve.engine.grammars import Grammars, Vocabulary
from specserve.engine.loading import (
    Model,
    Progress,
    Weights,
    check_ranks_memory,
    load_weights,
    settled,
)
from specserve.engine.pool_plan import Models, build_pool, pool_words
from specserve.engine.rank_messages import ReadAdapter
from specserve.engine.ranks import (
    Followers,
    LeadingSlots,
    check_parallel,
    identity,
    own_threads,
    placed,
    start_followers,
)
from specserve.engine.runner import Runner
from specserve.engine.tuning import KeptCosts, costs_file, measure, model_key, tune
from specserve.errors import ConfigError
from specserve.exchange.messages import SourceStats, Stats
from specserve.exchange.phases import Phases
from specserve.memory.blocks import BlockPool, KVTables
from specserve.models.adapters import AdapterSlots, PackedAdapter, read_adapter
from specserve.models.decoder import Decoder, LoadedModel
from specserve.models.end_tokens import find_end_tokens
from specserve.models.selection import Drafters, check_drafter, context_length, resolve_model
from specserve.models.source import open_source
from specserve.scheduling import Scheduler
from specserve.scheduling.scheduler import StepBudget, seconds
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.costs import StepCosts
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import DraftModelSource
from specserve.speculation.head_model import HeadModel
from specserve.speculation.planner import NoLibraryError
from specserve.speculation.speculator import (
    FixedSpeculator,
    Speculator,
    UserSource,
)
from specserve.text.grammars.compiled import vocabulary_of
from specserve_drafters import DrafterError, make_drafter
from specserve_drafters.base import EAGLE, SOURCES, DraftSource, drafter_options, make_source
from specserve_drafters.model_source import ModelSource
from specserve_drafters.trie import AcceptancePrior, BinCounts, shipped_prior
from specserve_kernels.cpu.kept import kept_file, read_kept


class Loaded(NamedTuple):
    """An engine that is ready to step, and facts about it for its callers."""

    engine: Engine
    weights: Weights
    max_model_len: int
    drafter: str
    phases: dict[str, str]  # seconds and notes of start-up phases, as text

    @property
    def vocab_size(self) -> int:
        return self.weights.target.decoder.config.vocab_size


def build(
    config: Config,
    progress: Progress | None = None,
    phases: Phases | None = None,
    known: Iterable[Model | None] = (),
    vocabulary: Callable[[], Vocabulary] | None = None,
    is_served: bool = False,
    known_sources: Iterable[str] = (),
    first: Drafters | None = None,
    tenants: tuple[str, ...] = (),
) -> Loaded:
    """Load the config's models and build an engine; ConfigError states what to change.

    Models in `known`, from earlier engines, are shared instead of loaded again; so is the
    `vocabulary`. A served engine reads the vocabulary for grammars before it is ready, because a
    large one would delay a step by a second. `known_sources` are the sources whose bits an earlier
    engine's requests use, and `first` are the drafters of the first engine. `tenants` identifies
    each API key.
    """
    check_drafter(config)
    check_parallel(config)
    config = placed(config) if is_served else own_threads(config)
    known = [*known]
    if not known:  # known models take their memory already
        check_ranks_memory(config)
    followers = start_followers(config, ends_with_thread=is_served)
    given = progress, phases or Phases(), known, vocabulary, is_served, known_sources, first
    try:
        return build_with(followers, config, *given, tenants)
    except BaseException:
        if followers is not None:
            followers.close()
        raise


def build_with(
    followers: Followers | None,
    config: Config,
    progress: Progress | None,
    phases: Phases,
    known: Iterable[Model | None],
    vocabulary: Callable[[], Vocabulary] | None,
    is_served: bool,
    known_sources: Iterable[str],
    first: Drafters | None,
    tenants: tuple[str, ...],
) -> Loaded:
    """Do the same as `build`, with ranks that have been started."""
    grammars = Grammars(vocabulary or partial(read_vocabulary, config))
    if is_served:
        grammars.prepare()
    weights = load_weights(config, progress, phases, known, first)
    target, draft, head = weights
    if followers is not None and isinstance(target.decoder, Decoder):
        with phases.phase("ranks"):
            own = identity(config, target.decoder)
            followers.wait_until_ready(own, target.decoder.ops)
    config = settled(config, target)
    max_len = context_length(config, target.decoder.config)
    with phases.phase("pool"):
        decoders = target.decoder, draft.decoder if draft else None
        models = Models(*decoders, weights.draft_head, weights.num_ids)
        identities = kv_identities(config, weights), tenants
        given = known_sources, grammars, is_served, True, *identities, followers
        engine = assemble(config, models, max_len, *given)
        of_draft = 0 if engine.draft_model is None else engine.draft_model.runner.state_size
        sizes = engine.target.kv.block_size, engine.target.state_size, of_draft
        phases.note("pool", pool_words(config, engine.pool, *sizes))
        if engine.scheduler.tiers is not None:
            phases.note("tiers", tier_words(engine.scheduler.tiers))
        file = acceptance_file(config, engine.target.decoder)
        if isinstance(engine.speculator, AdaptiveSpeculator) and read_kept(file, Prior) is not None:
            phases.note("acceptance", f"learned by specserve tune: {file}")
    runners = {"target": (target, engine.target, engine.scheduler.costs)}
    if engine.draft_model is not None and draft is not None:
        runners["draft"] = draft, engine.draft_model.runner, engine.draft_model.costs
    if engine.head is not None and head is not None:
        runners["head"] = head, engine.head.runner, engine.head.costs
    for name, (model, runner, costs) in runners.items():
        phases.note(f"{name} forward", runner.program.words)
        with phases.phase(f"{name} threads"):
            num_slots = engine.num_slots if runner is engine.target else 0
            words = tune(model, runner, engine.pool, config, max_len, num_slots)
            phases.note(f"{name} threads", words)
        if engine.speculator is not None or engine.scheduler.tiers is not None:
            with phases.phase(f"{name} steps"):
                words = measure(runner, engine.pool, costs, config, max_len)
                phases.note(f"{name} steps", words)
    if is_served:
        with phases.phase("grammars"):
            grammars.wait_until_prepared()
    for model in filter(None, weights):
        model.engines.add(engine)
    return Loaded(engine, weights, max_len, config.drafter_name, phases.table)


def assemble(
    config: Config,
    models: Models,
    max_len: int,
    known_sources: Iterable[str] = (),
    grammars: Grammars | None = None,
    is_served: bool = False,
    keeps_costs: bool = False,
    identities: Mapping[str, str] = NO_IDENTITIES,
    tenants: tuple[str, ...] = (),
    followers: Followers | None = None,
) -> Engine:
    """Build an engine for loaded models; `followers` run the other parts of the target model."""
    if followers is not None and isinstance(models.target, Decoder):
        models = models._replace(target=models.target.connected(followers.connections))
    adapters, target = build_adapters(config, models.target, followers)
    models = models._replace(target=target)
    target, draft, _, num_ids = models
    runners, pool = build_pool(config, models, max_len, followers)
    sessions = build_sessions(config, pool, runners.target, followers, runners.draft)
    scheduler = Scheduler(step_budget(config, target, draft), pool, sessions=sessions)
    draft_model, head = None, None
    if runners.draft is not None and draft is not None:
        num_ids = num_ids or min(target.config.vocab_size, draft.config.vocab_size)
        draft_model = DraftModel(runners.draft, scheduler, num_ids)
    if runners.head is not None and models.head is not None:
        head = HeadModel(runners.head, models.head, runners.target, scheduler)
    stats = Stats(sources={name: SourceStats() for name in known_sources})
    run = [(model.runner, model.costs) for model in (head, draft_model) if model is not None]
    run.insert(0, (runners.target, scheduler.costs))
    known = known_acceptance(config, target) if keeps_costs else {}
    parts = DrafterParts(scheduler, target.config.vocab_size, draft_model, head, stats, known)
    return Engine(
        runners.target,
        scheduler,
        kv_tables(config, pool, runners.target, draft_model, identities, tenants),
        draft_model=draft_model,
        head=head,
        speculator=build_speculator(config, parts),
        grammars=grammars,
        adapters=adapters,
        followers=followers,
        stats=stats,
        kept=[kept_costs(config, *each) for each in run] if keeps_costs else (),
        is_replaceable=is_served,
    )


def kv_tables(
    config: Config,
    pool: BlockPool,
    target: Runner,
    draft_model: DraftModel | None,
    identities: Mapping[str, str] = NO_IDENTITIES,
    tenants: tuple[str, ...] = (),
) -> KVTables:
    """Return the tables of KV. Only models with a name get a prefix cache; a name identifies the
    weights and dtype of their KV.
    """
    sizes = {"target": target.kv.block_size}
    draft = None
    if draft_model is not None:
        draft, sizes["draft"] = draft_model.runner.decoder, draft_model.runner.kv.block_size
    names = kv_names(config, target.decoder, draft) if config.memory.prefix_cache else {}
    names = {model: name + identities.get(model, "") for model, name in names.items()}
    given = sizes, names, not config.memory.share_prefix_cache, tenants
    of_draft = 0 if draft_model is None else draft_model.runner.state_size
    return KVTables(pool, *given, target.state_size, config.memory.state_interval, of_draft)


def build_adapters(
    config: Config, target: LoadedModel, followers: Followers | None = None
) -> tuple[Adapters | None, LoadedModel]:
    """Return the target's slots for adapters, and the target with these slots. ConfigError for a
    model without adapter support.
    """
    num_slots, rank = config.lora.num_slots, config.lora.max_rank
    if num_slots == 0:
        return None, target
    if not isinstance(target, Decoder):
        raise ConfigError(
            "lora.max_loras: models that run with transformers' modules cannot have adapters. "
            "Remove [lora], or merge the adapter into the model with peft's merge_and_unload"
        )
    shape, dtype = target.config, target.dtype
    slots = AdapterSlots(target, num_slots, rank)

    def read(folder: Path) -> PackedAdapter:
        if followers is not None:
            followers.send(ReadAdapter(str(folder)))
        return slots.packed(read_adapter(folder, shape, rank, dtype))

    own = slots if followers is None else LeadingSlots(slots, followers)
    return Adapters(own, num_slots, read), slots.decoder


def read_vocabulary(config: Config) -> Vocabulary:
    """Return the target's vocabulary for grammars."""
    source = open_source(resolve_model(config))
    size = source.shape(config.model.implementation).vocab_size
    tokenizer = source.tokenizer().templated(config.model.chat_template)
    ends = [token for token in find_end_tokens(source, tokenizer) if token < size]
    return Vocabulary(vocabulary_of(tokenizer, size, ends), size, ends)


def kept_costs(config: Config, runner: Runner, costs: StepCosts) -> KeptCosts:
    """Return the costs of a model's steps, initialized with the measurements of earlier starts."""
    threads = str(config.model.threads)
    return KeptCosts(costs, costs_file(model_key(runner), runner.ops.arithmetic(), threads))


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptance of draft tokens in an operator's texts, which `specserve tune` keeps on disk."""

    acceptance: dict[str, list[BinCounts]]  # by source


def acceptance_file(config: Config, target: LoadedModel) -> Path | None:
    """Return the file of a target model with its draft model and head; None if none can be kept."""
    names = [str(name) for name in (config.target, config.draft, config.drafter.head)]
    paths = [os.path.realpath(name) if os.path.exists(name) else name for name in names]
    given = *paths, config.drafter.quantize, target.dtype, target.forms
    return kept_file("acceptance", *map(str, given))


def known_acceptance(config: Config, target: LoadedModel) -> AcceptancePrior:
    """Return what `specserve tune` has kept for these models. Other sources begin with the shipped
    acceptance.
    """
    prior = read_kept(acceptance_file(config, target), Prior)
    return shipped_prior() if prior is None else {**shipped_prior(), **prior.acceptance}


def kv_names(config: Config, target: LoadedModel, draft: LoadedModel | None) -> dict[str, str]:
    """Return texts that identify the weights and dtype of the target's and the draft model's KV."""
    model, kv_dtype = config.model, config.memory.kv_dtype
    kept = model.quantize_head, model.quantize_embedding, model.activations, kv_dtype
    code, draft_code = (
        (m.config.implementation, m.forms.num_rounding) if m else None for m in (target, draft)
    )
    dtype = draft.dtype if draft else None
    return {
        "target": f"target {config.target} {target.dtype} {(model.quantize, *kept, code)}",
        "draft": f"draft {config.draft} {dtype} {(config.drafter.quantize, *kept, draft_code)}",
    }


class DrafterParts(NamedTuple):
    """Parts of an engine that drafters need."""

    scheduler: Scheduler
    vocab_size: int
    draft_model: DraftModel | None
    head: HeadModel | None
    stats: Stats
    prior: AcceptancePrior = {}  # noqa: RUF012  acceptance with which new statistics begin

    @property
    def num_ids(self) -> int:
        """Return the number of ids that draft tokens may have."""
        return self.vocab_size if self.draft_model is None else self.draft_model.num_ids


def build_speculator(
    config: Config, parts: DrafterParts, before: Speculator | None = None
) -> Speculator | None:
    """Build the config's speculator; sources of `before` keep their statistics."""
    name = config.drafter_name
    if name == "none":
        return None
    try:
        if name == "auto":
            earlier = before if isinstance(before, AdaptiveSpeculator) else None
            return adaptive_speculator(config, parts, earlier)
        executor = parts.head if name == EAGLE else parts.draft_model
        drafter = make_drafter(name, config.drafter.options, executor)
    except (DrafterError, NoLibraryError) as e:
        raise ConfigError(str(e)) from e
    return FixedSpeculator(name, drafter, parts.scheduler, executor, parts.num_ids, parts.stats)


def adaptive_speculator(
    config: Config, parts: DrafterParts, before: AdaptiveSpeculator | None = None
) -> AdaptiveSpeculator:
    """Build a speculator of all sources in `drafter.options`; the draft model is one if it
    exists.
    """
    options, draft_model = drafter_options("auto", config.drafter.options), parts.draft_model
    sizes = options.max_depth, options.width, options.tau
    run = {EAGLE: parts.head, "model": draft_model}
    model_sources = [
        DraftModelSource(ModelSource(name, model, *sizes, is_kept=model is draft_model), model)
        for name, model in run.items()
        if model is not None and name in options.sources
    ]
    there = {model_source.name for model_source in model_sources}
    names = [n for n in dict.fromkeys(options.sources) if n not in run or n in there]
    known = {} if before is None else {source.name: source for source in before.sources}
    sources = [
        known[name]
        if name in known and name in SOURCES
        else build_source(name, options.source_options.get(name, {}), parts)
        for name in names
        if name not in run
    ]
    refuse_second_executor([s.name for s in sources if needs_executor(s)], "model" in there)
    shared = parts.scheduler, draft_model, parts.stats
    return AdaptiveSpeculator(sources, model_sources, *shared, names, before, parts.prior)


def needs_executor(source: DraftSource) -> bool:
    return bool(getattr(getattr(source, "drafter", None), "needs_executor", False))


def refuse_second_executor(names: Sequence[str], is_run: bool) -> None:
    """Raise ConfigError if several sources run the draft model: it runs a request's known tokens
    for one source per step.
    """
    every = [*names, *(["model"] if is_run else [])]
    if len(every) > 1:
        raise ConfigError(
            f"drafter.options.sources: {' and '.join(every)} run the draft model in the same step. "
            "Keep one of them"
        )


def build_source(name: str, options: Mapping[str, Any], parts: DrafterParts) -> DraftSource:
    if name in SOURCES:
        return make_source(name)
    drafter = make_drafter(name, options, parts.draft_model, is_source=True)
    return UserSource(name, drafter, parts.vocab_size)


def step_budget(config: Config, target: LoadedModel, draft: LoadedModel | None) -> StepBudget:
    c = config.scheduler
    return StepBudget(
        max_running=c.max_running,
        max_batched_tokens=c.max_batched_tokens,
        prefill_chunk=c.prefill_chunk,
        max_nodes=config.max_nodes,
        max_step_nodes=config.max_step_nodes,
        draft_rows_per_row=rows_in_time_of_one(draft, target) if draft else 1,
        ttft=seconds(c.ttft_ms, None),
        tpot=seconds(c.tpot_ms, None),
    )


def rows_in_time_of_one(draft: LoadedModel, target: LoadedModel) -> int:
    """Return how many rows of the draft model take about as long as one of the target, at least
    1.
    """
    return max(1, target.config.num_layer_weights // draft.config.num_layer_weights)
