"""What compressed-tensors asks of activations in config.json; torch is not needed to read it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


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
        if is_int8(weights):
            targets += targets_of(group, scheme is not None and is_int8(scheme))
        if scheme is not None and not (has_plain_rows(weights) and is_by_row(scheme)):
            unmet.append(f"{words(scheme)} beside weights in {kind(weights)}")
        if group.get("output_activations"):
            unmet.append("output activations")
    patterns = [target for target in targets if is_pattern(target.name) and target.group is None]
    if len({target.are_rounded for target in patterns}) > 1:
        unmet.append("activations of 8 bits by some patterns, which are not matched")
    return Activations(tuple(targets), tuple(dict.fromkeys(unmet)))


def targets_of(group: Mapping[str, Any], are_rounded: bool) -> Iterator[ActivationTarget]:
    names, columns = group.get("targets"), columns_of(group.get("weights") or {})
    for name in names if isinstance(names, list) else ():
        yield ActivationTarget(str(name), are_rounded, columns)


def columns_of(weights: Mapping[str, Any]) -> Any:
    """As in ActivationTarget."""
    size = weights.get("group_size")
    return None if size == -1 else size


def is_pattern(target: str) -> bool:
    """Whether it stands for many modules: it is a regular expression, or a class of them."""
    return target.startswith("re:") or ("." not in target and target != "lm_head")


def has_plain_rows(weights: Mapping[str, Any]) -> bool:
    """Whether they are 8-bit integers with a scale a row or a map, and no zero points."""
    return is_int8(weights) and not columns_of(weights) and bool(weights.get("symmetric", True))


def is_int8(numbers: Mapping[str, Any]) -> bool:
    return (numbers.get("type", "int"), numbers.get("num_bits", 8)) == ("int", 8)


def is_by_row(scheme: Mapping[str, Any]) -> bool:
    """Whether activations are rounded just as asked: each row by a scale of its own."""
    is_dynamic = scheme.get("dynamic") is True and scheme.get("strategy") == "token"
    return is_int8(scheme) and is_dynamic and bool(scheme.get("symmetric", True))


def words(scheme: Mapping[str, Any]) -> str:
    time = "dynamic" if scheme.get("dynamic") else "static"
    return f"activations in {kind(scheme)} ({time}, per {scheme.get('strategy') or 'tensor'})"


def kind(numbers: Mapping[str, Any]) -> str:
    name = "floats" if numbers.get("type", "int") == "float" else "integers"
    group = " in groups" * bool(columns_of(numbers))
    zeros = " with zero points" * (not numbers.get("symmetric", True))
    return f"{name} of {numbers.get('num_bits', 8)} bits{group}{zeros}"
