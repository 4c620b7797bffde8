"""How many levels a draft model runs in a step."""

from array import array
from collections.abc import Sequence
from ctypes import byref
from itertools import accumulate
from time import perf_counter

from specserve.scheduling import Request
from specserve.speculation.constants import HOLD, LEAST_USE, TRIED
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.planner import AcceptanceStats
from specserve_kernels.cpu.plans import depth_functions


class DraftDepthPolicy:
    """Chooses the nodes of a step's trees that a draft model runs, level by level, in C++
    (depth.cpp).

    A level runs if its nodes' reach raises the step's expected rate. A node's reach is the
    probability of its path, times the probability that the draft model adds the accepted child.
    """

    def __init__(self, costs: StepCosts, step: Step, values: Sequence[float]) -> None:
        """`values` holds the values of the existing candidates."""
        self.native, own = depth_functions(), array("d", values)
        given = byref(costs.native), byref(step.native), own.buffer_info()[0], len(own)
        self.handle = self.native.policy(*given)
        self.costs, self.spent = costs, 0.0  # `costs` are freed later than this

    def __del__(self) -> None:
        self.native.free(self.handle)

    @property
    def least(self) -> float:
        """Return the least value of a draft token that improves the plan."""
        return self.native.least(self.handle)

    def size(
        self, reach: Sequence[float], hold: float, depth: int, seconds: Sequence[float]
    ) -> int:
        """Return how many nodes to run, best first. It is 0 if neither this level nor several, up
        to `depth`, are worth their time. `reach` falls, by the factor `hold` per level; `seconds`
        holds a level's time with 1, 2, ... nodes.
        """
        own, each = array("d", reach), array("d", seconds)
        at, n = own.buffer_info()
        return self.native.size(self.handle, at, n, hold, depth, each.buffer_info()[0])

    def pays(
        self, reach: Sequence[float], hold: float, depth: int, once: float, level: float
    ) -> bool:
        """Return whether some number of levels raises the rate. Each takes `level` seconds, after
        `once` seconds.
        """
        own = array("d", reach)
        at, n = own.buffer_info()
        return self.native.pays(self.handle, at, n, hold, depth, once, level) > 0

    def add(self, values: Sequence[float], seconds: float, before: Sequence[float] = ()) -> None:
        """Record a level's run time. `values` holds the values of its nodes' children, `before` the
        values of children that existed before.
        """
        own, known = array("d", values), array("d", before)
        (at, n), (known_at, num_known) = own.buffer_info(), known.buffer_info()
        self.native.add(self.handle, at, n, known_at, num_known, seconds)
        self.spent += seconds


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
        least, costs = self.growth.least, self.model.first_costs
        gains = [reach[i] for i in order if reach[i] > least]
        size = len(gains)
        level = self.seconds(costs, rows[size], size)
        if not (gains and self.growth.pays(gains, HOLD, self.max_depth, behind, level)):
            size = 0
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
        size = self.growth.size(reach, HOLD, left, self.seconds_by_size(again, len(reach)))
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

    def seconds_by_size(self, again: int, most: int) -> list[float]:
        """Return the seconds of a level with 1, 2, ... nodes that runs `again` rows again."""
        costs, rows, context = self.model.costs, again + 1, self.context
        if not (costs.has_steps and most):
            return [0.0] * most
        step = Step(rows, context, 1, 1, attended=rows * context, root_context=context)
        return costs.of_each(step, range(most), is_hopeful=True)
