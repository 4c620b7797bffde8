"""What a config.json says of its quantized weights and of activations. Does not import torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec


class ActivationTarget(NamedTuple):
    """What is asked of the activations of some maps with 8-bit integers."""

    name: str  # a module's, or a pattern
    are_rounded: bool  # to 8-bit integers, too
    group: int | None  # columns that share a scale of the weight; None: whole rows


class Activations(NamedTuple):
    targets: tuple[ActivationTarget, ...] = ()
    unmet: tuple[str, ...] = ()  # what is asked, in words, if it is not computed just so

    def rounds(self, module: str, width: int) -> bool:
        """Whether activations of a map with 8-bit integers in rows are such integers, too.

        As its name says; without one as all patterns say, which are not matched.
        """
        told = [target for target in self.targets if target.group in (None, width)]
        named = [target.are_rounded for target in told if target.name == module]
        found = named or [target.are_rounded for target in told if is_pattern(target.name)]
        return bool(found) and all(found)

    def unmet_by(self, num_rounding: int) -> tuple[str, ...]:
        """What of it a model does not compute just so, in which so many maps round activations."""
        if any(target.are_rounded for target in self.targets) and not num_rounding:
            return self.unmet or ("activations in integers of 8 bits",)
        return self.unmet


def read_activations(groups: Iterable[Mapping[str, Any]]) -> Activations:
    targets: list[ActivationTarget] = []
    unmet: list[str] = []
    for group in groups:
        found, weights = group.get("input_activations"), group.get("weights") or {}
        scheme: Mapping[str, Any] | None = found if isinstance(found, dict) else None
        names = group.get("targets")
        if is_int8(weights) and isinstance(names, list):
            are_rounded, columns = scheme is not None and is_int8(scheme), columns_of(weights)
            targets += [ActivationTarget(str(name), are_rounded, columns) for name in names]
        if scheme is not None and not are_row_codes(weights, scheme):
            time = "dynamic" if scheme.get("dynamic") else "static"
            how = f"({time}, per {scheme.get('strategy') or 'tensor'})"
            unmet.append(f"activations in {kind(scheme)} {how} beside weights in {kind(weights)}")
        if group.get("output_activations"):
            unmet.append("output activations")
    patterns = [target for target in targets if is_pattern(target.name) and target.group is None]
    if len({target.are_rounded for target in patterns}) > 1:
        unmet.append("activations of 8 bits by some patterns, which are not matched")
    return Activations(tuple(targets), tuple(dict.fromkeys(unmet)))


def columns_of(weights: Mapping[str, Any]) -> Any:
    """As in ActivationTarget."""
    size = weights.get("group_size")
    return None if size == -1 else size


def is_pattern(target: str) -> bool:
    """Whether it stands for many modules: it is a regular expression, or a class of them."""
    return target.startswith("re:") or ("." not in target and target != "lm_head")


def is_int8(numbers: Mapping[str, Any]) -> bool:
    return (numbers.get("type", "int"), numbers.get("num_bits", 8)) == ("int", 8)


def are_row_codes(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> bool:
    """Whether both are 8-bit integers without zero points, weights with a scale a row or a map, and
    activations with a scale of each row's own: they are computed just as asked.
    """
    is_dynamic = activations.get("dynamic") is True and activations.get("strategy") == "token"
    both = weights, activations
    are_plain = all(is_int8(numbers) and numbers.get("symmetric", True) for numbers in both)
    return are_plain and is_dynamic and not columns_of(weights)


def kind(numbers: Mapping[str, Any]) -> str:
    name = "floats" if numbers.get("type", "int") == "float" else "integers"
    group = " in groups" * bool(columns_of(numbers))
    zeros = " with zero points" * (not numbers.get("symmetric", True))
    return f"{name} of {numbers.get('num_bits', 8)} bits{group}{zeros}"


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How linear maps are stored. Which of them are is seen by their tensors."""

    method: str  # of METHODS
    bits: int | None = None  # of an integer; None: the tensors tell
    group: int | None = None  # columns that share a scale; None: the tensors tell
    # Whether every zero point is half of the range, so that what the file says is not needed.
    is_symmetric: bool = False
    # GPTQ's first form stores a zero point less one.
    has_zeros_less_one: bool = False
    block: tuple[int, int] | None = None  # rows and columns that share a scale, of 8-bit floats
    activations: Activations = Activations()

    @property
    def words(self) -> str:
        bits = f", {self.bits} bits" if self.bits else ""
        group = f" in groups of {self.group}" if self.group else ""
        return f"{self.method}{bits}{group}"


def parse(written: Mapping[str, Any]) -> Quantization | None:
    """The quantization of a config.json, or None; ValueError says what is not supported."""
    key = "compression_config" if written.get("compression_config") else "quantization_config"
    fields = written.get(key)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise ValueError(f"{key} = {fields!r} is no object")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"{key}.quant_method = {method!r} is not supported: {known} are")
    try:
        return METHODS[method](fields)
    except ValueError as e:
        raise ValueError(f"{key}.{e}") from e


def gptq(fields: Mapping[str, Any]) -> Quantization:
    key = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    form = one_of(fields, key, "gptq", "gptq_v2")
    rules = fields.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        raise ValueError("dynamic: modules with settings of their own are not supported")
    return Quantization(
        method="gptq",
        bits=one_of(fields, "bits", 4, 8),
        group=group(fields, "group_size"),
        is_symmetric=one_of(fields, "sym", True, False),
        has_zeros_less_one=form == "gptq",
    )


def awq(fields: Mapping[str, Any]) -> Quantization:
    one_of(fields, "version", "gemm", "GEMM")
    bits = one_of(fields, "bits", 4)
    return Quantization(method="awq", bits=bits, group=group(fields, "group_size"))


def compressed_tensors(fields: Mapping[str, Any]) -> Quantization:
    one_of(fields, "format", *COMPRESSED)
    refuse(fields, "kv_cache_scheme", "transform_config")
    sparsity = fields.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config.format = {sparsity['format']!r} is not supported")
    blocks = {compressed_block(weights) for weights in compressed_weights(fields)}
    if len(blocks) > 1:
        raise ValueError("config_groups: blocks of several sizes are not supported")
    return Quantization(
        method="compressed-tensors",
        block=blocks.pop() if blocks else None,
        activations=read_activations(fields["config_groups"].values()),
    )


def compressed_weights(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said of the weights of each group of modules."""
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError(f"config_groups = {groups!r} is no object of objects")
    weights = [g.get("weights") or {} for g in groups.values()]
    if not all(isinstance(w, dict) for w in weights):
        raise ValueError("config_groups: weights is no object")
    return weights


def compressed_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of a group of modules. ValueError for weights that no reader here reads."""
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ValueError(
            f"config_groups: weights of type {kind!r} and {bits!r} bits are not supported: "
            "integers of 4 and 8 bits and floats of 8 are"
        )
    return block(weights, "block_structure")


def fp8(fields: Mapping[str, Any]) -> Quantization:
    one_of(fields, "fmt", "e4m3")
    refuse(fields, "kv_cache_scheme")
    # transformers' own default. Scales for a whole map are told by their shape.
    blocks = {"weight_block_size": [128, 128], **fields}
    scheme = fields.get("activation_scheme") or "dynamic"
    return Quantization(
        method="fp8",
        block=block(blocks, "weight_block_size"),
        activations=Activations(unmet=(f"activations in floats of 8 bits ({scheme})",)),
    )


COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "fp8": fp8,
    "mxfp4": lambda fields: Quantization(method="mxfp4", bits=4, group=32),
}


def refuse(fields: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if fields.get(name):
            raise ValueError(f"{name} is not supported")


def one_of(fields: Mapping[str, Any], name: str, *allowed: Any) -> Any:
    """A field that has one of some values; the first of them where it is null or not written."""
    value = allowed[0] if fields.get(name) is None else fields[name]
    if not any(value == a and type(value) is type(a) for a in allowed):
        known = ", ".join(map(str, allowed))
        raise ValueError(f"{name} = {value!r} is not supported: {known}")
    return value


def group(fields: Mapping[str, Any], name: str) -> int | None:
    """The columns that share a scale; None for -1, which means all of them."""
    value = fields.get(name, 128)
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r} is neither -1 nor a whole number from 1 on")
    return value


def block(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    value = fields.get(name)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"{name} = {value!r} is no pair of whole numbers from 1 on")
    return value[0], value[1]
