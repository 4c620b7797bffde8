"""Sleep: an engine releases the memory of its weights and its KV, and restores it at wake-up."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.engine.build import Loaded
from specserve.engine.cache import stamp_of
from specserve.engine.engine import Engine
from specserve.engine.loading import Model
from specserve.errors import ConfigError
from specserve.exchange.sleep import AWAKE, SLEEP_TAGS, SleepState
from specserve.models.storages import storages_of
from specserve_kernels import Ops, is_out_of_memory

WEIGHTS, KV_CACHE = SLEEP_TAGS
GROUP = 32  # storages that are restored at a time: two copies of them are in memory


class Offloaded(NamedTuple):
    """Released memory of a device, and its contents in host memory."""

    memory: Tensor
    copy: Tensor


class Sleeper:
    """Releases and restores the memory of one engine, which runs no step while it sleeps.

    Level 1 keeps the weights in host memory: on a CPU, they stay where they are. Level 2 drops the
    weights, and reads them again at wake-up. Both drop all KV, so running requests are queued and
    compute it again. Tensors stay the same objects: only their memory leaves and returns.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.ops: Ops = loaded.engine.target.ops
        self.state = AWAKE
        self.adapters: list[Offloaded] = []
        self.weights: list[Offloaded] = []
        self.dropped: list[tuple[Model, str]] = []  # with the stamp of their files

    @torch.inference_mode()
    def sleep(self, loaded: Loaded, level: int) -> SleepState:
        """Release memory, unless it is released already. A sleep never becomes less deep.

        ConfigError, with nothing changed, if another engine of this process runs a model, if host
        memory is missing, or if level 2 could not read the weights again.
        """
        if loaded.engine.followers is not None:
            raise ConfigError("[parallel] does not support sleep. Stop the server instead")
        models = models_of(loaded)
        check_alone(models)
        dropped = stamped(models) if level == 2 and not self.dropped else []
        if WEIGHTS in self.state.tags:
            level = max(level, self.state.level)
        else:
            with naming_memory("sleep. Free some host memory, or sleep at level 2"):
                self.offload(loaded.engine, models if level == 1 else [])
        if KV_CACHE not in self.state.tags:
            self.release_kv(loaded.engine)
        if dropped:
            self.weights, self.dropped = [], dropped
            self.release_dropped()
        self.state = SleepState(level, SLEEP_TAGS)
        return self.state

    @torch.inference_mode()
    def wake_up(self, loaded: Loaded, tags: Collection[str] = SLEEP_TAGS) -> SleepState:
        """Restore the memory of these parts. The engine is awake once all parts are.

        ConfigError for a part that cannot be restored; it still sleeps then.
        """
        with naming_memory("wake up. Free some memory, and retry"):
            if WEIGHTS in tags and WEIGHTS in self.state.tags:
                self.restore_weights()
                self.end_sleep_of(WEIGHTS)
            if KV_CACHE in tags and KV_CACHE in self.state.tags:
                self.ops.renew(arena_of(loaded.engine))
                self.end_sleep_of(KV_CACHE)
        return self.state

    def end_sleep_of(self, tag: str) -> None:
        left = tuple(each for each in self.state.tags if each != tag)
        self.state = SleepState(self.state.level, left) if left else AWAKE

    def release_kv(self, engine: Engine) -> None:
        engine.target.run_updates(engine.pool.updates)  # replays write checkpoints
        engine.scheduler.release_kv()
        if engine.head is not None:
            engine.head.drop()
        engine.target.run_updates(engine.pool.updates)  # stores of evicted blocks
        engine.pool.reset_cache()
        assert engine.pool.is_whole, "a request holds blocks after all were released"
        for runner in (engine.target, *(model.runner for model in engine.draft_models)):
            runner.forget()
        self.ops.release([arena_of(engine)])

    def offload(self, engine: Engine, models: Iterable[Model]) -> None:
        """Move adapters and models from a device to the host."""
        adapters = self.copies(adapter_storages(engine))
        weights = self.copies(x for model in models for x in model.storages)
        self.adapters, self.weights = adapters, weights
        self.ops.release(each.memory for each in (*adapters, *weights))

    def copies(self, memory: Iterable[Tensor]) -> list[Offloaded]:
        """Copy a device's memory to the host; none if it is on the host."""
        each = ((x, self.ops.offload(x)) for x in memory)
        return [Offloaded(x, copy) for x, copy in each if copy is not None]

    def release_dropped(self) -> None:
        for model, _ in self.dropped:
            self.ops.release(model.storages)

    def restore_weights(self) -> None:
        every = [*self.adapters, *self.weights]
        try:
            for memory, copy in every:
                self.ops.renew(memory)
                memory.copy_(copy)
            # The target comes before its head, which shares parts of it.
            for model, stamp in self.dropped:
                self.refill(model.storages, read_again(model, stamp))
        except BaseException:
            self.ops.release(each.memory for each in every)
            self.release_dropped()
            raise
        self.adapters, self.weights, self.dropped = [], [], []

    def refill(self, memory: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
        """Move the contents of fresh storages into released ones."""
        for start in range(0, len(memory), GROUP):
            group = slice(start, start + GROUP)
            for into, source in zip(memory[group], fresh[group], strict=True):
                self.ops.renew(into)
                into.copy_(source)
            self.ops.release(fresh[group])


@contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Raise ConfigError for missing memory within the block: too little to do `what`."""
    try:
        yield
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        raise ConfigError(f"too little memory ({e}) to {what}") from e


def models_of(loaded: Loaded) -> list[Model]:
    return [model for model in loaded.weights if model is not None]


def stamped(models: Iterable[Model]) -> list[tuple[Model, str]]:
    try:
        return [(model, stamp_of(Path(model.key.folder))) for model in models]
    except OSError as e:
        raise ConfigError(f"the weights cannot be read again ({e}). Sleep at level 1") from e


def check_alone(models: Iterable[Model]) -> None:
    for model in models:
        if len(model.engines) > 1:
            raise ConfigError(
                f"{model.key.folder}: another LLM of this process uses these weights. Close it "
                "before this one sleeps"
            )


def arena_of(engine: Engine) -> Tensor:
    return engine.target.arena.blocks.view(-1)


def adapter_storages(engine: Engine) -> list[Tensor]:
    return [] if engine.adapters is None else storages_of(engine.adapters.slots.layers)


def read_again(model: Model, stamp: str) -> list[Tensor]:
    """Read a model, and return its storages. ConfigError if its files have changed: KV in the tiers
    and texts of kept requests belong to the earlier ones.
    """
    folder = model.key.folder
    fresh = model.storages_in(model.load(None))
    if stamp_of(Path(folder)) != stamp or [*map(len, fresh)] != [*map(len, model.storages)]:
        raise ConfigError(
            f"{folder}: the checkpoint has changed since the sleep began. Restore its files, or "
            "start a new engine"
        )
    return fresh
