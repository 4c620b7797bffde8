"""How many levels a draft model runs in a step."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter

from specserve.scheduling import Request
from specserve.speculation.constants import HOLD, LEAST_USE, TRIED
from specserve.speculation.costs import Step, StepCosts, prefill_value
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.planner import AcceptanceStats


class DraftDepthPolicy:
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
        roots = costs.of(step.without_prompts) if step.prompt_rows else self.takes[0]
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


class DraftDepthController:
    """Runs the levels that are worth their time, and from time to time a level as a trial."""

    def __init__(
        self,
        growth: DraftDepthPolicy,
        acceptance: Sequence[AcceptanceStats],
        name: str,
        model: ModelExecutor,
        requests: Sequence[Request],
        max_depth: int,
    ) -> None:
        """`name` is the model's source; `acceptance` is by request."""
        self.growth, self.name, self.model, self.acceptance = growth, name, model, acceptance
        self.requests, self.max_depth = requests, max_depth
        self.context = sum(len(r.token_ids) for r in requests)
        self.tried: list[int] = []  # ids of requests for which the model runs only as a trial
        self.is_trial_alone = False  # the model runs for no other request
        self.num_levels = 0
        self.started, self.before, self.usual = 0.0, 0, 0
        self.catching_up_took = 0.0  # seconds that are not charged to the step

    def first(self, reach: Sequence[float]) -> list[int]:
        order = sorted(range(len(reach)), key=lambda i: reach[i], reverse=True)
        rows = [0, *accumulate(self.model.usual_rows(self.requests[i]) for i in order)]
        behind = sum(self.catching_up(self.requests[i]) for i in order)

        def seconds(n: int) -> float:
            return behind + self.seconds(self.model.first_costs, rows[n], n)

        gains = [reach[i] for i in order]
        size = self.growth.first_size(gains, HOLD, self.max_depth, seconds)
        left = order[size:]
        tried = self.due(left)
        self.tried = [self.requests[i].id for i in tried]
        self.is_trial_alone = size == 0 and len(tried) > 0
        usual = sum(self.model.usual_rows(self.requests[i]) for i in tried)
        return self.begin(order[:size] + tried, rows[size] + usual)

    def due(self, left: Sequence[int]) -> list[int]:
        """Return the first left-out place of each tenant scope whose trial is due."""
        first: dict[AcceptanceStats, int] = {}
        for place in left:
            first.setdefault(self.acceptance[place], place)
        # One request per scope: its result also counts for the others.
        each = first.items()
        return [i for scope, i in each if scope.account(self.name).is_exploring]

    def catching_up(self, request: Request) -> float:
        """Return the seconds of a request's missing rows, spread over the tokens that benefit."""
        missing = self.model.missing(request)
        if missing == 0:
            return 0.0
        seconds = self.seconds(self.model.first_costs, missing, 1)
        return seconds / max(LEAST_USE, request.num_left)

    def next(self, reach: Sequence[float]) -> int:
        left = self.max_depth - self.num_levels
        again = self.model.num_rerun

        def seconds(rows: int) -> float:
            return self.seconds(self.model.costs, again + rows, 1)

        size = self.growth.size(reach, HOLD, left, seconds)
        if self.tried and self.num_levels < TRIED:
            size = max(size, min(1, len(reach)))
        self.begin([*range(size)], again + size)
        return size

    def begin(self, chosen: list[int], usual: int) -> list[int]:
        self.num_levels += 1
        self.started, self.before = perf_counter(), self.model.num_rows
        self.usual = usual
        return chosen

    def ran(self, values: Sequence[float], before: Sequence[float]) -> None:
        """Count a level's time. The time of catching up is not charged to the step: `first` has
        weighed it.
        """
        seconds, rows = perf_counter() - self.started, self.model.num_rows - self.before
        is_first = self.num_levels == 1
        costs = self.model.first_costs if is_first else self.model.costs
        if 0 < rows <= costs.edges[-1]:
            costs.observe(rows, self.context, len(self.requests), seconds)
        if rows > self.usual:
            usual = min(seconds, self.seconds(costs, self.usual, 1))
            self.catching_up_took += seconds - usual
            seconds = usual
        self.growth.add(values, seconds, before)

    def seconds(self, costs: StepCosts, rows: int, requests: int) -> float:
        """Return 0 until a level was run: only a run shows the model's cost."""
        if not costs.has_steps:
            return 0.0
        return costs.seconds(rows, self.context, requests, is_hopeful=True)
