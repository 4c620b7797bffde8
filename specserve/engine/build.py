"""From a config to an engine that is ready to step."""

from collections.abc import Iterable
from typing import NamedTuple

from specserve.config import Config
from specserve.engine.draft_model import DraftModel
from specserve.engine.engine import Engine
from specserve.engine.loading import Model, Progress, Weights, load_weights
from specserve.engine.pool_plan import build_pool, pool_words
from specserve.engine.tuning import tune
from specserve.errors import ConfigError
from specserve.models.decoder import Decoder
from specserve.phases import Phases
from specserve.scheduling import Scheduler
from specserve.scheduling.scheduler import StepBudget
from specserve.selection import check_drafter, context_length
from specserve_drafters import Drafter, DrafterError, make_drafter


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
) -> Loaded:
    """Load the config's models and build an engine; ConfigError says what to change.

    Models in `known`, those of earlier engines, are shared instead of loaded again.
    """
    phases = phases or Phases()
    check_drafter(config)
    weights = load_weights(config, progress, phases, known)
    target, draft = weights
    max_len = context_length(config, target.decoder.config)
    with phases.phase("pool"):
        engine = assemble(config, target.decoder, draft.decoder if draft else None, max_len)
        phases.note("pool", pool_words(config, engine.pool))
    runners = {"target threads": (target, engine.target)}
    if engine.draft_model is not None and draft is not None:
        runners["draft threads"] = draft, engine.draft_model.runner
    for name, (model, runner) in runners.items():
        phases.note(name.replace("threads", "forward"), runner.program.words)
        with phases.phase(name):
            phases.note(name, tune(model, runner, engine.pool, config, max_len))
    return Loaded(engine, weights, max_len, config.drafter_name, phases.table)


def assemble(config: Config, target: Decoder, draft: Decoder | None, max_len: int) -> Engine:
    """An engine for models that are loaded already."""
    runners, pool = build_pool(config, target, draft, max_len)
    scheduler = Scheduler(step_budget(config, target, draft), pool)
    draft_model = DraftModel(runners[1], scheduler) if len(runners) > 1 else None
    drafter = build_drafter(config, draft_model)
    names = kv_names(config, target, draft) if config.memory.prefix_cache else None
    return Engine(runners[0], scheduler, drafter, draft_model, names)


def kv_names(config: Config, target: Decoder, draft: Decoder | None) -> dict[str, str]:
    """Texts that identify the weights and dtype of the target's and of the draft model's KV."""
    model, draft_quantize = config.model, config.drafter.quantize
    rounding = model.quantize, draft_quantize, model.quantize_head, model.quantize_embedding
    kind = f"{rounding} {config.memory.kv_dtype}"
    return {
        "target": f"target {config.target} {target.dtype} {kind}",
        "draft": f"draft {config.draft} {draft.dtype if draft else None} {kind}",
    }


def build_drafter(config: Config, draft_model: DraftModel | None) -> Drafter | None:
    if config.drafter_name == "none":
        return None
    try:
        return make_drafter(config.drafter_name, config.drafter.options, draft_model)
    except DrafterError as e:
        raise ConfigError(str(e)) from e


def step_budget(config: Config, target: Decoder, draft: Decoder | None) -> StepBudget:
    c, has_drafter = config.scheduler, config.drafter_name != "none"
    return StepBudget(
        max_running=c.max_running,
        max_batched_tokens=c.max_batched_tokens,
        prefill_chunk=c.prefill_chunk,
        max_nodes=config.speculation.max_nodes if has_drafter else 0,
        max_step_nodes=config.speculation.max_step_nodes if has_drafter else 0,
        draft_rows_per_row=rows_in_time_of_one(draft, target) if draft else 1,
    )


def rows_in_time_of_one(draft: Decoder, target: Decoder) -> int:
    """Rows of the draft model that take about as long as one of the target, at least 1."""
    return max(1, target.config.num_layer_weights // draft.config.num_layer_weights)
