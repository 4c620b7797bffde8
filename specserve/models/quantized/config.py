"""Parses the quantization of weights and activations in config.json. Does not import torch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec


class ActivationTarget(NamedTuple):
    """The quantization of activations for some maps with 8-bit integer weights."""

    name: str  # a module's name, or a pattern
    are_rounded: bool  # activations are quantized to 8-bit integers
    group: int | None  # columns per scale of the weight; None: whole rows


class Activations(NamedTuple):
    targets: tuple[ActivationTarget, ...] = ()
    unmet: tuple[str, ...] = ()  # descriptions of requirements that specserve does not follow

    def rounds(self, module: str, width: int) -> bool:
        """Whether activations of a map with 8-bit integer weights are 8-bit integers, too.

        A target with the module's name decides, else all patterns must agree. Patterns are not
        matched against the name.
        """
        told = [target for target in self.targets if target.group in (None, width)]
        named = [target.are_rounded for target in told if target.name == module]
        found = named or [target.are_rounded for target in told if is_pattern(target.name)]
        return bool(found) and all(found)

    def unmet_by(self, num_rounding: int) -> tuple[str, ...]:
        """The requirements that a model does not follow, if `num_rounding` of its maps quantize
        activations.
        """
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
            unmet.append(f"activations in {kind(scheme)} {how} with weights in {kind(weights)}")
        if group.get("output_activations"):
            unmet.append("output activations")
    patterns = [target for target in targets if is_pattern(target.name) and target.group is None]
    if len({target.are_rounded for target in patterns}) > 1:
        unmet.append("activations of 8 bits by some patterns, which are not matched")
    return Activations(tuple(targets), tuple(dict.fromkeys(unmet)))


def columns_of(weights: Mapping[str, Any]) -> Any:
    """`group` of ActivationTarget."""
    size = weights.get("group_size")
    return None if size == -1 else size


def is_pattern(target: str) -> bool:
    """Whether a target is a regular expression or a class of modules, not one module."""
    return target.startswith("re:") or ("." not in target and target != "lm_head")


def is_int8(numbers: Mapping[str, Any]) -> bool:
    return (numbers.get("type", "int"), numbers.get("num_bits", 8)) == ("int", 8)


def are_row_codes(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> bool:
    """Whether specserve follows a scheme exactly. Both must be 8-bit integers without zero points,
    with one weight scale per row or map, and dynamic activation scales per row.
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
    """The stored form of quantized linear maps; their tensors show which maps are quantized."""

    method: str  # a key of METHODS
    bits: int | None = None  # per integer; None: the tensors show it
    group: int | None = None  # columns that share a scale; None: the tensors show it
    # Whether every zero point is the middle of the range, so that stored zero points are ignored.
    is_symmetric: bool = False
    # GPTQ's first format stores zero points minus one.
    has_zeros_less_one: bool = False
    block: tuple[int, int] | None = None  # rows and columns that share a scale, for 8-bit floats
    activations: Activations = Activations()

    @property
    def words(self) -> str:
        bits = f", {self.bits} bits" if self.bits else ""
        group = f" in groups of {self.group}" if self.group else ""
        return f"{self.method}{bits}{group}"


def parse(written: Mapping[str, Any]) -> Quantization | None:
    """The quantization in a config.json, or None. Raises ValueError if it is not supported."""
    key = "compression_config" if written.get("compression_config") else "quantization_config"
    fields = written.get(key)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise ValueError(f"{key} = {fields!r} is not an object")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"{key}.quant_method = {method!r} is not supported, only {known}")
    try:
        return METHODS[method](fields)
    except ValueError as e:
        raise ValueError(f"{key}.{e}") from e


def gptq(fields: Mapping[str, Any]) -> Quantization:
    key = "checkpoint_format" if fields.get("checkpoint_format") else "format"
    form = one_of(fields, key, "gptq", "gptq_v2")
    rules = fields.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        raise ValueError("dynamic: settings per module are not supported")
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
    """The field `weights` of each group of modules."""
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError(f"config_groups = {groups!r} is not an object of objects")
    weights = [g.get("weights") or {} for g in groups.values()]
    if not all(isinstance(w, dict) for w in weights):
        raise ValueError("config_groups: weights is not an object")
    return weights


def compressed_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block size of a group of modules. Raises ValueError for unsupported weights."""
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise ValueError(
            f"config_groups: weights of type {kind!r} and {bits!r} bits are not supported, only "
            "integers of 4 or 8 bits and floats of 8 bits"
        )
    return block(weights, "block_structure")


def fp8(fields: Mapping[str, Any]) -> Quantization:
    one_of(fields, "fmt", "e4m3")
    refuse(fields, "kv_cache_scheme")
    # transformers' default. A scale for a whole map is recognized by its shape.
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
    """A field's value, which must be in `allowed`; the first of these if it is null or missing."""
    value = allowed[0] if fields.get(name) is None else fields[name]
    if not any(value == a and type(value) is type(a) for a in allowed):
        known = ", ".join(map(str, allowed))
        raise ValueError(f"{name} = {value!r} is not supported, only {known}")
    return value


def group(fields: Mapping[str, Any], name: str) -> int | None:
    """The number of columns that share a scale; None for -1, i.e. all columns."""
    value = fields.get(name, 128)
    if value == -1:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r} must be -1 or a positive integer")
    return value


def block(fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    value = fields.get(name)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(n) is int and n > 0 for n in value):
        raise ValueError(f"{name} = {value!r} must be a pair of positive integers")
    return value[0], value[1]
