"""Having our ops compute the linear maps and norms of transformers' modules.

What is found here is found in values and in a recorded forward, never by a family's name.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from specserve.models.transformers_model import Hook, LinearMaps, Norm, PackedHead, PackedLinear
from specserve.models.weight import HEAD, Rounding, Weight, form_of, fuse, num_bytes
from specserve.models.weight_forms import MapForm, WeightForms
from specserve_kernels import Ops

LINEAR = torch.nn.Linear, Conv1D
# Relative, of each value: transformers' norms round to the dtype before they multiply, too.
NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


class PackingTarget(NamedTuple):
    """What computes in place of modules."""

    hook: Hook
    ops: Ops


class Reading(NamedTuple):
    """A call of a linear map: its input, and a copy of what that was."""

    name: str
    x: Tensor
    copy: Tensor


def linears(causal: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in causal.named_modules() if type(module) in LINEAR]


@contextmanager
def recording(causal: Any) -> Iterator[list[Reading]]:
    """The calls of linear maps within it, which do not multiply meanwhile."""
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
    """The names of all linear maps. Those are together that were called once, for the very same
    tensor with the same values, and whose weights will be of one form.
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
    """What is equal for maps whose weights can be one below the other."""
    of = name, width(linear)
    asked = rounding.bits(*of), rounding.is_odd(*of), rounding.rounds_rows(*of)
    return linear.weight.dtype, linear.bias is None, asked


def pack(
    causal: Any,
    target: PackingTarget,
    rounding: Rounding,
    groups: Sequence[Sequence[str]],
    progress: Callable[[int, int], None] | None,
) -> WeightForms:
    """Have the ops compute every linear map, those of a group as one; unpacked weights are freed as
    they are packed.
    """
    head = causal.get_output_embeddings()
    forms, num_odd, num_packed, done = Counter[MapForm](), 0, 0, 0
    size = sum(linear.weight.nbytes for _, linear in linears(causal))
    for names in groups:
        parts = [causal.get_submodule(name) for name in names]
        is_head = parts[0] is head
        of = HEAD if is_head else names[0], width(parts[0])
        done += sum(part.weight.nbytes for part in parts)
        weight = fused_weight(parts, rounding, of, target.ops)
        num_odd += rounding.is_odd(*of)
        forms[form_of(weight, is_head)] += 1
        num_packed += num_bytes(weight)
        put(causal, target, names, parts, weight, is_head)
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
    target: PackingTarget,
    names: Sequence[str],
    parts: Sequence[Any],
    weight: Weight,
    is_head: bool,
) -> None:
    """Replace linear maps by one of this weight."""
    hook, ops = target
    has_bias = parts[0].bias is not None
    bias = ops.place(torch.cat([part.bias.data for part in parts])) if has_bias else None
    if is_head and len(names) == 1:
        causal.set_submodule(names[0], PackedHead(hook, ops, ops.prepack(weight), bias))
        return
    widths = [len(weight_of(part)) for part in parts]
    maps = LinearMaps(hook, ops, ops.prepack(weight), bias, widths)
    for i, name in enumerate(names):
        packed: Any = PackedLinear(maps, i)
        packed.specserve_hook = hook  # as all modules of the model have it
        causal.set_submodule(name, packed)


def fused_weight(
    parts: Sequence[Any],
    rounding: Rounding,
    of: tuple[str, int],
    ops: Ops,
) -> Weight:
    """The weights of maps, one below the other; of a map alone, no copy."""
    weights = [rounded(weight_of(part), rounding, of, ops) for part in parts]
    return weights[0] if len(weights) == 1 else fuse(weights, parts[0].weight.dtype)


def weight_of(linear: Any) -> Tensor:
    """[out, in]; a Conv1D, GPT-2's name for a linear map, has it the other way round."""
    weight: Tensor = linear.weight.data
    return weight.t().contiguous() if type(linear) is Conv1D else weight


def width(linear: Any) -> int:
    return int(linear.weight.shape[0 if type(linear) is Conv1D else 1])


def rounded(weight: Tensor, rounding: Rounding, of: tuple[str, int], ops: Ops) -> Weight:
    """A map's weight, as codes where it is to be rounded; `of` is its name and width there."""
    bits = rounding.bits(*of)
    if bits is None:
        return weight
    codes = ops.quantize(weight, bits)
    return codes._replace(rounds_rows=ops.rounds_rows and rounding.rounds_rows(*of))


def take_norms(causal: Any, target: PackingTarget) -> None:
    """Have the ops compute every module that proves to be an RMSNorm."""
    for module in causal.modules():
        if (norm := norm_of(module, target)) is not None:
            module.forward = norm


@torch.inference_mode()
def norm_of(module: Any, target: PackingTarget) -> Norm | None:
    """The same as our op computes it, in one pass where torch takes six; None for any other module.
    Its epsilon is among its floats, and 1 may be added to its weight.
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
        Norm(*target, module, weight + added, eps) for eps in candidates for added in (0.0, 1.0)
    )
    return next((norm for norm in norms if is_close(module, norm)), None)


def is_close(module: Any, norm: Norm) -> bool:
    """For rows around 0 and beside it, and rows that are as small as epsilon."""
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
