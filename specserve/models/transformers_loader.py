"""Loads a model that transformers' modules run, and checks its results against transformers.

The modules' linear maps are packed for specserve's ops; maps that read the same tensor are fused.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from specserve.errors import ConfigError
from specserve.models.checkpoint import IGNORED, Checkpoint
from specserve.models.decoder_config import Shape
from specserve.models.loader import LONGEST
from specserve.models.mtp_config import without_mtp
from specserve.models.parse_config import num_mtp_layers, read_config
from specserve.models.quantized.stored import is_finite
from specserve.models.reader import DTYPES
from specserve.models.row_probe import rows_of, small_program
from specserve.models.transformers_model import (
    NAME,
    AttentionCall,
    Hook,
    LinearMaps,
    Norm,
    PackedHead,
    PackedLinear,
    TransformersModel,
)
from specserve.models.weight import (
    AS_STORED,
    HEAD,
    Rounding,
    Weight,
    check_activations,
    form_of,
    fuse,
    num_bytes,
    with_activations,
)
from specserve.models.weight_forms import MapForm, WeightForms
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import Ops, Rotary

LINEAR = torch.nn.Linear, Conv1D
# Relative tolerance of each value: transformers' norms round to the dtype before multiplying, too.
NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


class Reading(NamedTuple):
    """A call of a linear map: its input, and a copy of the input's values."""

    name: str
    x: Tensor
    copy: Tensor


def linears(causal: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in causal.named_modules() if type(module) in LINEAR]


@contextmanager
def recording(causal: Any) -> Iterator[list[Reading]]:
    """Record calls of linear maps within the block; the maps return constants meanwhile."""
    readings: list[Reading] = []

    def stand_in(name: str, num_columns: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            readings.append(Reading(name, x, x.clone()))
            some = torch.linspace(-1, 1, num_columns, dtype=x.dtype)
            return some.expand(*x.shape[:-1], -1).clone()

        return forward

    for name, linear in linears(causal):
        linear.forward = stand_in(name, len(weight_of(linear)))
    try:
        yield readings
    finally:
        for _, linear in linears(causal):
            del linear.forward


def together(causal: Any, readings: Sequence[Reading], rounding: Rounding) -> list[list[str]]:
    """The names of all linear maps, grouped by the maps to fuse. A group's maps were called once,
    with the same tensor and the same values, and their weights will have the same form.
    """
    times = Counter(reading.name for reading in readings)
    groups: dict[Any, list[str]] = {}
    first: dict[int, Tensor] = {}
    for name, x, copy in readings:
        is_same = torch.equal(copy, first.setdefault(id(x), copy))
        if times[name] == 1 and is_same:
            key = id(x), kind(name, causal.get_submodule(name), rounding)
            groups.setdefault(key, []).append(name)
    found = {name for names in groups.values() for name in names}
    return [*groups.values(), *([name] for name, _ in linears(causal) if name not in found)]


def kind(name: str, linear: Any, rounding: Rounding) -> Any:
    """A key that is equal for maps whose weights can be concatenated."""
    of = name, width(linear)
    asked = rounding.bits(*of), rounding.is_odd(*of), rounding.rounds_rows(*of)
    return linear.weight.dtype, linear.bias is None, asked


def pack(
    causal: Any,
    hook: Hook,
    ops: Ops,
    rounding: Rounding,
    groups: Sequence[Sequence[str]],
    progress: Callable[[int, int], None] | None,
) -> WeightForms:
    """Replace every linear map by a map of the ops, fused per group. Frees the unpacked weights."""
    head = causal.get_output_embeddings()
    forms, num_odd, num_packed, done = Counter[MapForm](), 0, 0, 0
    size = sum(linear.weight.nbytes for _, linear in linears(causal))
    for names in groups:
        parts = [causal.get_submodule(name) for name in names]
        is_head = parts[0] is head
        of = HEAD if is_head else names[0], width(parts[0])
        done += sum(part.weight.nbytes for part in parts)
        weights = [rounded(weight_of(part), rounding, of, ops) for part in parts]
        weight = weights[0] if len(weights) == 1 else fuse(weights, parts[0].weight.dtype)
        del weights
        if ops.rounds_rows:
            weight = with_activations(weight, of[0], rounding.activations)
        num_odd += rounding.is_odd(*of)
        forms[form_of(weight, is_head)] += 1
        num_packed += num_bytes(weight)
        put(causal, hook, ops, names, parts, weight, is_head)
        head = None if is_head else head
        del parts, weight  # before the next ones are packed
        if progress is not None:
            progress(done, size)
    num_packed += sum(parameter.nbytes for parameter in causal.parameters())
    maps = (msgspec.structs.replace(form, number=number) for form, number in forms.items())
    ordered = tuple(sorted(maps, key=lambda form: (form.is_head, form.bits)))
    return WeightForms(ordered, num_packed, num_odd)


def put(
    causal: Any,
    hook: Hook,
    ops: Ops,
    names: Sequence[str],
    parts: Sequence[Any],
    weight: Weight,
    is_head: bool,
) -> None:
    """Replace linear maps by a fused map with this weight."""
    has_bias = parts[0].bias is not None
    bias = ops.place(torch.cat([part.bias.data for part in parts])) if has_bias else None
    if is_head and len(names) == 1:
        causal.set_submodule(names[0], PackedHead(hook, ops, ops.prepack(weight), bias))
        return
    widths = [len(weight_of(part)) for part in parts]
    maps = LinearMaps(hook, ops, ops.prepack(weight), bias, widths)
    for i, name in enumerate(names):
        packed: Any = PackedLinear(maps, i)
        packed.specserve_hook = hook  # all modules of the model have it
        causal.set_submodule(name, packed)


def weight_of(linear: Any) -> Tensor:
    """The weight [out, in]; Conv1D, GPT-2's linear map, stores it transposed."""
    weight: Tensor = linear.weight.data
    return weight.t().contiguous() if type(linear) is Conv1D else weight


def width(linear: Any) -> int:
    return int(linear.weight.shape[0 if type(linear) is Conv1D else 1])


def rounded(weight: Tensor, rounding: Rounding, of: tuple[str, int], ops: Ops) -> Weight:
    """A map's weight, as codes if `rounding` quantizes it; `of` is the map's name and width."""
    bits = rounding.bits(*of)
    if bits is None:
        return weight
    codes = ops.quantize(weight, bits)
    return codes._replace(rounds_rows=ops.rounds_rows and rounding.rounds_rows(*of))


@torch.inference_mode()
def norm_of(module: Any, hook: Hook, ops: Ops) -> Norm | None:
    """An RMSNorm module as one op of specserve instead of six of torch; None for other modules. The
    epsilon is one of the module's float attributes, and 1 may be added to its weight.
    """
    parameters = dict(module.named_parameters(recurse=False))
    weight: Tensor | None = parameters.get("weight")
    if weight is None or len(parameters) > 1 or weight.dim() != 1:
        return None
    takes = inspect.signature(module.forward).parameters
    if len(takes) != 1 or any(module.children()) or weight.dtype not in NORM_TOLERANCE:
        return None
    weight = weight.float()
    candidates = [value for value in vars(module).values() if type(value) is float]
    norms = (
        Norm(hook, ops, module, weight + added, eps) for eps in candidates for added in (0.0, 1.0)
    )
    return next((norm for norm in norms if is_close(module, norm)), None)


def is_close(module: Any, norm: Norm) -> bool:
    """Compare results for rows with and without a mean of 0, and for rows as small as epsilon."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(norm.weight), generator=generator)
    x[0] += 0.5
    for size in (1.0, norm.eps**0.5, 100.0):
        given = (size * x).to(norm.weight.device, norm.dtype)
        want, got = module(given.clone()), norm(given)
        if want.dtype != got.dtype or want.shape != got.shape:
            return False
        tolerance = NORM_TOLERANCE[norm.dtype]
        if not torch.allclose(got.float(), want.float(), rtol=tolerance, atol=1e-30):
            return False
    return True


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative, of a row's logits
CHECKED = 5  # rows that are compared with transformers' attention
FIRST = 2  # number of these rows in the first of two steps
REMEDY = "Use another checkpoint"

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
    """Load the folder's model for requests of up to `max_len` tokens. Raises ConfigError if its
    modules cannot use specserve's attention.
    """
    context = max_len or shape.max_positions
    if max_len is None and context > LONGEST:
        raise ConfigError(
            f"{folder}: RoPE tables for the context of {context} tokens would need gigabytes. Set "
            "scheduler.max_model_len"
        )
    if rounding.embedding is not None:
        raise ConfigError(
            f"{folder}: the embedding of models that transformers runs cannot be quantized. Remove "
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
    forms = pack(causal, hook, ops, rounding, groups, progress)
    check_activations(folder, rounding, ops.rounds_rows, forms)
    causal.to(ops.place(torch.empty(0)).device)
    for module in causal.modules():
        if (norm := norm_of(module, hook, ops)) is not None:
            module.forward = norm
    table = torch.ones(context + TREE_SLOTS, layers[0].key.shape[3] // 2)
    still = Rotary(ops.place(table), ops.place(torch.zeros_like(table)))
    model = TransformersModel(shape, ops, causal, layers, hook, still, forms)
    with refusing(folder):
        check(folder, model)
    return model


def load_modules(folder: Path, shape: Shape, dtype: torch.dtype) -> Any:
    """Load transformers' modules with the checkpoint's weights. Raises ConfigError if weights are
    missing or unused.
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
            f"{folder}: the tensor {name} is missing, but config.json requires it. Download the "
            "model again, or correct config.json"
        )
    number = read_config(folder, num_mtp_layers)
    unexpected = dict.fromkeys(info["unexpected_keys"])
    for name in sorted(without_mtp(unexpected, shape.num_layers, number)):
        if not IGNORED.fullmatch(name):
            raise ConfigError(
                f"{folder}: the tensor {name} is not part of the model that config.json "
                "describes. Correct config.json, or use another checkpoint"
            )
    for name, weight in causal.named_parameters():
        if not is_finite(weight):
            raise Checkpoint(folder).not_finite(name)
    return causal.eval().requires_grad_(False)


def compute_dtype(dtype: str, folder: Path, ops: Ops) -> torch.dtype:
    """The dtype of the activations. Raises ConfigError for quantized weights."""
    checkpoint = Checkpoint(folder)
    stored = {name: checkpoint.dtype(name) for name in checkpoint.files}
    for name, kind in stored.items():
        if kind is None:
            raise ConfigError(
                f"{folder}: the tensor {name} has the dtype {checkpoint.stored(name).dtypes[0]}. "
                "Use an unquantized checkpoint"
            )
    if dtype in DTYPES:
        return DTYPES[dtype]
    is_fp32 = set(stored.values()) == {torch.float32}
    return torch.float32 if is_fp32 or not ops.has_bf16() else torch.bfloat16


def refuse_other_sizes(folder: Path, shape: Shape, config: Any) -> None:
    """Raise ConfigError if transformers reads other sizes from config.json than specserve."""
    for name, ours in (
        ("vocab_size", shape.vocab_size),
        ("num_hidden_layers", shape.num_layers),
        ("hidden_size", shape.hidden_size),
    ):
        if (theirs := getattr(config, name, None)) != ours:
            raise ConfigError(
                f"{folder}/config.json: {name} is {ours}, but transformers reads {theirs}. "
                "Correct the file if it is wrong, or use another checkpoint"
            )


def describe(causal: Any, hook: Hook) -> list[AttentionCall]:
    """Each layer's call of attention, recorded in a forward pass of two tokens."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.query[0].transpose(0, 1).flatten(1)

    hook.attend = attend
    causal.base_model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    return sorted(calls, key=lambda call: call.layer)


def refuse_unfit(folder: Path, shape: Shape, layers: Sequence[AttentionCall], config: Any) -> None:
    """Raise ConfigError for attention that cannot be replaced or that kernels do not support."""

    def refusal(why: str) -> ConfigError:
        return ConfigError(f"{folder}: {shape.architecture} in transformers: {why}. {REMEDY}")

    if [call.layer for call in layers] != list(range(shape.num_layers)):
        raise refusal(
            f"attention can be replaced only in the layers {[call.layer for call in layers]}, not "
            f"in all of {shape.num_layers}"
        )
    for call in layers:
        if call.key.shape[3] != call.value.shape[3]:
            raise refusal("keys and values of different sizes (MLA) are not supported")
    sizes = {(call.query.shape[1], call.key.shape[1], call.key.shape[3]) for call in layers}
    if len(sizes) > 1:
        raise refusal(f"layers with different heads ({sorted(sizes)}) are not supported")
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    windowed = ["sliding_attention"] * len(layers) if kinds is None else kinds
    windows = [window if kind == "sliding_attention" else None for kind in windowed]
    if [call.window for call in layers] != windows:
        raise refusal("layers do not pass the windows of config.json to attention")


def check(folder: Path, model: TransformersModel) -> None:
    """Raise ConfigError if the logits differ from those with transformers' attention."""
    ids = torch.arange(3, 3 + CHECKED) * 7 % model.config.vocab_size
    got, want = paged_logits(model, ids), eager_logits(model, ids)
    error = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
    if not error <= TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{folder}: {model.config.architecture} with paged attention has other logits than "
            f"with transformers' attention (relative error {error:.2g}). {REMEDY}"
        )


def eager_logits(model: TransformersModel, ids: Tensor) -> Tensor:
    """The logits with transformers' attention and specserve's linear maps."""
    causal = model.causal
    causal.set_attn_implementation("eager")
    try:
        found: Tensor = causal(input_ids=model.ops.place(ids)[None], use_cache=False).logits[0]
        return found.float().cpu()
    finally:
        causal.set_attn_implementation(NAME)


def paged_logits(model: TransformersModel, ids: Tensor) -> Tensor:
    """The logits with paged KV, computed in two steps."""
    program, tokens, out = small_program(model, len(ids)), torch.arange(len(ids)), []
    for start, end in ((0, FIRST), (FIRST, len(ids))):
        rows = rows_of([0, end - start], [0, end], tokens[:end], tokens[start:end])
        logits = program.run(rows, ids[start:end], tokens[: end - start]).logits
        assert logits is not None, "all rows are read"
        out.append(logits.float().cpu())
    return torch.cat(out)


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Convert errors of transformers and its modules to ConfigError."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a model's code may raise any error
        reason = str(e).partition("\n")[0]
        raise ConfigError(
            f"{folder}: transformers cannot run the model ({type(e).__name__}: {reason}). {REMEDY}"
        ) from e


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars."""
    bars: Any = transformers_logging
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()
