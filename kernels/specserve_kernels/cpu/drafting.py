"""Python bindings of drafting in C++: the n-gram source, which `specserve_drafters.lookup` defines,
lookups in earlier outputs, which `specserve_drafters.suffix` defines, and tries, which
`specserve_drafters.trie` defines.
"""

from collections.abc import Callable
from ctypes import (
    CDLL,
    POINTER,
    PYFUNCTYPE,
    Structure,
    c_double,
    c_int32,
    c_int64,
    c_void_p,
)
from functools import cache
from typing import Any, NamedTuple

from specserve_kernels.cpu import build

LENGTHS, MAX_LENGTH, MAX_NODES = 4, 16, 63  # as in ngrams.cpp
NUM_BOUNDS = 10  # as in tries.cpp
LONGEST = 16  # as in suffixes.cpp


class NgramSettings(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("max_tokens", "at_once", "least_size", "max_matches")),
        *((name, c_int64) for name in ("max_visits", "enough", "sum_every")),
        ("mix", c_int64 * LENGTHS),
        *((name, c_double) for name in ("prior", "memory")),
        ("likely", c_double * (MAX_LENGTH + 1)),
        ("sure", c_double * (MAX_LENGTH + MAX_NODES + 1)),
    ]


class NgramFunctions(NamedTuple):
    """C functions of the n-gram source. Pointers refer to a source, a text's tokens, and output
    arrays.
    """

    new: Callable[..., int]  # settings -> source
    free: Callable[[int], None]
    follow: Callable[[int, int, int, int], float]  # source, id, tokens, how many -> expected ones
    propose: Callable[..., int]  # source, id, tokens, how many, limit, tokens, parents, scores
    forget: Callable[[int, int], None]  # source, id
    reset: Callable[[int], None]
    native: Callable[[int], int]  # source -> source that plans.cpp asks


def ngram_functions() -> NgramFunctions:
    """Return the functions. BuildError if there is no library."""
    return ngram_functions_of(build.library())


def named(library: CDLL, name: str, result: Any, *args: Any) -> Any:
    # Calls keep the GIL, because they are shorter than reacquiring it may take.
    return PYFUNCTYPE(result, *args)((f"specserve_{name}", library))


@cache  # for many sources
def ngram_functions_of(library: CDLL) -> NgramFunctions:
    text = c_void_p, c_int64, c_void_p, c_int64
    return NgramFunctions(
        named(library, "ngram_source", c_void_p, c_void_p),
        named(library, "free_ngram_source", None, c_void_p),
        named(library, "follow_text", c_double, *text),
        named(library, "propose_ngrams", c_int64, *text, c_int64, *[c_void_p] * 3),
        named(library, "forget_text", None, c_void_p, c_int64),
        named(library, "reset_ngram_source", None, c_void_p),
        named(library, "native_source", c_void_p, c_void_p),
    )


class SuffixSettings(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("end", "max_matches", "max_visits")),
        ("lengths", c_int64 * LENGTHS),
        ("mix", c_int64 * LONGEST),
        ("sure", c_double * (MAX_LENGTH + MAX_NODES + 1)),
    ]


class OutputsPart(Structure):
    """Addresses of the columns of a part of earlier outputs, and its number of slots."""

    _fields_ = [("tokens", c_void_p), ("newest", c_void_p * LENGTHS)]
    _fields_ += [("before", c_void_p * LENGTHS), ("size", c_int64)]


class SuffixFunctions(NamedTuple):
    """C functions of lookups in earlier outputs. Arguments: settings, parts, how many, the text's
    last tokens, how many, then as given.
    """

    match: Callable[..., int]  # most, places -> 64 * their number + their length
    propose: Callable[..., int]  # limit, tokens, parents, scores -> their number


def suffix_functions() -> SuffixFunctions:
    """Return the functions. BuildError if there is no library."""
    return suffix_functions_of(build.library())


@cache
def suffix_functions_of(library: CDLL) -> SuffixFunctions:
    p, n = c_void_p, c_int64
    return SuffixFunctions(
        named(library, "match_outputs", n, p, p, n, p, n, n, p),
        named(library, "propose_outputs", n, p, p, n, p, n, n, p, p, p),
    )


class TrieSettings(Structure):
    _fields_ = [
        ("bounds", c_double * NUM_BOUNDS),
        *((name, c_double) for name in ("least", "most", "unscored", "finds")),
        *((name, c_double) for name in ("prior", "memory", "shift_prior", "shift_memory")),
        *((name, c_double) for name in ("max_shift", "worth", "worth_rate")),
    ]


class TrieColumns(Structure):
    """Addresses of a trie's columns, with a value per node until the next change."""

    _fields_ = [
        *((name, POINTER(c_int32)) for name in ("tokens", "parents", "depths", "expanded")),
        *((name, POINTER(c_double)) for name in ("p", "values")),
    ]


class LevelColumns(Structure):
    """Addresses of the children of nodes that a model has run."""

    _fields_ = [
        *((name, c_void_p) for name in ("before", "values", "reaches")),
        *((name, c_void_p) for name in ("num_likely", "num_children", "children")),
    ]


class CostColumns(Structure):
    """Estimated seconds of a model's steps. Pointers refer to arrays: of C's double by number of
    rows, of 64-bit integers, and of bytes by edge.
    """

    _fields_ = [
        *((name, c_void_p) for name in ("by_rows", "least_by_rows", "edges", "known", "few")),
        *((name, c_int64) for name in ("last_row", "num_edges", "num_few", "fine")),
        *((name, c_double) for name in ("per_token", "per_row", "per_request", "slowdown")),
        ("by_edge", c_void_p),
        *((name, c_int64) for name in ("num_steps", "has_steps")),
    ]


class CostSettings(Structure):
    """The constants that costs.cpp uses."""

    _fields_ = [
        *((name, c_double) for name in ("first_seconds", "least_seconds", "ridge", "hoped")),
        *((name, c_double) for name in ("hope", "prior", "least_share", "changed", "wrong")),
        ("too_high", c_double),
        *((name, c_int64) for name in ("window", "rank", "known", "recent", "tile", "fine")),
        *((name, c_int64) for name in ("band", "long_ago", "fit_every", "stale")),
    ]


class CostFunctions(NamedTuple):
    """C functions of estimated step times."""

    costs: Callable[..., int]  # settings, edges, n, few, n, seconds of a token -> costs
    free: Callable[[int], None]
    columns: Callable[[int], int]  # costs -> columns
    reset: Callable[[int], None]
    # costs, rows, context, attended, requests, seconds
    observe: Callable[[int, int, float, float, float, float], None]
    begin: Callable[[int, int, int], None]  # costs, [n, 5] of edge and sample; n first
    doubt: Callable[[int], None]
    points: Callable[[int, int, int | None], int]  # costs, room, out -> number of points
    is_stale: Callable[[int, int], int]
    of: Callable[[int, int, float, float, float, bool], float]  # columns, as `observe`, is hopeful
    of_each: Callable[..., None]  # columns, step, n, sizes, is hopeful, out


def cost_functions() -> CostFunctions:
    """Return the functions. BuildError if there is no library."""
    return cost_functions_of(build.library())


@cache
def cost_functions_of(library: CDLL) -> CostFunctions:
    p, n, x = c_void_p, c_int64, c_double
    return CostFunctions(
        named(library, "costs", p, p, p, n, p, n, x),
        named(library, "free_costs", None, p),
        named(library, "cost_columns", p, p),
        named(library, "reset_costs", None, p),
        named(library, "observe_step", None, p, n, x, x, x, x),
        named(library, "begin_costs", None, p, n, p),
        named(library, "doubt_costs", None, p),
        named(library, "cost_points", n, p, n, p),
        named(library, "is_stale", n, p, n),
        named(library, "cost_of", x, p, n, x, x, x, n),
        named(library, "cost_of_each", None, p, p, n, p, n, p),
    )


class StepFields(Structure):
    """A step before its draft tokens are chosen."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "num_roots", "prompt_rows")),
        *((name, c_double) for name in ("context", "requests", "attended", "root_context")),
        *((name, c_double) for name in ("spent", "allowed", "kept")),
    ]


class TrieFunctions(NamedTuple):
    """C functions of tries and calibrations. A source is its number in its calibration."""

    calibration: Callable[[Any], int]  # settings -> calibration
    free_calibration: Callable[[int], None]
    add_source: Callable[[int], int]
    clear_bins: Callable[[int, int], None]  # calibration, source
    set_bin: Callable[..., None]  # calibration, source, bin, tries, hits, scores
    read_bins: Callable[[int, int, int], None]  # calibration, source, [bins, 3] double
    calibrators: Callable[[int], int]  # calibration -> calibrators of a request
    free_calibrators: Callable[[int], None]
    drop_shift: Callable[[int, int], None]  # calibrators, source
    trie: Callable[[int, int], int]  # calibrators, number of ids -> trie
    free_trie: Callable[[int], None]
    size: Callable[[int], int]
    columns: Callable[[int, Any], None]
    add: Callable[..., int]  # trie, parent, token, p, source
    merge: Callable[..., None]  # trie, source, n, tokens, parents, p, expanded, below, nodes
    branch: Callable[..., int]  # trie, node, source, n, tokens, p, room, values before
    # [n, 4] of trie, node, source, source of children; n, k, tokens, log p, least value, room,
    # columns -> children that existed before
    branch_each: Callable[..., int]
    set_number: Callable[[int, int, int], None]  # trie, node, number
    reaches: Callable[..., None]  # trie, n, nodes, source of children, out
    ask: Callable[[int, int, int, int], None]  # trie, node, source of children, source
    child: Callable[[int, int, int], int]  # trie, node, token
    children: Callable[[int, int, int, int], int]  # trie, node, room, out
    sources: Callable[[int, int, int, int], int]  # trie, node, room, out


def trie_functions() -> TrieFunctions:
    """Return the functions. BuildError if there is no library."""
    return trie_functions_of(build.library())


@cache
def trie_functions_of(library: CDLL) -> TrieFunctions:
    p, n, x = c_void_p, c_int64, c_double
    return TrieFunctions(
        named(library, "calibration", p, p),
        named(library, "free_calibration", None, p),
        named(library, "add_source", n, p),
        named(library, "clear_bins", None, p, n),
        named(library, "set_bin", None, p, n, n, x, x, x),
        named(library, "read_bins", None, p, n, p),
        named(library, "calibrators", p, p),
        named(library, "free_calibrators", None, p),
        named(library, "drop_shift", None, p, n),
        named(library, "trie", p, p, n),
        named(library, "free_trie", None, p),
        named(library, "trie_size", n, p),
        named(library, "trie_columns", None, p, p),
        named(library, "add_token", n, p, n, n, x, n),
        named(library, "merge", None, p, n, n, p, p, p, p, n, p),
        named(library, "branch", n, p, n, n, n, p, p, n, p),
        named(library, "branch_each", n, p, n, n, p, p, x, n, p),
        named(library, "number_node", None, p, n, n),
        named(library, "reaches", None, p, n, p, n, p),
        named(library, "ask", None, p, n, n, n),
        named(library, "child", n, p, n, n),
        named(library, "children", n, p, n, n, p),
        named(library, "sources", n, p, n, n, p),
    )
