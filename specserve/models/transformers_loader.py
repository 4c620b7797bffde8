"""Loading a model that transformers' own modules compute, and checking that it is computed as
transformers would.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specserve.errors import ConfigError
from specserve.models.checkpoint import IGNORED, Checkpoint
from specserve.models.decoder_config import Shape, num_mtp_layers, read_config
from specserve.models.loader import DTYPES, LONGEST
from specserve.models.mtp_config import without_mtp
from specserve.models.quantized.stored import is_finite
from specserve.models.row_probe import rows_of, small_program
from specserve.models.transformers_model import (
    NAME,
    AttentionCall,
    Hook,
    TransformersModel,
)
from specserve.models.transformers_packing import (
    PackingTarget,
    pack,
    recording,
    take_norms,
    together,
)
from specserve.models.weight import AS_STORED, Rounding
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import Ops, Rotary

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of a row's logits, relative
CHECKED = 5  # rows that transformers' own attention computes, too
FIRST = 2  # of these, those that a step of their own computes
REMEDY = "take another checkpoint"

log = logging.getLogger("specserve")


@torch.inference_mode()
def load_transformers(
    folder: Path,
    shape: Shape,
    dtype: str,
    ops: Ops,
    max_len: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    rounding: Rounding = AS_STORED,
) -> TransformersModel:
    """The folder's model, for requests of up to `max_len` tokens. ConfigError for a model whose
    modules cannot take our attention.
    """
    context = max_len or shape.max_positions
    if max_len is None and context > LONGEST:
        raise ConfigError(
            f"{folder}: its context of {context} tokens would need gigabytes for the positions "
            "alone: set scheduler.max_model_len"
        )
    if rounding.embedding is not None:
        raise ConfigError(
            f"{folder}: transformers computes its embedding, which cannot be rounded: leave out "
            "model.quantize_embedding"
        )
    causal = load_modules(folder, shape, compute_dtype(dtype, folder, ops))
    hook = Hook()
    for module in causal.modules():
        module.specserve_hook = hook
    with refusing(folder), recording(causal) as readings:
        layers = describe(causal, hook)
    refuse_unfit(folder, shape, layers, causal.config)
    groups = together(causal, readings, rounding)
    forms = pack(causal, PackingTarget(hook, ops), rounding, groups, progress)
    causal.to(ops.place(torch.empty(0)).device)
    take_norms(causal, PackingTarget(hook, ops))
    table = torch.ones(context + TREE_SLOTS, layers[0].key.shape[3] // 2)
    still = Rotary(ops.place(table), ops.place(torch.zeros_like(table)))
    model = TransformersModel(shape, ops, causal, layers, hook, still, forms)
    with refusing(folder):
        check(folder, model)
    return model


def load_modules(folder: Path, shape: Shape, dtype: torch.dtype) -> Any:
    """transformers' modules with the checkpoint's weights; ConfigError if some are missing, or have
    no place.
    """
    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    with quiet(), refusing(folder):
        config = AutoConfig.from_pretrained(folder, **local)
        refuse_other_sizes(folder, shape, config)
        load: Any = AutoModelForCausalLM.from_pretrained
        causal, info = load(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            output_loading_info=True,
            **local,
        )
    for name in sorted(info["missing_keys"]):
        raise ConfigError(
            f"{folder}: the tensor {name} is missing, and config.json asks for it; download the "
            "model again, or correct config.json"
        )
    number = read_config(folder, num_mtp_layers)
    unexpected = dict.fromkeys(info["unexpected_keys"])
    for name in sorted(without_mtp(unexpected, shape.num_layers, number)):
        if not IGNORED.fullmatch(name):
            raise ConfigError(
                f"{folder}: the tensor {name} has no place in the model that config.json "
                "describes; correct config.json, or take another checkpoint"
            )
    for name, weight in causal.named_parameters():
        if not is_finite(weight):
            raise Checkpoint(folder).not_finite(name)
    return causal.eval().requires_grad_(False)


def compute_dtype(dtype: str, folder: Path, ops: Ops) -> torch.dtype:
    """The dtype of the activations; ConfigError for weights that are no floats."""
    checkpoint = Checkpoint(folder)
    stored = {name: checkpoint.dtype(name) for name in checkpoint.files}
    for name, kind in stored.items():
        if kind is None:
            raise ConfigError(
                f"{folder}: the tensor {name} has the type {checkpoint.stored(name).dtypes[0]}; "
                "take a checkpoint that is not quantized"
            )
    if dtype in DTYPES:
        return DTYPES[dtype]
    is_fp32 = set(stored.values()) == {torch.float32}
    return torch.float32 if is_fp32 or not ops.has_bf16() else torch.bfloat16


def refuse_other_sizes(folder: Path, shape: Shape, config: Any) -> None:
    """ConfigError where transformers reads config.json otherwise than we do without it."""
    for name, ours in (
        ("vocab_size", shape.vocab_size),
        ("num_hidden_layers", shape.num_layers),
        ("hidden_size", shape.hidden_size),
    ):
        if (theirs := getattr(config, name, None)) != ours:
            raise ConfigError(
                f"{folder}/config.json: {name} is {ours} there, and {theirs} to transformers; "
                "correct the file if it is wrong, or take another checkpoint"
            )


def describe(causal: Any, hook: Hook) -> list[AttentionCall]:
    """What each layer asks of attention, by layer, as a forward of two tokens shows it."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.query[0].transpose(0, 1).flatten(1)

    hook.attend = attend
    causal.base_model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    return sorted(calls, key=lambda call: call.layer)


def refuse_unfit(folder: Path, shape: Shape, layers: Sequence[AttentionCall], config: Any) -> None:
    """ConfigError for attention that is not there, or not as the kernels have it."""

    def refusal(why: str) -> ConfigError:
        return ConfigError(f"{folder}: {shape.architecture} in transformers: {why}; {REMEDY}")

    if [call.layer for call in layers] != list(range(shape.num_layers)):
        raise refusal(
            f"attention can be replaced in the layers {[call.layer for call in layers]}, and has "
            f"to be in each of {shape.num_layers}, once"
        )
    for call in layers:
        if call.key.shape[3] != call.value.shape[3]:
            raise refusal("keys and values of different sizes (MLA) are not supported")
    sizes = {(call.query.shape[1], call.key.shape[1], call.key.shape[3]) for call in layers}
    if len(sizes) > 1:
        raise refusal(f"layers differ in their heads ({sorted(sizes)})")
    if [call.window for call in layers] != expected_windows(config, len(layers)):
        raise refusal("its layers do not tell attention the windows that config.json has")


def expected_windows(config: Any, num_layers: int) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def check(folder: Path, model: TransformersModel) -> None:
    """ConfigError unless the logits are those that transformers' own attention leads to."""
    ids = torch.arange(3, 3 + CHECKED) * 7 % model.config.vocab_size
    got, want = paged_logits(model, ids), eager_logits(model, ids)
    error = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
    if not error <= TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{folder}: {model.config.architecture} over paged KV has other logits than with "
            f"transformers' own attention (they differ by {error:.2g}): its code does more than "
            f"its attention says; {REMEDY}"
        )


def eager_logits(model: TransformersModel, ids: Tensor) -> Tensor:
    """By transformers' attention in transformers' forward, with our linear maps."""
    causal = model.causal
    causal.set_attn_implementation("eager")
    try:
        found: Tensor = causal(input_ids=model.ops.place(ids)[None], use_cache=False).logits[0]
        return found.float().cpu()
    finally:
        causal.set_attn_implementation(NAME)


def paged_logits(model: TransformersModel, ids: Tensor) -> Tensor:
    """In two steps, over paged KV."""
    program, tokens, out = small_program(model, len(ids)), torch.arange(len(ids)), []
    for start, end in ((0, FIRST), (FIRST, len(ids))):
        rows = rows_of([0, end - start], [0, end], tokens[:end], tokens[start:end])
        logits = program.run(rows, ids[start:end], tokens[: end - start]).logits
        assert logits is not None, "all rows are read"
        out.append(logits.float().cpu())
    return torch.cat(out)


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """What transformers or its modules raise comes out as a ConfigError."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # of any model's code, which may raise anything
        reason = str(e).partition("\n")[0]
        raise ConfigError(
            f"{folder}: transformers' modules cannot run it here ({type(e).__name__}: {reason}); "
            f"{REMEDY}"
        ) from e


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    bars: Any = transformers_logging
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()
