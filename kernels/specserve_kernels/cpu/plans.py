"""Python bindings of plans.cpp: the state of drafter `auto` from step to step."""

from collections.abc import Callable
from ctypes import CDLL, POINTER, Structure, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from specserve_kernels.cpu import build
from specserve_kernels.cpu.drafting import named

ESTIMATES, SHARES, MODEL = range(3)  # as `Means`


class PlanSettings(Structure):
    """The constants that plans.cpp uses."""

    _fields_ = [
        *((name, c_double) for name in ("free", "free_estimates", "rate", "scope_rate")),
        *((name, c_double) for name in ("exploration", "reinvested", "fade", "at_first")),
        *((name, c_double) for name in ("most_lost", "cold", "lately", "kept_least", "kept_most")),
        *((name, c_double) for name in ("patience", "least_value", "least_expected")),
        *((name, c_int64) for name in ("pause", "max_nodes", "least_asked")),
    ]


class Told(Structure):
    """The state of a step, see plans.cpp: roots that ask sources, and the drafts chosen for
    them.
    """

    _fields_ = [
        *((name, c_int64) for name in ("num_scopes", "num_paused", "num_due", "num_asked")),
        *((name, c_int64) for name in ("num_selected", "num_found", "num_sums")),
        *((name, c_double) for name in ("kept", "asking")),
        # Seconds that an accepted draft token saved, and that a row took
        *((name, c_double) for name in ("saved", "row")),
        *((name, POINTER(c_int64)) for name in ("due", "asked", "found")),  # [n, 3], [n, 3], [n, 5]
        ("sums", POINTER(c_double)),
        # Two numbers of draft tokens, each with gain, seconds and rate: see `WeighedSizes`
        ("sizes", c_double * 8),
        ("values", POINTER(c_double)),  # of selected draft tokens
        *((name, POINTER(c_int32)) for name in ("places", "selected", "counts")),
        ("expected", POINTER(c_double)),  # accepted draft tokens by root
        *((name, POINTER(c_int32)) for name in ("tokens", "parents", "expanded", "nodes")),
        ("codes", POINTER(c_uint64)),  # sources of each draft token
        ("sizes_at", c_void_p),
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
    # root, n, [n, 4] of source, number in tries, means, source in C++
    bind: Callable[[int, int, int], None]
    set_trie: Callable[[int, int], None]
    told: Callable[[int], int]  # plans -> `Told`
    # plans, seconds of planning and of considering the step before, [n, 6] of root, draft limit,
    # has output, has rules, text, size; n, number of the step, asks always, step, costs
    begin: Callable[..., None]
    set_estimates: Callable[..., None]  # plans, source, n, places, expected, seconds of each
    ask: Callable[[int], None]  # plans
    set_behind: Callable[[int, int], None]  # plans, [n] double by root that asks sources
    weigh: Callable[[int, int, float, Any], None]  # plans, most, seconds of drafting, costs
    select: Callable[[int, int], None]  # plans, most
    cut: Callable[[int, int], None]  # plans, number of selected draft tokens
    promise: Callable[[int, float, float, float], float]  # plans, part, row share, expected
    took: Callable[[int, int, float, bool], None]  # plans, source, seconds, is extension
    # plans, [n, 4] of root, draft tokens, accepted ones, tokens; n, nodes, tokens, costs, draft
    # tokens and seconds of the step
    learn: Callable[..., None]
    note_models: Callable[..., None]  # plans, models, their number, [n, 2] of bits by root
    settle: Callable[[int, float, float], None]  # plans, seconds of planning and of considering
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
        named(library, "told", p, p),
        named(library, "begin_step", None, p, x, x, p, n, n, n, p, p),
        named(library, "set_estimates", None, p, n, n, p, p, x),
        named(library, "ask_sources", None, p),
        named(library, "set_behind", None, p, p),
        named(library, "weigh_roots", None, p, n, x, p),
        named(library, "select_of_roots", None, p, n),
        named(library, "cut_roots", None, p, n),
        named(library, "promise", x, p, x, x, x),
        named(library, "source_took", None, p, n, x, n),
        named(library, "learn", None, p, p, n, p, p, p, n, x),
        named(library, "note_models", None, p, p, n, p),
        named(library, "settle_step", None, p, x, x),
        named(library, "clear_step", None, p),
    )


class DepthFunctions(NamedTuple):
    """C functions that choose the levels of a draft model. Values are of C's double."""

    policy: Callable[..., int]  # costs, step, values of candidates, n -> policy
    free: Callable[[int], None]
    least: Callable[[int], float]
    size: Callable[..., int]  # policy, reach, n, hold, depth, seconds by number of nodes
    pays: Callable[..., int]  # policy, reach, n, hold, depth, seconds once, seconds of a level
    add: Callable[..., None]  # policy, values of children, n, values before, n, seconds


def depth_functions() -> DepthFunctions:
    """Return the functions. BuildError if there is no library."""
    return depth_functions_of(build.library())


@cache
def depth_functions_of(library: CDLL) -> DepthFunctions:
    p, n, x = c_void_p, c_int64, c_double
    return DepthFunctions(
        named(library, "depth_policy", p, p, p, p, n),
        named(library, "free_depth_policy", None, p),
        named(library, "least_value", x, p),
        named(library, "level_size", n, p, p, n, x, n, p),
        named(library, "levels_pay", n, p, p, n, x, n, x, x),
        named(library, "add_level", None, p, p, n, p, n, x),
    )
