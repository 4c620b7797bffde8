"""Choose the draft tokens of a step that raise the expected tokens per second.

All plans are compared by expected tokens per expected second, with the measured costs of steps on
this machine. A plan without draft tokens is compared in the same way.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import msgspec

from specserve.speculation.constants import BETTER, FEW, FINE
from specserve.speculation.costs import Step, StepCosts, prefill_value
from specserve_drafters.candidates import Selection
from specserve_drafters.trie import RequestCandidates


class DraftDepthPolicy:
    """Chooses the nodes of a step's trees that a draft model runs, level by level.

    A level runs if its nodes' reach raises the step's expected rate. A node's reach is the
    probability of its path, times the probability that the draft model adds the accepted child.
    """

    def __init__(self, costs: StepCosts, step: Step, values: list[float]) -> None:
        """`values` holds the values of the existing candidates."""
        self.costs, self.step = costs, step
        self.values = sorted(values)
        self.spent = 0.0
        rows, edges = step.rows, costs.edges
        self.sizes = [0, *(edge - rows for edge in edges[bisect_right(edges, rows) :])]
        self.takes: list[float] = []  # seconds of the target by size, if computed
        roots = costs.of(step.without_prompts)
        self.allowed = step.allowed_with_draft(roots)
        self.worth = 0.0  # value of the prompts' rows, in tokens
        if step.prompt_rows:
            tokens, takes = self.tokens(self.values)
            self.worth = prefill_value(self.takes[0] - roots, tokens, takes)
        self.look()

    def place(self, num: int) -> int:
        """Return the index of the right edge for `num` draft tokens, and compute the times up to
        it.
        """
        place = min(bisect_left(self.sizes, num), len(self.sizes) - 1)
        while len(self.takes) <= place:
            self.takes.append(self.costs.of(self.step, self.sizes[len(self.takes)]))
        return place

    def tokens(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return expected tokens of the most likely draft tokens up to each right edge, and of all.
        Also return the target's seconds for each. `values` must rise.
        """
        place = self.place(len(values))
        gains = [*accumulate(reversed(values), initial=self.step.num_roots + self.worth)]
        found = [gains[size] for size in self.sizes[:place]]
        found.append(gains[-1])
        return found, self.takes[: place + 1]

    def look(self) -> None:
        """Find the best plan of the existing candidates."""
        (tokens, takes), spent = self.tokens(self.values), self.spent
        rates = [t / (spent + s) for t, s in zip(tokens, takes, strict=True)]
        self.rate = max(rates)
        best = rates.index(self.rate)
        self.expected = tokens[best]  # tokens of the best plan, including the value of prompt rows
        self.best = self.sizes[best] if best < len(rates) - 1 else len(self.values)
        rest = len(self.values) - self.best
        # Least value of a draft token that improves the plan
        self.least = self.values[rest - 1] if rest else 0.0

    def is_better(self, more: Sequence[float], seconds: float) -> bool:
        """Return whether further candidates raise the rate in a step within the allowed time.

        Usually the best plan with the candidates added proves it, or the target's time without
        draft tokens disproves it.
        """
        spent, gain = self.spent + seconds, sum(more)
        if spent + self.takes[0] > self.allowed:
            return False
        place = self.place(self.best + len(more))
        if self.expected + gain > self.rate * (spent + self.takes[place]):
            return True
        most = self.step.num_roots + sum(self.values) + gain + self.worth
        if most <= self.rate * (spent + self.takes[0]):
            return False
        tokens, takes = self.tokens(sorted([*self.values, *more]))
        return any(t > self.rate * (spent + s) for t, s in zip(tokens, takes, strict=True))

    def size(
        self, reach: Sequence[float], hold: float, depth: int, seconds: Callable[[int], float]
    ) -> int:
        """Return how many nodes to run, best first. It is 0 if neither this level nor several, up
        to `depth`, are worth their time. `reach` falls, by the factor `hold` per level;
        seconds(rows) is a level's time.
        """
        best, size, net = 0.0, 0, 0.0
        for n, gain in enumerate(reach, 1):
            if gain <= self.least:
                break
            net += gain - self.least
            if (won := net - self.rate * seconds(n)) > best:
                best, size = won, n
        return size if size and self.pays(reach[:size], hold, depth, 0.0, seconds(size)) else 0

    def first_size(
        self, reach: Sequence[float], hold: float, depth: int, seconds: Callable[[int], float]
    ) -> int:
        """Do the same for the first level. seconds(0) is the time of catching up, spent once;
        several levels may pay for it.
        """
        found = [gain for gain in reach if gain > self.least]
        once, level = seconds(0), seconds(len(found)) - seconds(0)
        return len(found) if found and self.pays(found, hold, depth, once, level) else 0

    def pays(
        self, reach: Sequence[float], hold: float, depth: int, once: float, level: float
    ) -> bool:
        """Return whether some number of levels raises the rate. Each takes `level` seconds, after
        `once` seconds. The first level may pay only with later ones, for example in a wide row
        bucket.
        """
        # Upper bound: the gain of all levels in the time of one. Usually it is too low already.
        most = self.step.num_roots + sum(self.values) + self.worth + sum(reach) / (1 - hold)
        if most <= self.rate * (self.spent + once + level + self.takes[0]):
            return False
        more, spent = list[float](), once
        for _ in range(depth):
            more += reach
            spent += level
            if self.is_better(more, spent):
                return True
            reach = [gain * hold for gain in reach]
        return False

    def best_rate(self, gains: Sequence[float], once: float, level: float) -> float:
        """Return the highest rate over numbers of levels, each with its gain in tokens. The time of
        rows to verify is not included.
        """
        tokens, seconds = self.step.num_roots + self.worth, self.spent + once + self.takes[0]
        rates = [
            (tokens + more) / (seconds + level * number)
            for number, more in enumerate(accumulate(gains), 1)
        ]
        return max(rates, default=0.0)

    def add(self, values: Sequence[float], seconds: float, before: Sequence[float] = ()) -> None:
        """Record a level's run time. `values` holds the values of its nodes' children, `before` the
        values of children that existed before.
        """
        for value in before:
            place = bisect_left(self.values, value)
            if place < len(self.values) and self.values[place] == value:
                del self.values[place]
        self.values += values
        self.values.sort()
        self.spent += seconds
        self.look()


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


class Plan(msgspec.Struct):
    """Chosen nodes per request, most likely first, and the step's expected results."""

    nodes: list[list[int]]
    rows: int  # including draft tokens
    tokens: float
    seconds: float
    rival: float | None = None  # best known rate, if the plan tries rows of unknown cost

    @property
    def rate(self) -> float:
        """Return expected tokens per second."""
        return self.tokens / self.seconds


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

    Only right edges of row buckets, and all tokens, are compared: rows up to an edge are free. A
    step that exceeds the allowed time gets none. If rows of unknown cost may be better,
    is_tried(rows) decides.
    """
    found = select(asks, most)
    num, gains = len(found.values), [*accumulate(found.values, initial=0.0)]
    first, last = bisect_right(costs.edges, step.rows), len(costs.edges)
    last = bisect_left(costs.edges, step.rows + num, hi=last)
    sizes = [0, *(edge - step.rows for edge in costs.edges[first:last])]
    if step.rows >= FINE:
        sizes += [size for size in FEW if size < num]
    if num:
        sizes.append(num)
    tokens = [step.num_roots + gains[size] for size in sizes]

    known = best_of(step, sizes, tokens, costs, is_hopeful=False)
    best, rival = known, None
    if not costs.are_known(step, sizes):
        hoped = best_of(step, sizes, tokens, costs, is_hopeful=True)
        if hoped.rate > BETTER * known.rate and is_tried(step.rows + hoped.size):
            best, rival = hoped, known.rate

    nodes = found.by_request(best.size, len(asks))
    tokens_of_step = step.num_roots + gains[best.size]
    return Plan(nodes, step.rows + best.size, tokens_of_step, best.seconds, rival)


class Size(NamedTuple):
    """A number of draft tokens, and its expected time and rate."""

    size: int
    seconds: float
    rate: float


def best_of(
    step: Step, sizes: Sequence[int], tokens: Sequence[float], costs: StepCosts, is_hopeful: bool
) -> Size:
    """Return the size with the highest rate; `tokens` holds each size's expected tokens."""
    spent, worth, allowed = step.spent, 0.0, inf
    takes = [spent + seconds for seconds in costs.of_each(step, sizes, is_hopeful)]
    if step.prompt_rows or step.allowed < inf:
        roots = costs.of(step.without_prompts, 0, is_hopeful)
        allowed = step.allowed_with_draft(roots)
        if step.prompt_rows and step.num_roots:
            worth = prefill_value(costs.of(step, 0, is_hopeful) - roots, tokens, takes)
    each = zip(tokens, takes, strict=True)
    rates = [(t + worth) / s if s <= allowed else 0.0 for t, s in each]
    best = rates.index(max(rates))  # no draft token, if nothing is allowed
    return Size(sizes[best], takes[best], tokens[best] / takes[best])


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

    def growth(self, asks: Sequence[RequestCandidates], step: Step, most: int) -> DraftDepthPolicy:
        """Return the policy for running a draft model's levels in this step, after other
        sources.
        """
        values = sorted(select(asks, most).values)
        return DraftDepthPolicy(self.costs, step, values)
