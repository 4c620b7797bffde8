"""What a step verifies: the prompts' rows, and the guesses that raise the expected tokens a second.

Everything is compared by one figure, expected tokens per expected second, with the costs that the
machine's own steps have shown. No guess is a plan like any other.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import msgspec

from specserve.scheduling.cost import Step, StepCosts, worth_of_prompts
from specserve.scheduling.growth import Growth
from specserve.scheduling.trials import Trials
from specserve_drafters.candidates import Trie
from specserve_drafters.tree import MAX_NODES, ROOT

LEAST_VALUE = 1e-3  # of a guess: a less likely one is not looked at
BETTER = 1.05  # times the known rate must be hoped for, of rows that are tried
AHEAD = 0.5  # of a target: steps take longer than expected, and a gap of two targets is too long
LEAST_CHUNK = 16  # rows that waiting prompts get whatever the targets are: they must not starve


class Ask(msgspec.Struct, eq=False):
    """A request with a root, as the plan sees it."""

    trie: Trie
    limit: int  # guesses that it may have
    max_depth: int = MAX_NODES
    behind: float = 0.0  # tokens beyond the next that it needs of this step to meet its target


class Plan(msgspec.Struct):
    """Chosen nodes of each request, likeliest first, and what is expected of the step."""

    nodes: list[list[int]]
    rows: int  # of the step, guesses included
    tokens: float
    seconds: float
    rival: float | None = None  # where this tries rows of unknown cost: the best rate that is known

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def likeliest(asks: Sequence[Ask], most: int) -> list[tuple[float, int, int]]:
    """Up to `most` guesses as (value, request, node), by decreasing value, parents first.

    A guess's value is the probability of its path. What a request behind its target needs to meet
    it comes first, and that of the one furthest behind before others'.
    """
    for ask in asks:
        if ask.behind > 0:
            return most_urgent(asks, most)
    found: list[tuple[float, int, int]] = []
    for i, ask in enumerate(asks):
        values = ask.trie.values
        found += [(values[node], i, node) for node in ranked(ask)]
    if len(asks) > 1:
        found.sort(key=itemgetter(0), reverse=True)
    return found[:most]


def ranked(ask: Ask) -> list[int]:
    """The guesses that a request may have, by falling value: so parents come first."""
    values, deepest = ask.trie.settle(), ask.max_depth
    nodes = [node for node, value in enumerate(values) if value >= LEAST_VALUE]
    if deepest < MAX_NODES:
        depths = ask.trie.depths
        nodes = [node for node in nodes if depths[node] <= deepest]
    nodes.sort(key=values.__getitem__, reverse=True)
    return nodes[1 : ask.limit + 1]  # the root is the likeliest


def most_urgent(asks: Sequence[Ask], most: int) -> list[tuple[float, int, int]]:
    """As `likeliest`, whoever is behind."""
    tries, room = [ask.trie for ask in asks], [ask.limit for ask in asks]
    deepest = [ask.max_depth for ask in asks]
    behind = [ask.behind for ask in asks]
    heap = [
        (-urgency(trie.p[node], behind[i]), i, node, trie.p[node])
        for i, trie in enumerate(tries)
        if room[i] > 0
        for node in trie.children[ROOT].values()
    ]
    heapify(heap)
    found: list[tuple[float, int, int]] = []
    while heap and len(found) < most:
        key, i, node, value = heap[0]
        if value < LEAST_VALUE or room[i] == 0:
            heappop(heap)
            continue
        if behind[i] <= 0 and key < -value:  # it was behind when this was put here
            heapreplace(heap, (-value, i, node, value))
            continue
        found.append((value, i, node))
        room[i] -= 1
        behind[i] -= value
        heappop(heap)
        p = tries[i].p
        if tries[i].depths[node] == deepest[i]:
            continue
        lacks = behind[i]
        for child in tries[i].children[node].values():
            if (of_path := value * p[child]) >= LEAST_VALUE:
                key = -urgency(of_path, lacks) if lacks > 0 else -of_path
                heappush(heap, (key, i, child, of_path))
    return found


def urgency(value: float, behind: float) -> float:
    """What guesses are ordered by: those of a request that is behind come before all others."""
    return value + 1 + behind if behind > 0 else value


def choose(
    asks: Sequence[Ask],
    step: Step,
    costs: StepCosts,
    most: int,
    is_tried: Callable[[int], bool] = lambda rows: False,
) -> Plan:
    """The guesses, at most `most`, with which the step has the highest expected rate.

    Only right edges of the stairs are looked at, as rows up to the edge are free, and all guesses
    there are. A step that takes longer than allowed has none. Where rows whose cost is not known
    may be better, is_tried(rows) decides.
    """
    found = likeliest(asks, most)
    gains = [0.0, *accumulate(value for value, _, _ in found)]
    first, last = bisect_right(costs.edges, step.rows), len(costs.edges)
    last = bisect_left(costs.edges, step.rows + len(found), hi=last)
    sizes = [0, *(edge - step.rows for edge in costs.edges[first:last])]
    if found:
        sizes.append(len(found))
    tokens = [step.num_roots + gains[size] for size in sizes]

    known = best_of(step, sizes, tokens, costs, is_hopeful=False)
    best, rival = known, None
    if not all(costs.is_known(step.rows + size) for size in sizes):
        hoped = best_of(step, sizes, tokens, costs, is_hopeful=True)
        if hoped.rate > BETTER * known.rate and is_tried(step.rows + hoped.size):
            best, rival = hoped, known.rate

    nodes: list[list[int]] = [[] for _ in asks]
    for _, i, node in found[: best.size]:
        nodes[i].append(node)
    tokens_of_step = step.num_roots + gains[best.size]
    return Plan(nodes, step.rows + best.size, tokens_of_step, best.seconds, rival)


class Size(NamedTuple):
    """A number of guesses, and what is expected of it."""

    size: int
    seconds: float
    rate: float


def best_of(
    step: Step, sizes: Sequence[int], tokens: Sequence[float], costs: StepCosts, is_hopeful: bool
) -> Size:
    """The size with the highest rate; `tokens` are those that each is expected to bring."""

    takes = [step.spent + costs.of(step, size, is_hopeful) for size in sizes]
    roots, worth = costs.of(step.without_prompts, 0, is_hopeful), 0.0
    if step.prompt_rows and step.num_roots:
        worth = worth_of_prompts(costs.of(step, 0, is_hopeful) - roots, tokens, takes)
    allowed = step.allowed_with_guesses(roots)
    each = zip(tokens, takes, strict=True)
    rates = [(t + worth) / s if s <= allowed else 0.0 for t, s in each]
    best = rates.index(max(rates))  # no guess, if nothing is allowed
    return Size(sizes[best], takes[best], tokens[best] / takes[best])


def prompt_rows(step: Step, costs: StepCosts, waiting: int, most: int, context: int = 0) -> int:
    """Rows for waiting prompts beside the step's roots: the most that keep it within `allowed`.

    Without a root all that fit: no stream waits for them. `most` bounds them, also where no target
    does. `context` counts the tokens before the rows of a prompt.
    """
    most = min(waiting, most)
    if not step.num_roots or most <= LEAST_CHUNK:
        return most
    found = min(LEAST_CHUNK, most)
    ends = [edge - step.rows for edge in costs.edges if found < edge - step.rows < most]
    for rows in (*ends, most):
        if step.spent + costs.of(step.with_prompt(rows, context + rows)) > step.allowed:
            break
        found = rows
    return found


def allowed_seconds(target: float, since_first: float, num_output: int) -> float:
    """How long a step may take so that a request's tokens come `target` apart on average.

    What it is ahead may be spent, up to AHEAD of another target's time; and a step may always take
    one.
    """
    ahead = target * num_output - since_first
    return target + min(max(ahead, 0.0), AHEAD * target)


def tokens_behind(target: float, since_first: float, num_output: int, seconds: float) -> float:
    """Tokens beyond the next that a request needs of a step of so many seconds to meet its target,
    at most as many as two steps' worth: what is lost is not to be had at any price.
    """
    due = (since_first + seconds) / target - num_output - 1
    return min(max(due, 0.0), 2 * seconds / target)


class Planner:
    """The plans of an engine's steps."""

    def __init__(self, costs: StepCosts) -> None:
        """The costs are the target's."""
        self.costs = costs
        self.trials = Trials(first=1, last=64)  # of rows whose cost is not known, by their bits
        self.root_trials = Trials()  # of roots alone, by their stair
        self.alone = 0  # rows without a guess that are tried in this step

    def choose(self, asks: Sequence[Ask], step: Step, most: int) -> Plan:
        plan = choose(asks, step, self.costs, most, self.is_tried)
        self.alone = 0
        return plan

    def is_tried(self, rows: int) -> bool:
        return rows == self.alone or self.trials.is_due(rows.bit_length())

    def observe(self, plan: Plan, step: Step, seconds: float) -> None:
        """Learn whether a plan that was tried was worth it: the step took so long."""
        if plan.rival is not None and plan.tokens > plan.rival * (step.spent + seconds):
            self.trials.worked(plan.rows.bit_length())  # so go on at once

    def growth(self, asks: Sequence[Ask], step: Step, most: int) -> Growth:
        """The terms on which a draft model's levels are run in this step, after other sources."""
        values = list[float]()
        for ask in asks:
            values += map(ask.trie.settle().__getitem__, ranked(ask))
        self.alone = step.rows if self.tries_roots(step) else 0
        return Growth(self.costs, step, sorted(values)[-most:] if most else [], self.alone > 0)

    def tries_roots(self, step: Step) -> bool:
        """Whether roots alone, of unknown cost, are hoped to be cheap before a draft model runs.
        Once it has run its time is spent, and guesses always look worth theirs.
        """
        if step.prompt_rows or self.costs.is_known(step.rows):
            return False
        return self.root_trials.is_due(self.costs.stair(step.rows))
