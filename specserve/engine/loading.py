"""Loading the models that a config names, each once, to be shared between engines."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder import Decoder
from specserve.models.loader import load_decoder, weight_bytes
from specserve.models.rounding import AS_STORED, Rounding
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
    rounding: Rounding = AS_STORED


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

    def get(name: str, path: Path, quantize: str | None) -> Model:
        model, most = config.model, config.scheduler.max_model_len
        rounding = Rounding.named(quantize, model.quantize_head, model.quantize_embedding)
        build = model.device, model.attention, model.dtype
        key = ModelKey(str(path.resolve()), *build, most, rounding)
        if key not in loaded:
            with phases.phase(name):
                loaded[key] = Model(load_model(path, config, rounding, ops, progress), key)
                phases.note(name, loaded[key].decoder.weights.forms.words)
        return loaded[key]

    with nullcontext() if loaded else phases.phase("kernels"):  # they came with the models
        ops = load_ops(config)
    target = get("target", resolve_model(config), config.model.quantize)
    context_length(config, target.decoder.config)  # may raise, so before the next load
    if not needs_draft_model(config):
        return Weights(target, None)
    return Weights(target, get("draft model", resolve_draft(config), config.drafter.quantize))


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


def load_model(
    folder: Path, config: Config, rounding: Rounding, ops: Ops, progress: Progress | None
) -> Decoder:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(folder.name, done, total)

    dtype, most = config.model.dtype, config.scheduler.max_model_len
    try:
        return load_decoder(folder, dtype, ops, most, report, rounding)
    except torch.OutOfMemoryError as e:
        gib = weight_bytes(folder, dtype, ops, rounding) / 2**30
        raise ConfigError(
            f"{folder}: its {gib:.1f} GiB of weights do not fit ({asked_for(e)}): free some "
            "memory, set model.dtype = 'bf16' or model.quantize = 'w4', or take a smaller model "
            "or another model.device"
        ) from e


def asked_for(e: BaseException) -> str:
    """The sentences of torch's error that state how much was asked for, and how much was free."""
    return ". ".join(str(e).split(". ")[:3]).strip(" .")
