"""Decide which draft tokens are verified, to raise the expected tokens per second.

All plans are compared by expected tokens per expected second, with the measured costs of steps on
this machine. A plan without draft tokens is compared in the same way.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import inf
from typing import Any

import msgspec

from specserve.speculation.constants import BETTER, FEW, FINE, HOPED, LEAST_EXPECTED, SEEM_FREE
from specserve.speculation.costs import Step, StepCosts, prefill_value
from specserve_drafters.candidates import ChosenDraft, Selection, Size, WeighedSizes
from specserve_drafters.trie import RequestCandidates


class Plan(msgspec.Struct):
    """The chosen draft tokens, and the step's expected results."""

    found: Selection
    size: int  # the first of these nodes are chosen
    rows: int  # including draft tokens
    tokens: float
    seconds: float
    rival: float | None = None  # best known rate, if the plan tries rows of unknown cost
    is_cut: bool = False  # its drafts are in the buffers of tries in C++

    @property
    def rate(self) -> float:
        """Return expected tokens per second."""
        return self.tokens / self.seconds

    def cut(self, asks: Sequence[RequestCandidates]) -> list[tuple[ChosenDraft, float]]:
        """Return the draft of each request, and how many of its likely nodes the estimates alone
        expect to be accepted.
        """
        return asks[0].trie.cut(asks, self.found, self.size, LEAST_EXPECTED)

    def columns(self, asks: Sequence[RequestCandidates]) -> Any:
        """Return the same of tries in C++ by column, see `CutColumns`."""
        trie: Any = asks[0].trie
        if not self.is_cut:
            trie.cut_columns(asks, self.found, self.size, LEAST_EXPECTED)
        return trie.columns(len(asks), self.size)


class ExplorationSchedule:
    """Schedules trials of several things: each failed trial doubles the wait until the next one."""

    def __init__(self, first: int = 16, last: int = 512) -> None:
        self.first, self.last = first, last
        self.waits: dict[Hashable, tuple[int, int]] = {}  # steps between trials, and steps left

    def is_due(self, key: Hashable, steps: int = 1) -> bool:
        """Count steps in which `key` would be left out. Return whether to try it in the last of
        them.
        """
        wait, left = self.waits.get(key, (self.first, self.first))
        if left > steps:
            self.waits[key] = wait, left - steps
            return False
        self.waits[key] = (longer := min(2 * wait, self.last)), longer
        return True

    def worked(self, key: Hashable) -> None:
        """Record a success: if `key` stops paying, its next trial is soon."""
        self.waits.pop(key, None)


def select(asks: Sequence[RequestCandidates], most: int) -> Selection:
    """Select up to `most` draft tokens, see `BaseTrie.select`."""
    return asks[0].trie.select(asks, most) if asks else Selection.of([])


def choose(
    asks: Sequence[RequestCandidates],
    step: Step,
    costs: StepCosts,
    most: int,
    is_tried: Callable[[int], bool] = lambda rows: False,
) -> Plan:
    """Choose at most `most` draft tokens so that the step has the highest expected rate.

    If rows of unknown cost may be better, is_tried(rows) decides.
    """
    trie, native = asks[0].trie if asks else None, (step.native, costs.native)
    weighed = None if trie is None else trie.weigh(asks, most, LEAST_EXPECTED, *native)
    found, known, hoped, is_cut = weighed or weigh(asks, step, costs, most)
    best, rival = known, None
    if known.size and costs.is_stale(step.rows):
        plain = costs.of(step)
        # Rows may only seem free: no plan shows that steps without draft tokens have become faster.
        if known.seconds < SEEM_FREE * (step.spent + plain):
            seconds = step.spent + HOPED * plain
            none = Size(0, 0.0, seconds, step.root_tokens / seconds)
            hoped = max(hoped, none, key=lambda size: size.rate)
    if hoped.rate > BETTER * known.rate and is_tried(step.rows + hoped.size):
        best, rival, is_cut = hoped, step.kept * known.rate, False
    tokens = step.num_roots + step.kept * best.gain
    return Plan(found, best.size, step.rows + best.size, tokens, best.seconds, rival, is_cut)


def weigh(
    asks: Sequence[RequestCandidates], step: Step, costs: StepCosts, most: int
) -> WeighedSizes:
    """Select draft tokens, and find the best number of them. Tries in C++ do the same.

    Only right edges of row buckets, and all tokens, are compared: rows up to an edge are free. A
    step that exceeds the allowed time gets none.
    """
    found = select(asks, most)
    num, sums = len(found.values), [*accumulate(found.values, initial=0.0)]
    first, last = bisect_right(costs.edges, step.rows), len(costs.edges)
    last = bisect_left(costs.edges, step.rows + num, hi=last)
    sizes = [0, *(edge - step.rows for edge in costs.edges[first:last])]
    if step.rows >= FINE:
        sizes += [size for size in FEW if size < num]
    if num:
        sizes.append(num)
    gains = [sums[size] for size in sizes]
    known = best_of(step, sizes, gains, costs, is_hopeful=False)
    if costs.are_known(step, sizes):
        return WeighedSizes(found, known, known)
    return WeighedSizes(found, known, best_of(step, sizes, gains, costs, is_hopeful=True))


def best_of(
    step: Step, sizes: Sequence[int], gains: Sequence[float], costs: StepCosts, is_hopeful: bool
) -> Size:
    """Return the size with the highest rate; `gains` holds each size's expected draft tokens."""
    spent, worth, allowed = step.spent, 0.0, inf
    tokens = [step.root_tokens + gain for gain in gains]
    none = costs.of(step, 0, is_hopeful)  # exactly: of several sizes, it may differ by rounding
    each_size = none, *costs.of_each(step, sizes[1:], is_hopeful)
    takes = [spent + seconds for seconds in each_size]
    if step.prompt_rows or step.allowed < inf:
        roots = costs.of(step.without_prompts, 0, is_hopeful)
        allowed = step.allowed_with_draft(roots)
        if step.prompt_rows and step.num_roots:
            worth = prefill_value(none - roots, tokens, takes)
    each = zip(tokens, takes, strict=True)
    rates = [(t + worth) / s if s <= allowed else 0.0 for t, s in each]
    best = rates.index(max(rates))  # no draft token, if nothing is allowed
    return Size(sizes[best], gains[best], takes[best], tokens[best] / takes[best])


def tokens_behind(target: float, since_first: float, num_output: int, seconds: float) -> float:
    """Return how many tokens beyond the next a request needs in a step of `seconds` to meet its
    target. The limit is two steps' worth of tokens: older delays cannot be recovered.
    """
    due = (since_first + seconds) / target - num_output - 1
    return min(max(due, 0.0), 2 * seconds / target)


class Planner:
    """Chooses the plans of an engine's steps."""

    def __init__(self, costs: StepCosts) -> None:
        """`costs` estimates the target's steps."""
        self.costs = costs
        # Trials of row counts whose cost is not known, by bit length.
        self.exploration = ExplorationSchedule(first=1, last=64)

    def choose(self, asks: Sequence[RequestCandidates], step: Step, most: int) -> Plan:
        return choose(asks, step, self.costs, most, self.is_tried)

    def is_tried(self, rows: int) -> bool:
        return self.exploration.is_due(rows.bit_length())

    def observe(self, plan: Plan, step: Step, seconds: float) -> None:
        """Learn from a tried plan's step time whether the plan was worth it."""
        if plan.rival is not None and plan.tokens > plan.rival * (step.spent + seconds):
            self.exploration.worked(plan.rows.bit_length())  # plan it again at once
