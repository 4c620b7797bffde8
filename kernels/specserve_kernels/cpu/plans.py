"""Python bindings of plans.cpp: the state of drafter `auto` from step to step."""

from collections.abc import Callable
from ctypes import CDLL, Structure, c_double, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from specserve_kernels.cpu import build
from specserve_kernels.cpu.drafting import named

MAX_DEPTH = 64  # as in plans.cpp
SUMS = 3 + MAX_DEPTH  # numbers of `SourceSums`
ESTIMATES, SHARES, MODEL = range(3)  # as `Means`


class PlanSettings(Structure):
    """The constants that plans.cpp uses."""

    _fields_ = [
        *((name, c_double) for name in ("free", "free_estimates", "rate", "scope_rate")),
        *((name, c_double) for name in ("exploration", "reinvested", "fade", "at_first")),
        *((name, c_double) for name in ("most_lost", "cold", "lately", "kept_least", "kept_most")),
        ("patience", c_double),
        *((name, c_int64) for name in ("pause", "max_nodes")),
    ]


class ModelRun(Structure):
    """A model that was run in a step: its source, and the seconds that it took."""

    _fields_ = [
        *((name, c_int64) for name in ("source", "is_trial_alone")),
        *((name, c_double) for name in ("seconds", "catching_up")),
    ]


class PlanFunctions(NamedTuple):
    """C functions of plans, tenant scopes and requests. A source is a number."""

    plans: Callable[[Any], int]  # settings -> plans
    free_plans: Callable[[int], None]
    use_source: Callable[[int, int, bool, float], None]  # plans, source, estimates, share of trials
    scope: Callable[[int], int]  # plans -> scope
    free_scope: Callable[[int], None]
    drop_account: Callable[[int, int], None]  # scope, source
    forget: Callable[[int, int], None]  # scope, id
    read_account: Callable[[int, int, int, int], None]  # scope, source, id, [16] double
    set_account: Callable[[int, int, float, float], None]  # scope, source, left, saved
    expect_more: Callable[[int], None]  # scope
    read_scope: Callable[[int, int], None]  # scope, [6] double
    root: Callable[[int, int, bool, int], int]  # scope, id, is sampled, most depth -> root
    free_root: Callable[[int], None]
    bind: Callable[[int, int, int], None]  # root, n, [n, 3] of source, number in tries, means
    set_trie: Callable[[int, int], None]
    # plans, [n, 3] of root, draft limit, has output; n, number of the step, asks always, step,
    # costs, out
    consider: Callable[..., int]
    set_estimates: Callable[..., None]  # plans, source, n, places, expected, seconds of each
    ask: Callable[[int, int], int]  # plans, [n, 3] of place, bits of sources, usual draft tokens
    kept_share: Callable[[int], float]
    promise: Callable[[int, float, float, float], float]  # plans, part, row share, expected
    took: Callable[[int, int, float, bool], None]  # plans, source, seconds, is extension
    note_drafts: Callable[[int, int, int, int], None]  # plans, counts, expected, sources
    price_rows: Callable[..., None]  # step, costs, draft tokens, seconds, [2] double
    # plans, [n, 4] of root, draft tokens, accepted ones, tokens; n, nodes, tokens, seconds saved
    # and of a row, counts, sums
    learn: Callable[..., None]
    note_models: Callable[[int, int], None]  # plans, [n, 2] of bits by root
    settle: Callable[..., None]  # plans, [3] double, models, their number
    clear: Callable[[int], None]


def plan_functions() -> PlanFunctions:
    """Return the functions. BuildError if there is no library."""
    return plan_functions_of(build.library())


@cache
def plan_functions_of(library: CDLL) -> PlanFunctions:
    p, n, x = c_void_p, c_int64, c_double
    return PlanFunctions(
        named(library, "plans", p, p),
        named(library, "free_plans", None, p),
        named(library, "use_source", None, p, n, n, x),
        named(library, "scope", p, p),
        named(library, "free_scope", None, p),
        named(library, "drop_account", None, p, n),
        named(library, "forget_shares", None, p, n),
        named(library, "read_account", None, p, n, n, p),
        named(library, "set_account", None, p, n, x, x),
        named(library, "expect_more", None, p),
        named(library, "read_scope", None, p, p),
        named(library, "root", p, p, n, n, n),
        named(library, "free_root", None, p),
        named(library, "bind_root", None, p, n, p),
        named(library, "set_trie", None, p, p),
        named(library, "consider", n, p, p, n, n, n, p, p, p),
        named(library, "set_estimates", None, p, n, n, p, p, x),
        named(library, "ask_sources", n, p, p),
        named(library, "kept_share", x, p),
        named(library, "promise", x, p, x, x, x),
        named(library, "source_took", None, p, n, x, n),
        named(library, "note_drafts", None, p, p, p, p),
        named(library, "price_rows", None, p, p, n, x, p),
        named(library, "learn", None, p, p, n, p, p, x, x, p, p),
        named(library, "note_models", None, p, p),
        named(library, "settle_step", None, p, p, p, n),
        named(library, "clear_step", None, p),
    )
