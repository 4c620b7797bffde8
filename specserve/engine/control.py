"""Other guesses for an engine that runs: loaded beside its steps, put in place between two."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import NamedTuple

import torch

from specserve.config import Config
from specserve.engine.build import (
    Loaded,
    build_guesses,
    kept_costs_of,
    kv_names,
    step_budget,
)
from specserve.engine.engine import Engine
from specserve.engine.loading import Model, Weights, load_models, settled
from specserve.engine.pool_plan import another_draft
from specserve.engine.tuning import tune
from specserve.errors import ConfigError
from specserve.exchange.guessing import NO_HEAD
from specserve.exchange.phases import Phases
from specserve.models.selection import check_drafter, head_sources
from specserve.speculation.draft_model import DraftModel
from specserve_drafters.auto import EAGLE
from specserve_kernels import is_out_of_memory


class Prepared(NamedTuple):
    """Guesses that can be put in place."""

    config: Config
    draft: Model | None
    draft_model: DraftModel | None


class Control:
    """Changes who guesses in one engine; its requests go on, with the same texts."""

    def __init__(self, loaded: Loaded, known: Iterable[Model | None] = ()) -> None:
        """Models in `known` are not loaded again."""
        self.loaded, self.known = loaded, [*known]
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="draft model")
        self.preparing: Future[Prepared] | None = None

    @property
    def engine(self) -> Engine:
        return self.loaded.engine

    def ask(self, config: Config) -> None:
        """Prepare what the config asks for in a thread that uses one core. A niced one would hold
        up steps while it holds the GIL and gets no CPU.
        """
        assert self.preparing is None, "a change comes after the one before is done"
        self.preparing = self.thread.submit(self.prepare_beside_steps, config)

    def wait(self, seconds: float) -> None:
        if self.preparing is not None:
            wait_for([self.preparing], seconds)

    @property
    def is_preparing(self) -> bool:
        return self.preparing is not None

    @property
    def is_due(self) -> bool:
        """Whether `finish` will not have to wait."""
        return self.preparing is not None and self.preparing.done()

    def finish(self) -> None:
        """Put in place what was asked for; between two steps. ConfigError if it cannot be."""
        assert self.preparing is not None, "nothing was asked for"
        prepared, self.preparing = self.preparing, None
        self.put(prepared.result())

    def prepare_beside_steps(self, config: Config) -> Prepared:
        torch.set_num_threads(1)  # of this thread
        return self.prepare(config)

    def prepare(self, config: Config) -> Prepared:
        """Load the draft model, where it is another one; ConfigError if that cannot be used. It may
        run beside steps.
        """
        check_drafter(config)
        if self.engine.head is None and head_sources(config) == [EAGLE]:
            raise ConfigError(NO_HEAD)
        if settled(config, self.loaded.weights.target) != config and config.drafter_name != "none":
            raise ConfigError(
                "there can be no guesses: this model's rows have other bits in other steps (see "
                "row_invariant in GET /v1/models), so that they might change the text"
            )
        weights = load_models(config, None, Phases(), [*self.known, *self.loaded.weights])
        if weights.draft is None or weights.draft is self.loaded.weights.draft:
            kept = None if weights.draft is None else self.engine.draft_model
            return Prepared(config, weights.draft, kept)
        try:
            with torch.inference_mode():
                runner = another_draft(config, self.engine.target.arena, weights.draft.decoder)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            raise ConfigError(f"drafter.model = {config.draft!r}: too little memory ({e})") from e
        assert weights.num_ids is not None, "there is a draft model"
        draft_model = DraftModel(runner, self.engine.scheduler, weights.num_ids)
        return Prepared(config, weights.draft, draft_model)

    def put(self, prepared: Prepared) -> None:
        """Guess so from the next step on. ConfigError, with nothing changed, if it cannot be."""
        config, draft, draft_model = prepared
        engine, weights = self.engine, self.loaded.weights
        guesses = build_guesses(config, engine, draft_model, engine.guesses)
        if draft_model is not engine.draft_model:
            if draft_model is not None and draft is not None:
                runner, most = draft_model.runner, self.loaded.max_model_len
                tune(draft, runner, engine.pool, config, most)
            names = kv_names(config, weights.target.decoder, draft.decoder if draft else None)
            before = None if engine.draft_model is None else engine.draft_model.costs
            others = [kept for kept in engine.kept if kept.costs is not before]
            engine.change_draft_model(draft_model, names if config.memory.prefix_cache else {})
            engine.kept = [*others, *kept_costs_of(config, draft_model)]
        decoders = weights.target.decoder, None if draft is None else draft.decoder
        engine.scheduler.budget = step_budget(config, *decoders)
        engine.change_guesses(guesses)
        self.loaded = self.loaded._replace(
            weights=weights._replace(draft=draft), drafter=config.drafter_name
        )
        self.thread.submit(let_go, weights)  # to free gigabytes takes time

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def let_go(_: Weights) -> None:
    """Hold weights until a thread runs this."""
