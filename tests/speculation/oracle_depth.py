"""How many levels a draft model runs in a step, in Python: the slow form of depth.cpp."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from specserve.speculation.costs import Step, StepCosts
from tests.speculation.oracle_costs import allowed_with_draft, without_prompts


def prefill_value(prompts: float, tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the value of prompt rows in tokens: as many as the streams would get in the same time.

    Otherwise time would seem cheap in a step with long prompts. Draft tokens would lengthen it, for
    tokens that the next steps produce faster.
    """
    rates = (t / (s - prompts) for t, s in zip(tokens, seconds, strict=True) if s > prompts)
    return prompts * max(rates, default=0.0)


class OracleDepthPolicy:
    """Chooses the nodes of a step's trees that a draft model runs, level by level.

    A level runs if its nodes' reach raises the step's expected rate. A node's reach is the
    probability of its path, times the probability that the draft model adds the accepted child.
    """

    def __init__(self, costs: StepCosts, step: Step, values: Sequence[float]) -> None:
        """`values` holds the values of the existing candidates."""
        self.costs, self.step = costs, step
        self.values = sorted(values)
        self.spent = 0.0
        rows, edges = step.rows, costs.edges
        self.sizes = [0, *(edge - rows for edge in edges[bisect_right(edges, rows) :])]
        self.takes = [costs.of(step)]  # seconds of the target by size, if computed
        roots = costs.of(without_prompts(step)) if step.prompt_rows else self.takes[0]
        self.allowed = allowed_with_draft(step, roots)
        self.worth = 0.0  # value of the prompts' rows, in tokens
        if step.prompt_rows:
            tokens, takes = self.tokens(self.values)
            self.worth = prefill_value(self.takes[0] - roots, tokens, takes)
        self.look()

    def place(self, num: int) -> int:
        """Return the index of the right edge for `num` draft tokens, and compute the times up to
        it.
        """
        place = bisect_left(self.sizes, num, hi=len(self.sizes) - 1)
        if len(self.takes) <= place:
            sizes = self.sizes[len(self.takes) : place + 1]
            self.takes += self.costs.of_each(self.step, sizes)
        return place

    def tokens(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return expected tokens of the most likely draft tokens up to each right edge, and of all.
        Also return the target's seconds for each. `values` must rise.
        """
        place = self.place(len(values))
        gains = [*accumulate(reversed(values), initial=self.step.root_tokens + self.worth)]
        found = [gains[size] for size in self.sizes[:place]]
        found.append(gains[-1])
        return found, self.takes[: place + 1]

    def look(self) -> None:
        """Find the best plan of the existing candidates."""
        (tokens, takes), spent = self.tokens(self.values), self.spent
        rates = [t / (spent + s) for t, s in zip(tokens, takes, strict=True)]
        self.sum = sum(self.values)
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
        most = self.step.root_tokens + self.sum + gain + self.worth
        if most <= self.rate * (spent + self.takes[0]):
            return False
        tokens, takes = self.tokens(sorted([*self.values, *more]))
        return any(t > self.rate * (spent + s) for t, s in zip(tokens, takes, strict=True))

    def size(
        self, reach: Sequence[float], hold: float, depth: int, seconds: Sequence[float]
    ) -> int:
        """Return how many nodes to run, best first. It is 0 if neither this level nor several, up
        to `depth`, are worth their time. `reach` falls, by the factor `hold` per level;
        `seconds` holds a level's time with 1, 2, ... nodes.
        """
        best, size, net = 0.0, 0, 0.0
        for n, gain in enumerate(reach, 1):
            if gain <= self.least:
                break
            net += gain - self.least
            if (won := net - self.rate * seconds[n - 1]) > best:
                best, size = won, n
        return size if size and self.pays(reach[:size], hold, depth, 0.0, seconds[size - 1]) else 0

    def pays(
        self, reach: Sequence[float], hold: float, depth: int, once: float, level: float
    ) -> bool:
        """Return whether some number of levels raises the rate. Each takes `level` seconds, after
        `once` seconds. The first level may pay only with later ones, for example in a wide row
        bucket.
        """
        # Upper bound: the gain of all levels in the time of one. Usually it is too low already.
        most = self.step.root_tokens + self.sum + self.worth + sum(reach) / (1 - hold)
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
