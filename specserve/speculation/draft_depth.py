"""How many levels a draft model runs in a step."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from time import perf_counter

from specserve.scheduling import Request
from specserve.speculation.accounts import AcceptanceStats
from specserve.speculation.constants import HOLD, LEAST_USE, TRIED
from specserve.speculation.costs import StepCosts
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.planner import DraftDepthPolicy


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
            return behind + self.first_seconds(rows[n], n)

        gains = [reach[i] for i in order]
        size = self.growth.first_size(gains, HOLD, self.max_depth, seconds)
        left = order[size:]
        tried = self.due(left)
        self.tried = [self.requests[i].id for i in tried]
        self.is_trial_alone = size == 0 and len(tried) > 0
        usual = sum(self.model.usual_rows(self.requests[i]) for i in tried)
        return self.begin(order[:size] + tried, rows[size] + usual)

    def rate(self, chances: Sequence[Sequence[float]]) -> float:
        """Return the highest expected rate over all numbers of levels. `chances` holds, for each
        request, the probability per level of finding the next token.
        """
        gains = [0.0] * self.max_depth
        for each in chances:
            for i, gain in enumerate(accumulate(each, mul)):
                gains[i] += gain
        n = len(self.requests)
        level, rows = self.level_seconds(n, n), sum(map(self.model.usual_rows, self.requests))
        first = sum(map(self.catching_up, self.requests)) + self.first_seconds(rows, n)
        return self.growth.best_rate(gains, first - level, level)

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
        seconds = self.first_seconds(missing, 1)
        return seconds / max(LEAST_USE, request.num_left)

    def next(self, reach: Sequence[float]) -> int:
        left = self.max_depth - self.num_levels
        size = self.growth.size(reach, HOLD, left, lambda n: self.level_seconds(n, 1))
        if self.tried and self.num_levels < TRIED:
            size = max(size, min(1, len(reach)))
        self.begin([*range(size)], size)
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

    def level_seconds(self, rows: int, requests: int) -> float:
        return self.seconds(self.model.costs, rows, requests)

    def first_seconds(self, rows: int, requests: int) -> float:
        return self.seconds(self.model.first_costs, rows, requests)

    def seconds(self, costs: StepCosts, rows: int, requests: int) -> float:
        """Return 0 until a level was run: only a run shows the model's cost."""
        if not costs.has_steps:
            return 0.0
        return costs.seconds(rows, self.context, requests, is_hopeful=True)
