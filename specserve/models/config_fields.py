"""Reads single fields of config.json. Raises ValueError for invalid values."""

from collections.abc import Mapping
from typing import Any

MAX_HEAD_DIM = 512  # limit of the kernels: MAX_D in attention.cpp
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1


def factors(fields: Mapping[str, Any], key: str | None, count: int) -> Any:
    """A list of `count` numbers as a tuple; None: the config has none."""
    values = fields.get(key) if key is not None else None
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{key} = {values!r} is not a list of {count} numbers")
    return tuple(number({f"{key}[{i}]": x}, f"{key}[{i}]") for i, x in enumerate(values))


def layer_sizes(fields: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The numbers of a list with one entry per layer; empty if the field is one number."""
    if not isinstance(fields[key], list):
        return ()
    num_layers = positive(fields, "num_hidden_layers", MAX_LAYERS)
    if len(fields[key]) != num_layers:
        raise ValueError(f"{key} is not a list of {num_layers} entries, one per layer")
    return tuple(positive({key: size}, key) for size in fields[key])


def optional_number(fields: Mapping[str, Any], key: str | None) -> float | None:
    return None if key is None or fields[key] is None else number(fields, key)


def number(fields: Mapping[str, Any], key: str) -> float:
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e6:
        raise ValueError(f"{key} = {value!r} must be a number from 1e-6 to 1e6")
    return float(value)


def either(fixed: bool | None, fields: Mapping[str, Any], key: str) -> bool:
    return flag(fields, key) if fixed is None else fixed


def flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r} must be true or false")
    return value


def positive(fields: Mapping[str, Any], key: str, most: int = MAX_SIZE) -> int:
    value = fields[key]
    if not is_int(value) or not 1 <= value <= most:
        raise ValueError(f"{key} = {value!r} must be a whole number from 1 to {most}")
    return int(value)


def natural(fields: Mapping[str, Any], key: str) -> int:
    return 0 if fields[key] == 0 else positive(fields, key)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
