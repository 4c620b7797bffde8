"""Callers' functions that change logits. They run in this process, on requests without guesses."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specserve.errors import RequestError

LogitsProcessor = Callable[..., Tensor]


class LogitsProcessors:
    """The functions of one request, each called with what the one before it returned.

    A function takes (output ids, logits) or (prompt ids, output ids, logits), the ids as lists and
    the logits [V] as float32 on the host, which it may change in place, and returns logits like
    them. This comes before penalties, biases, masks and temperature. `error` is what a function
    raised, or what was wrong with its result: then the request has to end.
    """

    def __init__(self, functions: Sequence[LogitsProcessor], prompt: Sequence[int]) -> None:
        self.functions = [(f, num_arguments(f)) for f in functions]
        self.prompt = prompt
        self.error: Exception | None = None
        self.failure = ""  # the same in words

    def __call__(self, output: Sequence[int], logits: Tensor) -> Tensor:
        """The logits [V] float32 after all functions; those that were given where one fails."""
        changed = logits.clone()
        try:
            for function, number in self.functions:
                before = changed.shape
                changed = function(*[[*self.prompt], [*output], changed][3 - number :])
                check(changed, before, function)
        except Exception as e:
            self.error, self.failure = e, in_words(e)
            return logits
        return changed.float()


def in_words(error: Exception) -> str:
    try:
        return f"{error!r:.500}"
    except Exception:  # a caller's own class
        return type(error).__name__


def num_arguments(function: Any) -> int:
    """2 or 3; RequestError for anything that cannot be called with so many."""
    if not callable(function):
        raise RequestError(f"logits_processors: {function!r:.100} is no function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some of C's functions tell none
        return 2
    for number in (2, 3):
        try:
            signature.bind(*[None] * number)
        except TypeError:
            continue
        return number
    raise RequestError(
        f"logits_processors: {name_of(function)} has to take (output ids, logits) or (prompt ids, "
        "output ids, logits)"
    )


def check(logits: Any, shape: torch.Size, function: Any) -> None:
    """ValueError unless one token can be drawn by these logits."""
    if not isinstance(logits, Tensor) or logits.shape != shape or not logits.is_floating_point():
        raise ValueError(
            f"{name_of(function)} has to return logits like those it is given, not {logits!r:.100}"
        )
    most = logits.max()
    if most.isnan() or most.isinf():
        raise ValueError(f"{name_of(function)} returned logits whose largest is {most.item()}")


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
