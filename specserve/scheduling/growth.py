"""Whether another level of a draft model is worth its time."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from specserve.scheduling.cost import Step, StepCosts, worth_of_prompts


class Growth:
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
        self.allowed = step.allowed_with_guesses(roots)
        self.worth = 0.0  # in tokens, of the prompts' rows
        if step.prompt_rows:
            tokens, takes = self.tokens(self.values)
            self.worth = worth_of_prompts(self.takes[0] - roots, tokens, takes)
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
