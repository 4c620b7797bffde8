"""Loads the models of a config, each once, so that engines can share them."""

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from msgspec.structs import replace
from torch import Tensor

from specserve.config import Config, ModelConfig
from specserve.engine.ranks import shard_of
from specserve.errors import ConfigError
from specserve.exchange.phases import Phases
from specserve.models.decoder import Decoder, LoadedModel
from specserve.models.decoder_config import Shape
from specserve.models.draft_head import DraftHead
from specserve.models.eagle_head import load_eagle_head
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.mtp_head import load_mtp_head
from specserve.models.row_probe import differing_rows
from specserve.models.selection import (
    Drafters,
    context_length,
    needs_draft_model,
    resolve_drafters,
    resolve_model,
)
from specserve.models.shard import WHOLE, Shard
from specserve.models.source import is_head, open_source
from specserve.models.storages import storages_of
from specserve.models.weight import AS_STORED, Rounding
from specserve.speculation.head_model import aux_layer_words
from specserve.text.tokenizer import check_same_vocabulary
from specserve_kernels import DeviceError, Ops, Threads, load

log = logging.getLogger("specserve")
Progress = Callable[[str, int, int], None]  # phase, done, total


class ModelKey(NamedTuple):
    """All settings that the weights in memory depend on."""

    folder: str
    device: str
    attention: str
    dtype: str
    max_model_len: int | None
    rounding: Rounding = AS_STORED
    implementation: str = "native"
    shard: Shard = WHOLE


class Model:
    """A loaded model and its choice of threads; any number of engines can share both."""

    def __init__(
        self,
        key: ModelKey,
        load: Callable[[Progress | None], LoadedModel],
        progress: Progress | None = None,
        base: "Model | None" = None,
    ) -> None:
        """`load` reads the model, now and after its memory was released. A head may share tensors
        with its `base`.
        """
        self.key, self.load, self.base, self.decoder = key, load, base, load(progress)
        self.storages = self.storages_in(self.decoder)
        self.engines = WeakSet[Any]()  # that run it
        self.threads: tuple[Threads, str] | None = None  # the choice, and its description
        self.probed = 0  # rows of the largest step that was probed
        self.differing: int | None = None  # result of `differing_rows`
        # Number of ids that a draft model shares with the target.
        self.num_ids: int | None = None

    def storages_in(self, decoder: LoadedModel) -> list[Tensor]:
        """Return the storages of the model in `decoder`, without those of its base."""
        shared = [] if self.base is None else self.base.storages
        known = {x.data_ptr() for x in shared}
        found = storages_of(decoder, but=decoder.ops)
        return [x for x in found if x.data_ptr() not in known]

    @property
    def is_row_invariant(self) -> bool | None:
        """Return whether results are batch-invariant; None without a probe."""
        return None if self.probed == 0 else self.differing is None

    def probe(self, rows: int) -> None:
        """Probe steps of up to so many rows."""
        if self.probed < rows:
            self.differing, self.probed = differing_rows(self.decoder, rows), rows

    @property
    def row_words(self) -> str:
        if self.differing is None:
            return f"batch-invariant in steps of 1 to {self.probed} rows"
        return (
            f"not batch-invariant: steps of {self.differing} and {self.probed} rows differ. "
            "Speculation and prefix caching are off"
        )


class Weights(NamedTuple):
    target: Model
    draft: Model | None
    head: Model | None = None

    @property
    def num_ids(self) -> int | None:
        """Return the number of ids that a drafter may propose; None without a draft model: all
        ids.
        """
        return None if self.draft is None else self.draft.num_ids

    @property
    def folders(self) -> dict[str, list[Path]]:
        """Return where the weights come from that the KV of each model depends on."""
        target = [model for model in (self.target, self.head) if model is not None]
        draft = [] if self.draft is None else [self.draft]
        return {
            name: [Path(model.key.folder) for model in models]
            for name, models in {"target": target, "draft": draft}.items()
        }

    @property
    def draft_head(self) -> DraftHead | None:
        head = None if self.head is None else self.head.decoder
        assert head is None or isinstance(head, DraftHead)
        return head


def load_weights(
    config: Config,
    progress: Progress | None,
    phases: Phases,
    known: Iterable[Model | None],
    first: Drafters | None = None,
) -> Weights:
    """Load a config's models, and the head of the `first` engine process, or of this one.

    A head cannot be added later. It stays loaded while no drafter runs it.
    """
    known, drafters = [*known], resolve_drafters(config)
    weights = load_models(config, drafters, progress, phases, known)
    of_head = first or drafters
    skipped = "The target's multi-token prediction layers are not used: %s"
    if weights.target.is_row_invariant is False:
        return weights
    if of_head.lost_head:
        log.warning(skipped, of_head.lost_head)
    if not of_head.runs_head or of_head.head is None:
        return weights
    try:
        return weights._replace(head=get_head(Path(of_head.head), weights.target, known, phases))
    except ConfigError as e:
        if of_head.needs_head:
            raise
        log.warning(skipped, e)
        return weights


def load_models(
    config: Config,
    drafters: Drafters,
    progress: Progress | None,
    phases: Phases,
    known: Iterable[Model | None],
) -> Weights:
    """Load the target and the draft model of a config; models in `known` are not loaded again."""
    loaded = {model.key: model for model in known if model is not None}

    def get(
        name: str,
        path: Path,
        quantize: str | None,
        implementation: str = "auto",
        shard: Shard = WHOLE,
        activations: str = "auto",
    ) -> Model:
        model, most = config.model, config.scheduler.max_model_len
        heads = model.quantize_head, model.quantize_embedding
        rounding = Rounding.named(quantize, *heads, activations)
        build = model.device, model.attention, model.dtype
        shape = open_source(path).shape(implementation)
        given = rounding, shape.implementation, shard
        key = ModelKey(str(path.resolve()), *build, most, *given)
        if key not in loaded:
            with phases.phase(name):
                load = partial(load_model, path, shape, config, rounding, ops, shard=shard)
                loaded[key] = Model(key, load, progress)
                phases.note(name, loaded[key].decoder.forms.words)
        return loaded[key]

    # Otherwise they came with the models
    with nullcontext() if loaded else phases.phase("kernels"):
        ops = load_ops(config)
    asked, folder = config.model, resolve_model(config)
    shard = shard_of(config)
    given = asked.quantize, asked.implementation, shard, asked.activations
    target = get("target", folder, *given)
    context_length(config, target.decoder.config)  # may raise, so before the next load
    if target.key.implementation == "transformers":  # its code may not be batch-invariant
        probe(target, config.scheduler.max_batched_tokens, phases)
    draft = None
    if needs_draft_model(settled(config, target), drafters) and drafters.draft is not None:
        path = Path(drafters.draft)
        num_ids = num_common_ids(folder, path)  # may raise, so before the load
        # `int8` is only for the target: the draft model may have no codes.
        activations = "float" if asked.activations == "float" else "auto"
        draft = get("draft model", path, config.drafter.quantize, activations=activations)
        sizes = (model.decoder.config.vocab_size for model in (target, draft))
        draft.num_ids = min(num_ids, *sizes)
    return Weights(target, draft)


@lru_cache(maxsize=8)
def num_common_ids(target: Path, draft: Path) -> int:
    """Return the number of ids that both tokenizers have; ConfigError if they differ otherwise."""
    return check_same_vocabulary(*(open_source(path).tokenizer() for path in (target, draft)))


def get_head(folder: Path, target: Model, known: Iterable[Model | None], phases: Phases) -> Model:
    """Load the target's head, unless it is in `known`."""
    key = target.key._replace(
        folder=str(folder.resolve()), implementation=f"head of {target.key.folder}"
    )
    if (loaded := next((m for m in known if m is not None and m.key == key), None)) is not None:
        return loaded
    decoder = target.decoder
    if not isinstance(decoder, Decoder):
        raise ConfigError(
            f"{folder}: the target runs with {target.key.implementation}, but a head needs a "
            "target that runs with native code. Choose another drafter"
        )
    with phases.phase("head"):
        model = Model(key, lambda _: load_head(folder, decoder), base=target)
        head: Any = model.decoder
        words = aux_layer_words(head.aux_layer_ids, decoder.config.num_layers)
        phases.note("head", f"reads {words}; {head.draft_vocab_size} tokens")
    return model


def load_head(folder: Path, target: Decoder) -> DraftHead:
    """Load an EAGLE-3 head, or the target's own MTP layers."""
    return load_eagle_head(folder, target) if is_head(folder) else load_mtp_head(folder, target)


def probe(target: Model, rows: int, phases: Phases) -> None:
    with phases.phase("rows"):
        target.probe(rows)
        phases.note("rows", target.row_words)
    if not target.is_row_invariant:
        log.warning("%s: the model is %s", target.key.folder, target.row_words)


def settled(config: Config, target: Model) -> Config:
    """Return the config with speculation and prefix caching off if the target's results depend on
    the batch, because they could change a text.
    """
    if target.is_row_invariant in (None, True):
        return config
    memory = replace(
        config.memory, prefix_cache=False, host_bytes=0, disk_path=None, disk_bytes=None
    )
    return replace(config, memory=memory, speculation=replace(config.speculation, max_nodes=0))


def load_ops(config: Config, rank: int = 0) -> Ops:
    """Return the build of a rank. Ranks on GPUs have a GPU each."""
    number = rank if config.parallel.size > 1 else None
    try:
        return load(config.model.device, config.model.attention, number)
    except DeviceError as e:
        raise device_refused(config, e) from e


def device_refused(config: Config, e: DeviceError) -> ConfigError:
    asked, attention = f"model.device = {config.model.device!r}", config.model.attention
    if attention != "auto":
        asked += f", model.attention = {attention!r}"
    return ConfigError(f"{asked}: {e}")


def check_device(config: Config) -> None:
    """Raise ConfigError for a GPU that cannot be used, before a model is downloaded for it."""
    if config.model.device not in ("auto", "cpu"):
        load_ops(config)


def load_model(
    folder: Path,
    shape: Shape,
    config: Config,
    rounding: Rounding,
    ops: Ops,
    progress: Progress | None,
    shard: Shard = WHOLE,
) -> LoadedModel:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(folder.name, done, total)

    dtype, most = config.model.dtype, config.scheduler.max_model_len
    if shape.implementation == "native":  # the other sizes are estimates
        needed = num_bytes(folder, shape, dtype, ops, rounding, shard)
        # Of ranks that share a memory, `check_ranks_memory` has reported the sum.
        check_memory(folder, needed, ops, is_reported=not share_memory(config, shard.size, ops))
    try:
        if shape.implementation == "transformers":
            refuse_ranks(folder, shard)
            from specserve.models.transformers_loader import load_transformers  # slow to import

            return load_transformers(folder, shape, dtype, ops, most, report, rounding)
        return load_decoder(folder, dtype, ops, most, report, rounding, shard)
    except torch.OutOfMemoryError as e:
        gib = num_bytes(folder, shape, dtype, ops, rounding, shard) / 2**30
        raise ConfigError(
            f"{folder}: its {gib:.1f} GiB of weights do not fit ({asked_for(e)}). {SMALLER}"
        ) from e


def rounding_of(model: ModelConfig) -> Rounding:
    """Return the rounding of the target model."""
    heads = model.quantize_head, model.quantize_embedding
    return Rounding.named(model.quantize, *heads, model.activations)


def load_target(config: Config, ops: Ops, shard: Shard) -> Decoder:
    """Load a rank's part of the target model."""
    folder, model = resolve_model(config), config.model
    shape = open_source(folder).shape(model.implementation)
    rounding = rounding_of(model)
    loaded = load_model(folder, shape, config, rounding, ops, None, shard)
    assert isinstance(loaded, Decoder), "other implementations have no ranks"
    return loaded


def refuse_ranks(folder: Path, shard: Shard) -> None:
    if shard.size > 1:
        raise ConfigError(
            f"{folder}: this model runs with transformers' modules, which [parallel] does not "
            "support. Set parallel.tensor and parallel.pipeline to 1, or use a model with native "
            "code"
        )


SMALLER = (
    "Free some memory, set model.dtype = 'bf16' or model.quantize = 'w4', or choose a smaller "
    "model or another model.device"
)


def check_memory(folder: Path, needed: int, ops: Ops, is_reported: bool = True) -> None:
    """Report the memory that a model's weights need. Raises ConfigError if less is free."""
    try:
        free = ops.free_memory()
    except DeviceError:  # memory.kv_bytes may be set
        return
    gib, free_gib = needed / 2**30, free / 2**30
    if is_reported:
        log.info("%s: its weights need %.2f GiB, and %.2f GiB are free", folder, gib, free_gib)
    if needed > free:
        raise ConfigError(
            f"{folder}: its weights need {gib:.1f} GiB, but only {free_gib:.1f} GiB are free. "
            f"{SMALLER}"
        )


def check_ranks_memory(config: Config) -> None:
    """Raise ConfigError if the ranks of this machine do not fit into its memory together. Ranks on
    GPUs have a memory each.
    """
    if config.parallel.size == 1 or config.parallel.address is not None:
        return
    ops, folder, model = load_ops(config), resolve_model(config), config.model
    shape = open_source(folder).shape(model.implementation)
    if not share_memory(config, config.parallel.size, ops) or shape.implementation != "native":
        return
    rounding = rounding_of(model)
    shards = [shard_of(config, rank) for rank in range(config.parallel.size)]
    each = (num_bytes(folder, shape, model.dtype, ops, rounding, shard) for shard in shards)
    check_memory(folder, sum(each), ops)


def share_memory(config: Config, num_ranks: int, ops: Ops) -> bool:
    """Return whether several ranks of a model compute with the memory of this machine."""
    is_here = num_ranks > 1 and config.parallel.address is None
    return is_here and not ops.place(torch.empty(0)).is_cuda


def num_bytes(
    folder: Path, shape: Shape, dtype: str, ops: Ops, rounding: Rounding, shard: Shard = WHOLE
) -> int:
    """Return the bytes of a shard's weights; an estimate for parts of a model, and for models that
    transformers loads.
    """
    if shape.implementation == "transformers":
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return weight_bytes(folder, dtype, ops, rounding, shard)


def asked_for(e: BaseException) -> str:
    """Return the sentences of torch's error with the requested and the free memory."""
    return ". ".join(str(e).split(". ")[:3]).strip(" .")
