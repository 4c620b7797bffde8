"""Logits processors: callers' functions. They run in this process, on requests without draft
tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specserve.errors import RequestError

LogitsProcessor = Callable[..., Tensor]


class LogitsProcessors:
    """The logits processors of one request; each gets the result of the one before.

    A function takes (output ids, logits) or (prompt ids, output ids, logits), the ids as lists and
    the logits [V] as float32 on the host. It may change the logits in place, and returns logits of
    the same shape. Processors run before penalties, biases, masks and temperature. `error` is an
    exception of a function, or an error in its result: then the request must end.
    """

    def __init__(self, functions: Sequence[LogitsProcessor], prompt: Sequence[int]) -> None:
        self.functions = [(f, num_arguments(f)) for f in functions]
        self.prompt = prompt
        self.error: Exception | None = None
        self.failure = ""  # `error` as a message

    def __call__(self, output: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits [V] float32 after all functions, or the original logits after an
        error.
        """
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
    except Exception:  # the caller's class may fail
        return type(error).__name__


def num_arguments(function: Any) -> int:
    """Return 2 or 3; raise RequestError if the function cannot be called with so many arguments."""
    if not callable(function):
        raise RequestError(
            f"logits_processors: {function!r:.100} is not a function. Pass a callable"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return 2
    for number in (2, 3):
        try:
            signature.bind(*[None] * number)
        except TypeError:
            continue
        return number
    raise RequestError(
        f"logits_processors: {name_of(function)} has the wrong arguments. It must take "
        "(output ids, logits) or (prompt ids, output ids, logits)"
    )


def check(logits: Any, shape: torch.Size, function: Any) -> None:
    """Raise ValueError unless a token can be sampled from these logits."""
    if not isinstance(logits, Tensor) or logits.shape != shape or not logits.is_floating_point():
        raise ValueError(
            f"{name_of(function)} must return logits of the given shape, not {logits!r:.100}"
        )
    most = logits.max()
    if most.isnan() or most.isinf():
        raise ValueError(
            f"{name_of(function)} returned logits with the maximum {most.item()}. It must be finite"
        )


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
