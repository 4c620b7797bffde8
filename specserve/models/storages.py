"""The memory of a loaded model: every storage of its tensors, in a fixed order."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def storages_of(root: Any, but: Any = None) -> list[Tensor]:
    """Return the storages of all tensors that an object refers to: each once, as [num_bytes] uint8.

    Equal objects give equal orders. The search does not enter `but`, modules and classes.
    """
    found, seen, pending = dict[int, Tensor](), {id(but)}, [root]
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), bytes_of(value))
        else:
            pending += parts_of(value)
    return [*found.values()]


def parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple):
        return [*value]
    return [*getattr(value, "__dict__", {}).values()]


def bytes_of(x: Tensor) -> Tensor:
    """Return the whole storage of a tensor, [num_bytes] uint8."""
    whole = torch.empty(0, dtype=torch.uint8, device=x.device)
    return whole.set_(x.untyped_storage())
