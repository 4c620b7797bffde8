"""Whether another level of a draft model is worth its time."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from specserve.scheduling.cost import StepCosts
from specserve.scheduling.step import Step, worth_of_prompts


class Growth:
    """Which nodes of a step's trees a draft model runs, level by level.

    A level is run if the step's expected rate is higher with it, by what its nodes are expected to
    add: their reach. That of a node is the probability of its path, times that of the draft model
    having the right child where no candidate is it yet.
    """

    def __init__(self, costs: StepCosts, step: Step, values: list[float]) -> None:
        """`values` are those of the candidates that there are, and fall."""
        self.costs, self.step, self.values = costs, step, values
        self.known: dict[int, float] = {}  # seconds of the target, by number of guesses
        self.spent = 0.0
        self.least = 0.0  # value of a guess that is verified at the best rate
        self.worth = 0.0  # in tokens, of the prompts' rows
        if step.prompt_rows:
            sizes = self.sizes(len(values))
            prompts = self.seconds(0) - self.seconds(-step.prompt_rows)
            takes = [self.seconds(size) for size in sizes]
            self.worth = worth_of_prompts(prompts, self.tokens(sizes, values), takes)
        self.allowed = step.allowed_with_guesses(self.seconds(-step.prompt_rows))
        self.rate = self.best_rate()

    def sizes(self, num: int) -> list[int]:
        """Of so many guesses those numbers that end at a right edge, and all."""
        rows, edges = self.step.rows, self.costs.edges
        first = bisect_right(edges, rows)
        last = bisect_left(edges, rows + num)
        return [0, *(edge - rows for edge in edges[first:last]), num]

    def tokens(self, sizes: Sequence[int], values: Sequence[float]) -> list[float]:
        """Expected for each of the sizes."""
        gains = [*accumulate(values, initial=float(self.step.num_roots))]
        return [gains[size] for size in sizes]

    def seconds(self, guesses: int) -> float:
        """Of the target, with so many guesses."""
        found = self.known.get(guesses)
        if found is None:
            step = self.step
            found = self.costs.seconds(step.rows + guesses, step.context, step.requests)
            self.known[guesses] = found
        return found

    def best_rate(self, more: Sequence[float] = (), seconds: float = 0.0) -> float:
        """The step's rate with further candidates, made in so many seconds more."""
        values = sorted([*self.values, *more], reverse=True) if more else self.values
        sizes, spent, worth = self.sizes(len(values)), self.spent + seconds, self.worth
        tokens = self.tokens(sizes, values)
        rates = [
            (t + worth) / (spent + self.seconds(n)) for n, t in zip(sizes, tokens, strict=True)
        ]
        best = max(rates)
        if not more:
            size = sizes[rates.index(best)]
            self.least = values[size] if size < len(values) else 0.0
        return best

    def is_better(self, more: Sequence[float], seconds: float) -> bool:
        """Whether the rate is higher with further candidates, in a step that takes no longer than
        allowed. That it is not is mostly seen from the time of the target without any guess.
        """
        least = self.spent + seconds + self.seconds(0)
        if least > self.allowed:
            return False
        most = self.step.num_roots + sum(self.values) + sum(more) + self.worth
        if most <= self.rate * least:
            return False
        return self.best_rate(more, seconds) > self.rate

    def size(self, reach: Sequence[float], seconds: Callable[[int], float]) -> int:
        """How many nodes to run, the best first; 0 if the level is not worth its time.

        `reach` falls; seconds(rows) is the level's time.
        """
        best, size, net = 0.0, 0, 0.0
        for n, gain in enumerate(reach, 1):
            net += gain - self.least
            if net - self.rate * seconds(n) > best:
                best, size = net - self.rate * seconds(n), n
        is_worth = size > 0 and self.is_better(reach[:size], seconds(size))
        return size if is_worth else 0

    def first_size(
        self, reach: Sequence[float], hold: float, depth: int, seconds: Callable[[int], float]
    ) -> int:
        """As `size`, for the first of up to `depth` levels, of which each reaches `hold` times what
        the one before did. seconds(0) is what catching up takes, once; it may pay over levels.
        """
        found = [gain for gain in reach if gain > self.least]
        level = seconds(len(found)) - seconds(0)
        more, spent = list[float](), seconds(0)
        for _ in range(depth if found else 0):
            more += found
            spent += level
            if self.is_better(more, spent):
                return len(found)
            found = [gain * hold for gain in found]
        return 0

    def add(self, values: Sequence[float], seconds: float) -> None:
        """A level has been run: the values of its children, and the time that it took."""
        self.values = sorted([*self.values, *values], reverse=True)
        self.spent += seconds
        self.rate = self.best_rate()
