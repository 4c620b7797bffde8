"""What a step verifies: the prompts' rows, and the guesses that raise the expected tokens a second.

Everything is compared by one figure, expected tokens per expected second, with the costs that the
machine's own steps have shown. No guess is a plan like any other.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import msgspec

from specserve.scheduling.cost import Step, StepCosts, prefill_value
from specserve_drafters.candidates import MAX_NODES, ROOT, Trie


class DraftDepthPolicy:
    """Which nodes of a step's trees a draft model runs, level by level.

    A level is run if the step's expected rate is higher with it, by what its nodes are expected to
    add: their reach. That of a node is the probability of its path, times that of the draft model
    having the right child where no candidate is it yet.
    """

    def __init__(
        self, costs: StepCosts, step: Step, values: list[float], is_hopeful: bool = False
    ) -> None:
        """`values` are those of the candidates that there are. If hopeful, a step without a guess
        costs the least that it can: so no level may be worth its time.
        """
        self.costs, self.step = costs, step
        self.values = sorted(values)
        self.spent = 0.0
        rows, edges = step.rows, costs.edges
        self.sizes = [0, *(edge - rows for edge in edges[bisect_right(edges, rows) :])]
        self.takes: list[float] = []  # seconds of the target with those, as far as was asked for
        if is_hopeful:
            self.takes.append(costs.of(step, 0, is_hopeful))
        roots = costs.of(step.without_prompts)
        self.allowed = step.allowed_with_draft(roots)
        self.worth = 0.0  # in tokens, of the prompts' rows
        if step.prompt_rows:
            tokens, takes = self.tokens(self.values)
            self.worth = prefill_value(self.takes[0] - roots, tokens, takes)
        self.look()

    def place(self, num: int) -> int:
        """Of the right edge that so many guesses reach; its seconds are known then."""
        place = min(bisect_left(self.sizes, num), len(self.sizes) - 1)
        while len(self.takes) <= place:
            self.takes.append(self.costs.of(self.step, self.sizes[len(self.takes)]))
        return place

    def tokens(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """What the likeliest guesses up to each right edge, and all, are expected to bring, and the
        seconds of the target for each. `values` rise.
        """
        place = self.place(len(values))
        gains = [*accumulate(reversed(values), initial=self.step.num_roots + self.worth)]
        found = [gains[size] for size in self.sizes[:place]]
        found.append(gains[-1])
        return found, self.takes[: place + 1]

    def look(self) -> None:
        """Find the best plan of the candidates that there are."""
        (tokens, takes), spent = self.tokens(self.values), self.spent
        rates = [t / (spent + s) for t, s in zip(tokens, takes, strict=True)]
        self.rate = max(rates)
        best = rates.index(self.rate)
        self.expected = tokens[best]  # of the best plan, the prompts' worth included
        self.best = self.sizes[best] if best < len(rates) - 1 else len(self.values)
        rest = len(self.values) - self.best
        self.least = self.values[rest - 1] if rest else 0.0  # of a guess: lower ones are left

    def is_better(self, more: Sequence[float], seconds: float) -> bool:
        """Whether the rate is higher with further candidates, in a step that takes no longer than
        allowed. Mostly that is seen from the best plan with them added, and that it is not from the
        time of the target without any guess.
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
        """How many nodes to run, the best first; 0 if neither the level is worth its time nor are
        several, of up to `depth` that are left. `reach` falls, to `hold` times with each level;
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
        """As `size`, for the first level. seconds(0) is what catching up takes, once; it may pay
        over levels.
        """
        found = [gain for gain in reach if gain > self.least]
        once, level = seconds(0), seconds(len(found)) - seconds(0)
        return len(found) if found and self.pays(found, hold, depth, once, level) else 0

    def pays(
        self, reach: Sequence[float], hold: float, depth: int, once: float, level: float
    ) -> bool:
        """Whether the rate is higher with some number of levels, each of which takes so long, after
        so many seconds `once`. The first alone may not pay, as where a stair of the target's is
        wide.
        """
        # What all levels together may bring, in no more than the time of one: mostly too little.
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
        """The highest rate with some number of levels, each of which brings so many tokens, as far
        as that can be told without the rows that are verified for them.
        """
        tokens, seconds = self.step.num_roots + self.worth, self.spent + once + self.takes[0]
        rates = [
            (tokens + more) / (seconds + level * number)
            for number, more in enumerate(accumulate(gains), 1)
        ]
        return max(rates, default=0.0)

    def add(self, values: Sequence[float], seconds: float, before: Sequence[float] = ()) -> None:
        """A level has been run, and took so long: the values of the children that its nodes have,
        and those of the children that they had before.
        """
        for value in before:
            place = bisect_left(self.values, value)
            if place < len(self.values) and self.values[place] == value:
                del self.values[place]
        self.values += values
        self.values.sort()
        self.spent += seconds
        self.look()


FREE = 0.02  # of a step's time: what making guesses may lose
RATE = 1 / 16  # of a step in what was lately saved
EXPLORATION = 0.01  # of all steps' time: what trials may lose
FADE = 0.99  # of the loss that is expected of a trial, after each step
AT_FIRST = 3.0  # steps' time: what they may lose before, and what the first ones may


class ExplorationSchedule:
    """When each of several things is tried again: ever more rarely, as long as it fails."""

    def __init__(self, first: int = 16, last: int = 512) -> None:
        self.first, self.last = first, last
        self.waits: dict[Hashable, tuple[int, int]] = {}  # steps from a trial to the next, and left

    def is_due(self, key: Hashable, steps: int = 1) -> bool:
        """Count steps in which it would be left out; whether it is tried in the last instead."""
        wait, left = self.waits.get(key, (self.first, self.first))
        if left > steps:
            self.waits[key] = wait, left - steps
            return False
        self.waits[key] = (longer := min(2 * wait, self.last)), longer
        return True

    def worked(self, key: Hashable) -> None:
        """It is worth its time: when it no longer is, it is tried again soon."""
        self.waits.pop(key, None)


class SavedShare:
    """What guesses have lately saved of a request's steps, as a share of the step's time."""

    __slots__ = ("num_steps", "saved")

    def __init__(self, saved: float = 0.0, num_steps: int = 0) -> None:
        self.saved, self.num_steps = saved, num_steps

    def add(self, saved: float) -> None:
        self.num_steps = self.num_steps + 1 if self.pays else 1  # a trial shows what holds from now
        self.saved += max(1 / self.num_steps, RATE) * (saved - self.saved)

    @property
    def pays(self) -> bool:
        return self.num_steps > 0 and self.saved >= -FREE


class ExplorationBudget:
    """The turns of all requests. Trials are made for all that do not pay in the same step: one in
    which one request is asked takes most of the time that asking all takes.
    """

    def __init__(self) -> None:
        self.num_steps = self.last = 0
        self.by_request: dict[int, SavedShare] = {}
        self.all = SavedShare()
        self.left = AT_FIRST  # steps' time that trials may lose
        self.loss = 0.0  # of a trial, lately
        self.is_warm = False  # the first turns of all take far more time than later ones

    def next_step(self) -> None:
        self.num_steps += 1
        self.left = min(self.left + EXPLORATION, AT_FIRST)
        self.loss *= FADE

    @property
    def is_exploring(self) -> bool:
        """Whether those that do not pay are tried in this step."""
        return self.left >= min(self.loss, AT_FIRST)

    def is_due(self, id: int) -> bool:
        return self.is_exploring or self.of(id).pays

    def of(self, id: int) -> SavedShare:
        """A new request begins with what others have shown."""
        benefit = self.by_request.get(id)
        if benefit is None:
            benefit = self.by_request[id] = SavedShare(self.all.saved, min(self.all.num_steps, 1))
        return benefit

    def passed(self) -> int:
        """Steps since the one before in which this was asked."""
        passed, self.last = self.num_steps - self.last, self.num_steps
        return passed

    def add(
        self, saved: Sequence[tuple[SavedShare, float]], num_roots: int = 1, more: float = 0.0
    ) -> None:
        """Learn what turns have saved in a step of so many roots, each as a share of its request's
        part of the step's time, and how many parts more the step has lost.
        """
        if not self.is_warm:
            self.is_warm = True
            return
        tried = [share for benefit, share in saved if not benefit.pays]
        lost = more - sum(tried)
        for benefit, share in saved:
            did_pay = benefit.pays
            self.all.add(share)
            benefit.add(share)
            if did_pay and not benefit.pays:  # for some steps it only seemed to: a trial, too
                lost -= benefit.saved * min(benefit.num_steps, 1 / RATE)
        if tried:
            self.loss += (max(lost / num_roots, 0.0) - self.loss) / 2
        self.left -= min(lost / num_roots, AT_FIRST)

    def forget(self, id: int) -> None:
        self.by_request.pop(id, None)


LEAST_VALUE = 1e-3  # of a guess: a less likely one is not looked at
BETTER = 1.05  # times the known rate must be hoped for, of rows that are tried
AHEAD = 0.5  # of a target: steps take longer than expected, and a gap of two targets is too long
LEAST_CHUNK = 16  # rows that waiting prompts get whatever the targets are: they must not starve


class RequestCandidates(msgspec.Struct, eq=False):
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


def likeliest(asks: Sequence[RequestCandidates], most: int) -> list[tuple[float, int, int]]:
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


def ranked(ask: RequestCandidates) -> list[int]:
    """The guesses that a request may have, by falling value: so parents come first."""
    values, deepest = ask.trie.settle(), ask.max_depth
    nodes = [node for node, value in enumerate(values) if value >= LEAST_VALUE]
    if deepest < MAX_NODES:
        depths = ask.trie.depths
        nodes = [node for node in nodes if depths[node] <= deepest]
    nodes.sort(key=values.__getitem__, reverse=True)
    return nodes[1 : ask.limit + 1]  # the root is the likeliest


def most_urgent(asks: Sequence[RequestCandidates], most: int) -> list[tuple[float, int, int]]:
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
    asks: Sequence[RequestCandidates],
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
        worth = prefill_value(costs.of(step, 0, is_hopeful) - roots, tokens, takes)
    allowed = step.allowed_with_draft(roots)
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
        self.exploration = ExplorationSchedule(
            first=1, last=64
        )  # of rows whose cost is not known, by their bits
        self.root_trials = ExplorationSchedule()  # of roots alone, by their stair
        self.alone = 0  # rows without a guess that are tried in this step

    def choose(self, asks: Sequence[RequestCandidates], step: Step, most: int) -> Plan:
        plan = choose(asks, step, self.costs, most, self.is_tried)
        self.alone = 0
        return plan

    def is_tried(self, rows: int) -> bool:
        return rows == self.alone or self.exploration.is_due(rows.bit_length())

    def observe(self, plan: Plan, step: Step, seconds: float) -> None:
        """Learn whether a plan that was tried was worth it: the step took so long."""
        if plan.rival is not None and plan.tokens > plan.rival * (step.spent + seconds):
            self.exploration.worked(plan.rows.bit_length())  # so go on at once

    def growth(self, asks: Sequence[RequestCandidates], step: Step, most: int) -> DraftDepthPolicy:
        """The terms on which a draft model's levels are run in this step, after other sources."""
        values = list[float]()
        for ask in asks:
            values += map(ask.trie.settle().__getitem__, ranked(ask))
        self.alone = step.rows if self.tries_roots(step) else 0
        return DraftDepthPolicy(
            self.costs, step, sorted(values)[-most:] if most else [], self.alone > 0
        )

    def tries_roots(self, step: Step) -> bool:
        """Whether roots alone, of unknown cost, are hoped to be cheap before a draft model runs.
        Once it has run its time is spent, and guesses always look worth theirs.
        """
        if step.prompt_rows or self.costs.is_known(step.rows):
            return False
        return self.root_trials.is_due(self.costs.bucket(step.rows))
