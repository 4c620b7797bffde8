"""From a config to an engine that is ready to step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specserve.config import Config
from specserve.engine.adapters import Adapters
from specserve.engine.engine import Engine, seconds
from specserve.engine.grammars import Grammars, Vocabulary
from specserve.engine.kept_costs import KeptCosts, costs_file
from specserve.engine.loading import Model, Progress, Weights, load_weights, settled
from specserve.engine.pool_plan import Models, build_pool, pool_words
from specserve.engine.runner import Runner
from specserve.engine.tuning import model_key, tune
from specserve.errors import ConfigError
from specserve.exchange.messages import SourceStats
from specserve.exchange.phases import Phases
from specserve.models.adapters import AdapterSlots, PackedAdapter, read_adapter
from specserve.models.decoder import Decoder
from specserve.models.end_tokens import find_end_tokens
from specserve.models.loaded import LoadedModel
from specserve.models.selection import Drafters, check_drafter, context_length, resolve_model
from specserve.models.source import open_source
from specserve.scheduling import Scheduler
from specserve.scheduling.cost import StepCosts
from specserve.scheduling.scheduler import StepBudget
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.grower import Grower
from specserve.speculation.guesses import FixedGuesses, Guesses
from specserve.speculation.head_model import HeadModel
from specserve.speculation.planned_guesses import PlannedGuesses
from specserve.speculation.source import Source, UserCode, UserSource
from specserve.text.grammars.compiled import vocabulary_of
from specserve_drafters import DrafterError, make_drafter
from specserve_drafters.auto import BUILT_IN, EAGLE
from specserve_drafters.base import drafter_options
from specserve_drafters.grammar import GrammarSource
from specserve_drafters.model_source import ModelSource
from specserve_drafters.native_lookup import ngram_source
from specserve_drafters.owners import OwnSources
from specserve_drafters.prediction import PredictionSource
from specserve_drafters.recycle import RecycleSource
from specserve_drafters.suffix import SuffixSource


class Loaded(NamedTuple):
    """An engine that is ready to step, and facts about it for its callers."""

    engine: Engine
    weights: Weights
    max_model_len: int
    drafter: str
    phases: dict[str, str]  # of the start-up: seconds and notes, as text

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
) -> Loaded:
    """Load the config's models and build an engine; ConfigError says what to change.

    Models in `known`, those of earlier engines, are shared instead of loaded again; so is the
    `vocabulary`. An engine that is served has that read for grammars before it is ready: with a
    large one that takes a second, in which no step would run. `known_sources` are those that an
    earlier engine's requests know by their bits, and `first` are the drafters of the first engine.
    """
    phases = phases or Phases()
    check_drafter(config)
    grammars = Grammars(vocabulary or partial(read_vocabulary, config))
    if is_served:
        grammars.prepare()
    weights = load_weights(config, progress, phases, known, first)
    target, draft, head = weights
    config = settled(config, target)
    max_len = context_length(config, target.decoder.config)
    with phases.phase("pool"):
        decoders = target.decoder, draft.decoder if draft else None
        models = Models(*decoders, weights.draft_head, weights.num_ids)
        engine = assemble(config, models, max_len, known_sources)
        phases.note("pool", pool_words(config, engine.pool))
    engine.grammars = grammars
    runners = {"target threads": (target, engine.target)}
    if engine.draft_model is not None and draft is not None:
        runners["draft threads"] = draft, engine.draft_model.runner
    if engine.head is not None and head is not None:
        runners["head threads"] = head, engine.head.runner
    for name, (model, runner) in runners.items():
        phases.note(name.replace("threads", "forward"), runner.program.words)
        with phases.phase(name):
            phases.note(name, tune(model, runner, engine.pool, config, max_len))
    engine.kept = kept_costs(config, engine)
    engine.is_replaceable = is_served
    if is_served:
        with phases.phase("grammars"):
            grammars.wait_until_prepared()
    return Loaded(engine, weights, max_len, config.drafter_name, phases.table)


def assemble(
    config: Config, models: Models, max_len: int, known_sources: Iterable[str] = ()
) -> Engine:
    """An engine for models that are loaded already."""
    adapters = build_adapters(config, models.target)
    if adapters is not None:
        models = models._replace(target=adapters.slots.decoder)
    target, draft, _, num_ids = models
    runners, pool = build_pool(config, models, max_len)
    scheduler = Scheduler(step_budget(config, target, draft), pool)
    draft_model = None
    if runners.draft is not None and draft is not None:
        num_ids = num_ids or min(target.config.vocab_size, draft.config.vocab_size)
        draft_model = DraftModel(runners.draft, scheduler, num_ids)
    names = kv_names(config, target, draft) if config.memory.prefix_cache else None
    is_per_tenant = not config.memory.share_prefix_cache
    engine = Engine(runners.target, scheduler, draft_model, names, is_per_tenant)
    if runners.head is not None and models.head is not None:
        engine.head = HeadModel(runners.head, models.head, runners.target, scheduler)
    engine.adapters = adapters
    engine.stats.sources.update({name: SourceStats() for name in known_sources})
    engine.guesses = build_guesses(config, engine, draft_model)
    return engine


def build_adapters(config: Config, target: LoadedModel) -> Adapters | None:
    """The target's slots for adapters; ConfigError for a model that cannot have any."""
    num_slots, rank = config.lora.num_slots, config.lora.max_rank
    if num_slots == 0:
        return None
    if not isinstance(target, Decoder):
        raise ConfigError(
            "lora.max_loras: a model that transformers' modules compute takes no adapters here; "
            "leave out [lora], or merge the adapter into the model (peft's merge_and_unload)"
        )
    shape, dtype = target.config, target.dtype
    slots = AdapterSlots(target, num_slots, rank)

    def read(folder: Path) -> PackedAdapter:
        return slots.packed(read_adapter(folder, shape, rank, dtype))

    return Adapters(slots, num_slots, read)


def read_vocabulary(config: Config) -> Vocabulary:
    """The target's, as grammars need it."""
    source = open_source(resolve_model(config))
    size = source.shape(config.model.implementation).vocab_size
    tokenizer = source.tokenizer().templated(config.model.chat_template)
    ends = [token for token in find_end_tokens(source, tokenizer) if token < size]
    return Vocabulary(vocabulary_of(tokenizer, size, ends), size, ends)


def kept_costs(config: Config, engine: Engine) -> list[KeptCosts]:
    """The costs of both models' steps, which begin with what earlier starts have shown."""
    target = kept_costs_of_model(config, engine.target, engine.scheduler.costs)
    head = engine.head
    of_head = [] if head is None else [kept_costs_of_model(config, head.runner, head.costs)]
    return [target, *of_head, *kept_costs_of(config, engine.draft_model)]


def kept_costs_of(config: Config, draft_model: DraftModel | None) -> list[KeptCosts]:
    if draft_model is None:
        return []
    return [kept_costs_of_model(config, draft_model.runner, draft_model.costs)]


def kept_costs_of_model(config: Config, runner: Runner, costs: StepCosts) -> KeptCosts:
    threads = str(config.model.threads)
    return KeptCosts(costs, costs_file(model_key(runner), runner.ops.arithmetic(), threads))


def kv_names(config: Config, target: LoadedModel, draft: LoadedModel | None) -> dict[str, str]:
    """Texts that identify the weights and dtype of the target's and of the draft model's KV."""
    model, kv_dtype = config.model, config.memory.kv_dtype
    kept = model.quantize_head, model.quantize_embedding, kv_dtype
    code, draft_code = (m.config.implementation if m else None for m in (target, draft))
    dtype = draft.dtype if draft else None
    return {
        "target": f"target {config.target} {target.dtype} {(model.quantize, *kept, code)}",
        "draft": f"draft {config.draft} {dtype} {(config.drafter.quantize, *kept, draft_code)}",
    }


def build_guesses(
    config: Config,
    engine: Engine,
    draft_model: DraftModel | None,
    before: Guesses | None = None,
) -> Guesses | None:
    """As the config says; sources that guessed `before` go on with what they know."""
    if config.drafter_name == "none":
        return None
    user_code, num_ids = UserCode(engine.stats), engine.target.decoder.config.vocab_size
    if draft_model is not None:
        num_ids = draft_model.num_ids
    try:
        if config.drafter_name == "auto":
            earlier = before if isinstance(before, PlannedGuesses) else None
            return planned_guesses(config, engine, draft_model, earlier)
        name = config.drafter_name
        lent = engine.head if name == EAGLE else draft_model
        drafter = make_drafter(name, config.drafter.options, lent)
    except DrafterError as e:
        raise ConfigError(str(e)) from e
    return FixedGuesses(name, drafter, engine.scheduler, lent, num_ids, user_code)


def planned_guesses(
    config: Config,
    engine: Engine,
    draft_model: DraftModel | None,
    before: PlannedGuesses | None = None,
) -> PlannedGuesses:
    """From all sources of `drafter.options`; the draft model is one where there is one."""
    options = drafter_options("auto", config.drafter.options)
    sizes = options.max_depth, options.width, options.tau
    run = {EAGLE: engine.head, "model": draft_model}
    growers = [
        Grower(ModelSource(name, model, *sizes, is_kept=model is draft_model), model)
        for name, model in run.items()
        if model is not None and name in options.sources
    ]
    there = {grower.name for grower in growers}
    names = [n for n in dict.fromkeys(options.sources) if n not in run or n in there]
    known = {} if before is None else {source.name: source for source in before.sources}
    sources = [
        known[name]
        if name in known and name in BUILT_IN
        else build_source(name, options.source_options.get(name, {}), engine, draft_model)
        for name in names
        if name not in run
    ]
    refuse_second_executor([s.name for s in sources if lent_to(s)], "model" in there)
    user_code = UserCode(engine.stats)
    lent = engine.scheduler, draft_model, user_code
    return PlannedGuesses(sources, growers, *lent, names, before)


def lent_to(source: Source) -> bool:
    return bool(getattr(getattr(source, "drafter", None), "needs_executor", False))


def refuse_second_executor(names: Sequence[str], is_run: bool) -> None:
    """The draft model runs a request's known tokens for one source in a step, and no other."""
    every = [*names, *(["model"] if is_run else [])]
    if len(every) > 1:
        raise ConfigError(
            f"drafter.options.sources: {' and '.join(every)} would run the draft model in the same "
            "step; leave one of them"
        )


def build_source(
    name: str, options: Mapping[str, Any], engine: Engine, draft_model: DraftModel | None
) -> Source:
    if name == "ngram":
        return OwnSources(ngram_source, name)
    if name == "grammar":
        return GrammarSource()
    if name == "prediction":
        return PredictionSource()
    if name == "suffix":
        return SuffixSource()
    if name == "recycle":
        return RecycleSource()
    drafter = make_drafter(name, options, draft_model, is_source=True)
    return UserSource(name, drafter, engine.target.decoder.config.vocab_size)


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
    """Rows of the draft model that take about as long as one of the target, at least 1."""
    return max(1, target.config.num_layer_weights // draft.config.num_layer_weights)
