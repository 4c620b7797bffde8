"""Estimates the seconds of a model's steps from measured steps, by rows, context and requests.

Step time rises in buckets of rows, because kernels and graphs work on tiles. Attention adds to it:
a step reads the KV of each request once, and each of its rows attends to all of it. Other load
makes some steps slower and none faster. So the estimate follows the fastest of the latest steps,
and a slowdown of all of them is kept separately.

Measurements bound the estimates. Only steps with equally many rows show the cost of context and
requests, and a bucket's estimate matches its own latest steps. Estimates are kept in C++
(costs.cpp).
"""

import weakref
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_int8
from statistics import median
from typing import Any, NamedTuple

import msgspec

from specserve.exchange.messages import PlainStep
from specserve.speculation.constants import (
    BAND,
    CHANGED,
    FEW,
    FINE,
    FIRST_SECONDS,
    FIT_EVERY,
    HOPE,
    HOPED,
    KNOWN,
    LATEST,
    LEAST_SECONDS,
    LEAST_SHARE,
    LONG_AGO,
    PRIOR,
    RANK,
    RECENT,
    RIDGE,
    STALE,
    TILE,
    TOO_HIGH,
    WINDOW,
    WRONG,
)
from specserve_kernels.cpu import BuildError, drafting


class Step(msgspec.Struct):
    """A step before its draft tokens are chosen, and its allowed time."""

    rows: int  # roots and prompt rows
    context: int  # tokens whose KV is read
    requests: int
    num_roots: int
    prompt_rows: int = 0
    attended: int = 0  # tokens of context, summed over rows
    # Tokens of context of all roots: each row of a draft attends to its root's context
    root_context: int = 0
    spent: float = 0.0  # seconds of drafting, expected until it is done
    allowed: float = float("inf")  # seconds until the tightest target is missed
    kept: float = 1.0  # share of the expected draft tokens that are accepted

    @property
    def native(self) -> drafting.StepFields:
        """Return it for code in C++."""
        rows = self.rows, self.num_roots, self.prompt_rows
        context = self.context, self.requests, self.attended, self.root_context
        return drafting.StepFields(*rows, *context, self.spent, self.allowed, self.kept)

    @property
    def root_tokens(self) -> float:
        """Return the tokens of the roots, in expected draft tokens: plans compare both."""
        return self.num_roots / self.kept

    def attended_with(self, drafts: int) -> float:
        """Return `attended` with so many draft tokens added."""
        return self.attended + drafts * self.root_context / max(self.num_roots, 1)

    def with_prompt(self, rows: int, context: int) -> "Step":
        """Add rows of another prompt; each of them attends to `context` tokens."""
        return msgspec.structs.replace(
            self,
            rows=self.rows + rows,
            context=self.context + context,
            requests=self.requests + 1,
            prompt_rows=self.prompt_rows + rows,
            attended=self.attended + rows * context,
        )


class PlainSteps:
    """Measured whole steps without drafting, grouped by context up to the next power of two."""

    def __init__(self) -> None:
        self.steps: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, step: Step, rows: int, seconds: float) -> None:
        """Count a step of `rows` rows, draft tokens included, if its only row is a request's
        root.
        """
        if rows != 1 or step.num_roots != 1:
            return
        latest = self.steps.setdefault(step.context.bit_length(), deque(maxlen=LATEST))
        latest.append((step.context, seconds))

    def reset(self) -> None:
        self.steps = {}

    @property
    def state(self) -> list[PlainStep]:
        """Return the medians by rising context."""
        each = [[*zip(*self.steps[size], strict=True)] for size in sorted(self.steps)]
        return [PlainStep(int(median(c)), median(s), len(s)) for c, s in each]


class Sample(NamedTuple):
    """A measured step, with its time corrected for other load."""

    context: float  # tokens whose KV was read
    attended: float  # tokens of context, summed over rows
    requests: int
    seconds: float


def edges(most: int) -> list[int]:
    """Return the right edges of row buckets: 1, 2, 3, 4, 6, 8, 12, ..., 48, 64, 80, 96, ..., 256,
    288, ... They are powers of two and halfway points. The distance from 64 on is an eighth of a
    power of two, but at least a tile.
    """
    found, size = [1], 2
    while found[-1] < most:
        width = max(size // 2, 1) if size < FINE else max(size // 8, TILE)
        found += range(size, 2 * size, width)
        size *= 2
    return found[: bisect_left(found, most) + 1]


class KnownCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured steps of a `StepCosts`, stored for the next start."""

    buckets: dict[int, list[Sample]]  # right edge -> a step for each context and number of requests


SETTINGS = drafting.CostSettings(
    *(FIRST_SECONDS, LEAST_SECONDS, RIDGE, HOPED, HOPE, PRIOR, LEAST_SHARE, CHANGED, WRONG),
    *(TOO_HIGH, WINDOW, RANK, KNOWN, RECENT, TILE, FINE, BAND, LONG_AGO, FIT_EVERY, STALE),
)


class StepCosts:
    """Estimates seconds of a model's steps; an estimate never falls with rows, context or
    requests.

    Engines that share a model's weights also share this object. Calls of C++ keep the GIL, so they
    need no lock.
    """

    def __new__(cls, *args: Any, **named: Any) -> "StepCosts":
        """Return the simple form if there is no compiled library."""
        try:
            drafting.cost_functions()
        except BuildError:
            return object.__new__(UncompiledCosts)
        return object.__new__(cls)

    def __init__(
        self, max_rows: int, seconds_per_token: float = 0.0, known: KnownCosts | None = None
    ) -> None:
        """`seconds_per_token` is the cost of a token of context until steps show it."""
        self.edges = edges(max_rows)
        self.functions = drafting.cost_functions()
        at, few = array("q", self.edges), array("q", FEW)
        given = at.buffer_info()[0], len(at), few.buffer_info()[0], len(few), seconds_per_token
        self.handle = self.functions.costs(byref(SETTINGS), *given)
        weakref.finalize(self, self.functions.free, self.handle)
        self.use(drafting.CostColumns.from_address(self.functions.columns(self.handle)))
        if known is not None:
            self.begin_with(known)

    def use(self, columns: drafting.CostColumns) -> None:
        """Read these estimates, which may change."""
        self.native, self.address = columns, addressof(columns)
        self.known_edges = (c_int8 * len(self.edges)).from_address(columns.known)
        self.by_edge = (c_double * len(self.edges)).from_address(columns.by_edge)

    def reset(self) -> None:
        """Drop all steps."""
        self.functions.reset(self.handle)

    @property
    def has_steps(self) -> bool:
        """Return whether a step was measured."""
        return bool(self.native.has_steps)

    @property
    def added(self) -> list[float]:
        """Return seconds per token of context, per row and token of its context, and per
        request.
        """
        return [self.native.per_token, self.native.per_row, self.native.per_request]

    @property
    def slowdown(self) -> float:
        """Return the current slowdown by other load, at least 1."""
        return float(self.native.slowdown)

    def seconds(
        self,
        rows: int,
        context: float,
        requests: int,
        is_hopeful: bool = False,
        attended: float | None = None,
    ) -> float:
        """Estimate the seconds of a step with these rows under the present load.

        rows      rows of the step
        context   tokens whose KV is read
        attended  the same, summed over rows; by default for requests with equal rows and context

        If hopeful, an edge that is not known gets its least possible cost, so that it is tried.
        """
        if attended is None:
            attended = alike(rows, context, requests)
        return self.functions.of(self.address, rows, context, attended, requests, is_hopeful)

    def of(self, step: Step, drafts: int = 0, is_hopeful: bool = False) -> float:
        """Estimate the seconds of a step with so many draft tokens under the present load."""
        return self.of_each(step, (drafts,), is_hopeful)[0]

    def of_each(self, step: Step, sizes: Sequence[int], is_hopeful: bool = False) -> list[float]:
        """Do the same for several numbers of draft tokens; a planner compares dozens.

        Beside prompts, draft tokens add at least what they add without them: logits of most prompt
        rows are not read, so these rows take less time.
        """
        at = array("q", sizes)
        out = array("d", at.tobytes())  # of the same length
        given = len(at), at.buffer_info()[0], is_hopeful, out.buffer_info()[0]
        self.functions.of_each(self.address, byref(step.native), *given)
        return out.tolist()

    def is_known(self, rows: int) -> bool:
        """Return whether such steps were measured; more rows than the last edge count as the
        last.
        """
        return self.known_edges[min(bisect_left(self.edges, rows), len(self.edges) - 1)] > 0

    def is_stale(self, rows: int) -> bool:
        """Return whether fewer than KNOWN steps have shown a known cost lately."""
        return bool(self.functions.is_stale(self.handle, rows))

    def observe(
        self,
        rows: int,
        context: float,
        requests: int,
        seconds: float,
        attended: float | None = None,
    ) -> None:
        """Learn from a measured step."""
        if attended is None:
            attended = alike(rows, context, requests)
        self.functions.observe(self.handle, rows, context, attended, requests, seconds)

    def begin_with(self, known: KnownCosts) -> None:
        """Use the steps of an earlier start until enough new ones exist. Invalid steps are ignored.
        If the first steps of any size contradict them, all are dropped.
        """
        each = [(edge, *sample) for edge, samples in known.buckets.items() for sample in samples]
        steps = array("d", [value for one in each for value in one])
        self.functions.begin(self.handle, len(each), steps.buffer_info()[0])

    def doubt(self) -> None:
        """From now on, first steps that contradict the present estimates drop them."""
        self.functions.doubt(self.handle)

    def known(self) -> KnownCosts:
        room = self.functions.points(self.handle, 0, None)
        out, found = array("d", bytes(40 * room)), dict[int, list[Sample]]()
        self.functions.points(self.handle, room, out.buffer_info()[0])
        values = iter(out)
        for edge, context, attended, requests, seconds in zip(*[values] * 5, strict=True):
            sample = Sample(context, attended, int(requests), seconds)
            found.setdefault(int(edge), []).append(sample)
        return KnownCosts(found)

    def table(self) -> dict[int, float]:
        """Return right edge -> seconds of the rows only, without other load."""
        return dict(zip(self.edges, self.by_edge, strict=True))


class UncompiledCosts(StepCosts):
    """Estimates without a compiled library: rows take as long as in the latest steps, whatever
    their number. Drafter `auto` does not exist then; targets and prompts need rough estimates.
    """

    def __init__(
        self, max_rows: int, seconds_per_token: float = 0.0, known: KnownCosts | None = None
    ) -> None:
        self.edges, self.known_edges = edges(max_rows), (c_int8 * len(edges(max_rows)))()
        self.native = drafting.CostColumns(per_token=seconds_per_token, slowdown=1.0)
        self.reset()

    def reset(self) -> None:
        self.latest = deque[float](maxlen=WINDOW)  # seconds relative to `shape`
        self.native.has_steps = 0

    def seconds(
        self,
        rows: int,
        context: float,
        requests: int,
        is_hopeful: bool = False,
        attended: float | None = None,
    ) -> float:
        if rows == 0:
            return 0.0
        unit = median(self.latest) if self.latest else FIRST_SECONDS / shape(1)
        return unit * shape(rows) + float(self.native.per_token) * context

    def of_each(self, step: Step, sizes: Sequence[int], is_hopeful: bool = False) -> list[float]:
        return [self.seconds(step.rows + size, step.context, step.requests) for size in sizes]

    def is_stale(self, rows: int) -> bool:
        return False

    def observe(
        self,
        rows: int,
        context: float,
        requests: int,
        seconds: float,
        attended: float | None = None,
    ) -> None:
        if LEAST_SECONDS <= seconds < 1e6:
            of_rows = max(seconds - self.native.per_token * context, LEAST_SHARE * seconds)
            self.latest.append(of_rows / shape(rows))
            self.native.has_steps = 1

    def begin_with(self, known: KnownCosts) -> None:
        """Ignore them: steps of an earlier start had a library."""

    def doubt(self) -> None:
        """Do nothing, because the latest steps replace all others."""

    def known(self) -> KnownCosts:
        return KnownCosts({})

    def table(self) -> dict[int, float]:
        return {edge: self.seconds(edge, 0, 1) for edge in self.edges}


def shape(rows: int) -> float:
    """Return the relative step time by rows that is assumed until steps show it."""
    return 1 + rows / RIDGE


def alike(rows: int, context: float, requests: int) -> float:
    """Return the context summed over rows, if all requests have equal rows and context."""
    return rows * context / max(requests, 1)
