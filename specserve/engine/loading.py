"""Loading the models that a config names, each once, to be shared between engines."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder import Decoder
from specserve.models.loader import load_decoder, weight_bytes
from specserve.phases import Phases
from specserve.selection import context_length, needs_draft_model, resolve_draft, resolve_model
from specserve_kernels import DeviceError, Ops, Threads, load

Progress = Callable[[str, int, int], None]  # phase, done, total


class ModelKey(NamedTuple):
    """Everything that the weights in memory depend on."""

    folder: str
    device: str
    attention: str
    dtype: str
    max_model_len: int | None


class Model:
    """A loaded model and its choice of threads; any number of engines can share both."""

    def __init__(self, decoder: Decoder, key: ModelKey) -> None:
        self.decoder, self.key = decoder, key
        self.threads: tuple[Threads, str] | None = None  # the choice, and its description


class Weights(NamedTuple):
    target: Model
    draft: Model | None


def load_weights(
    config: Config, progress: Progress | None, phases: Phases, known: Iterable[Model | None]
) -> Weights:
    """The models that the config needs; those in `known` are not loaded again."""
    loaded = {model.key: model for model in known if model is not None}

    def get(name: str, path: Path) -> Model:
        model, most = config.model, config.scheduler.max_model_len
        key = ModelKey(str(path.resolve()), model.device, model.attention, model.dtype, most)
        if key not in loaded:
            with phases.phase(name):
                loaded[key] = Model(load_model(path, config, ops, progress), key)
        return loaded[key]

    with phases.phase("kernels"):
        ops = load_ops(config)
    target = get("target", resolve_model(config))
    context_length(config, target.decoder.config)  # may raise, so before the next load
    draft = get("draft model", resolve_draft(config)) if needs_draft_model(config) else None
    return Weights(target, draft)


def load_ops(config: Config) -> Ops:
    try:
        return load(config.model.device, config.model.attention)
    except DeviceError as e:
        raise device_refused(config, e) from e


def device_refused(config: Config, e: DeviceError) -> ConfigError:
    asked, attention = f"model.device = {config.model.device!r}", config.model.attention
    if attention != "auto":
        asked += f", model.attention = {attention!r}"
    return ConfigError(f"{asked}: {e}")


def check_device(config: Config) -> None:
    """ConfigError for a GPU that cannot be used, before a model is downloaded for it."""
    if config.model.device not in ("auto", "cpu"):
        load_ops(config)


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
    """The sentences of torch's error that state how much was asked for, and how much was free."""
    return ". ".join(str(e).split(". ")[:3]).strip(" .")
