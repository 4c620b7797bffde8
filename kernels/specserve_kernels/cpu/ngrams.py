"""Python bindings of the n-gram draft source in C++, which `specserve_drafters.lookup` defines."""

from collections.abc import Callable
from ctypes import CDLL, PYFUNCTYPE, Structure, c_double, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from specserve_kernels.cpu import build

LENGTHS, MAX_LENGTH, MAX_NODES = 4, 16, 63  # as in ngrams.cpp


class Settings(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("max_tokens", "at_once", "least_size", "max_matches")),
        *((name, c_int64) for name in ("max_visits", "enough", "sum_every")),
        ("mix", c_int64 * LENGTHS),
        *((name, c_double) for name in ("prior", "memory")),
        ("likely", c_double * (MAX_LENGTH + 1)),
        ("sure", c_double * (MAX_LENGTH + MAX_NODES + 1)),
    ]


class Functions(NamedTuple):
    """C functions. Pointers refer to a source, a text's tokens, and output arrays."""

    new: Callable[..., int]  # settings -> source
    free: Callable[[int], None]
    follow: Callable[[int, int, int, int], float]  # source, id, tokens, how many
    propose: Callable[..., int]  # source, id, tokens, how many, limit, tokens, parents, scores
    forget: Callable[[int, int], None]  # source, id
    reset: Callable[[int], None]


def functions() -> Functions:
    """Return the functions. BuildError if there is no library."""
    return functions_of(build.library())


@cache  # for many sources
def functions_of(library: CDLL) -> Functions:
    text = c_void_p, c_int64, c_void_p, c_int64

    # Calls keep the GIL, because they are shorter than reacquiring it may take.
    def named(name: str, result: Any, *args: Any) -> Any:
        return PYFUNCTYPE(result, *args)((f"specserve_{name}", library))

    return Functions(
        named("ngram_source", c_void_p, c_void_p),
        named("free_ngram_source", None, c_void_p),
        named("follow_text", c_double, *text),
        named("propose_ngrams", c_int64, *text, c_int64, *[c_void_p] * 3),
        named("forget_text", None, c_void_p, c_int64),
        named("reset_ngram_source", None, c_void_p),
    )
