"""Decide which draft tokens are verified, to raise the expected tokens per second.

All plans are compared by expected tokens per expected second, with the measured costs of steps on
this machine. A plan without draft tokens is compared in the same way.

A source has an account in each tenant scope: what it takes and saves, as a share of a request's
part of a step's time. Trials of sources that do not pay have a budget. Accounts are kept in C++
(plans.cpp).
"""

import weakref
from array import array
from collections.abc import Collection, Hashable, Sequence
from ctypes import byref
from typing import Any, NamedTuple, Protocol

import msgspec

from specserve.speculation.constants import (
    AT_FIRST,
    BETTER,
    COLD,
    EXPLORATION,
    FADE,
    FREE,
    FREE_ESTIMATES,
    HOPED,
    KEPT,
    LATELY,
    LEAST_ASKED,
    LEAST_EXPECTED,
    MOST_LOST,
    PATIENCE,
    PAUSE,
    RATE,
    REINVESTED,
    SCOPE_RATE,
    SEEM_FREE,
)
from specserve.speculation.costs import Step, StepCosts
from specserve_drafters.base import make_calibration
from specserve_drafters.candidates import MAX_NODES, Size, WeighedSizes
from specserve_drafters.trie import CHILDREN_BY, LEAST_VALUE, AcceptancePrior, BinCounts
from specserve_kernels.cpu import BuildError
from specserve_kernels.cpu.plans import ModelRun, PlanSettings, Told, plan_functions


class Plan(msgspec.Struct):
    """A chosen number of draft tokens, and the step's expected results."""

    size: int
    rows: int  # including draft tokens
    tokens: float
    seconds: float
    rival: float | None = None  # best known rate, if the plan tries rows of unknown cost

    @property
    def rate(self) -> float:
        """Return expected tokens per second."""
        return self.tokens / self.seconds


class Drafting(Protocol):
    """The requests of a step that may have draft tokens."""

    def weigh(self, most: int, step: Step, costs: StepCosts) -> WeighedSizes:
        """Select at most `most` draft tokens by falling value, and find the best number of them.

        Tokens that a late request needs to meet its target come first; the latest request leads.
        Only right edges of row buckets, and all tokens, are compared: rows up to an edge are free.
        A step that exceeds the allowed time gets none.
        """
        ...


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

    def choose(self, drafting: Drafting, step: Step, most: int) -> Plan:
        """Choose at most `most` draft tokens so that the step has the highest expected rate."""
        known, hoped = drafting.weigh(most, step, self.costs)
        best, rival = known, None
        if known.size and self.costs.is_stale(step.rows):
            plain = self.costs.of(step)
            # Rows may only seem free: no plan shows that steps without draft tokens have become
            # faster.
            if known.seconds < SEEM_FREE * (step.spent + plain):
                seconds = step.spent + HOPED * plain
                none = Size(0, 0.0, seconds, step.root_tokens / seconds)
                hoped = max(hoped, none, key=lambda size: size.rate)
        if hoped.rate > BETTER * known.rate and self.is_tried(step.rows + hoped.size):
            best, rival = hoped, step.kept * known.rate
        tokens = step.num_roots + step.kept * best.gain
        return Plan(best.size, step.rows + best.size, tokens, best.seconds, rival)

    def is_tried(self, rows: int) -> bool:
        return self.exploration.is_due(rows.bit_length())

    def observe(self, plan: Plan, step: Step, seconds: float) -> None:
        """Learn from a tried plan's step time whether the plan was worth it."""
        if plan.rival is not None and plan.tokens > plan.rival * (step.spent + seconds):
            self.exploration.worked(plan.rows.bit_length())  # plan it again at once


class NoLibraryError(ValueError):
    """Drafter `auto` has no compiled library."""

    def __init__(self, reason: BuildError) -> None:
        super().__init__(
            "Drafter 'auto' needs the compiled C++ library, and there is none. Install a C++ "
            "compiler and run `python -m specserve_kernels.cpu`, or choose drafter 'ngram' or "
            f"'none'. {reason}"
        )


class AccountState(NamedTuple):
    """A source's savings in a scope, and the loss budget of its trials. See `Account` in C++."""

    left: float  # steps' time that trials may lose
    earned: float  # the same, for finding out about new requests
    loss: float  # recent average loss of a trial
    seconds: float  # usual seconds of asking for a request
    trust: float  # ratio of what was saved to what estimates promised
    is_exploring: float  # 1 if the budget allows a trial
    may_pay: float  # 1 if it saves time of the request, or has a large budget to find that out
    saved: float  # average share of a step that it saves, over all requests
    num_steps: float  # of this average
    of_request: float  # the same share of the request
    steps_of_request: float
    own_steps: float  # of the request
    step_spent: float  # seconds in this step, of a source that estimates
    step_saved: float
    kept: float  # parts of `trust`
    promised: float


class Plans:
    """The state of one speculator from step to step, in C++. Sources have numbers."""

    def __init__(self, exploration: float | None = None) -> None:
        """`exploration` is the share of time that trials may lose."""
        try:
            self.native = plan_functions()
        except BuildError as e:
            raise NoLibraryError(e) from e
        share = EXPLORATION if exploration is None else exploration
        settings = PlanSettings(
            *(FREE, FREE_ESTIMATES, RATE, SCOPE_RATE, share, REINVESTED, FADE, AT_FIRST),
            *(MOST_LOST, COLD, LATELY, *KEPT, PATIENCE, LEAST_VALUE, LEAST_EXPECTED),
            *(PAUSE, MAX_NODES, LEAST_ASKED),
        )
        self.handle = self.native.plans(byref(settings))
        self.told = Told.from_address(self.native.told(self.handle))
        weakref.finalize(self, self.native.free_plans, self.handle)
        self.numbers: dict[str, int] = {}  # by source
        self.names: list[str] = []

    def number(self, name: str) -> int:
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self.names)
            self.names.append(name)
            self.native.use_source(self.handle, number, False, 1.0)
        return number

    def use(self, sharing: Collection[str], estimating: Collection[str]) -> None:
        """Use these sources from now on. Accounts are kept. Those of `sharing` share one budget of
        trials; a model has a budget of its own.
        """
        for name in sharing:
            number, share = self.number(name), 1 / len(sharing)
            self.native.use_source(self.handle, number, name in estimating, share)

    def begin(
        self,
        planning: float,
        considering: float,
        rows: Sequence[int],
        number: int,
        is_always: bool,
        step: Step,
        costs: StepCosts,
    ) -> None:
        """Update all accounts after the step before, whose planning and considering took so many
        seconds, and begin a step. If no estimate of a source in Python is due, choose the sources
        to ask, and ask those in C++. `told` has the results.

        rows       for each root, its handle, its limit, if it has output and rules, and the address
                   and size of its text
        is_always  estimating sources are asked, whether or not that is worth the planning
        """
        given = array("q", rows)
        address, size = given.buffer_info()
        asked = address, size // 6, number, is_always, byref(step.native), byref(costs.native)
        self.native.begin(self.handle, planning, considering, *asked)

    def set_estimates(
        self, name: str, places: Sequence[int], expected: Sequence[float], each: float
    ) -> None:
        """Set a source's estimates for considered roots, each of which took so many seconds."""
        at, values = array("q", places), array("d", expected)
        given = len(at), at.buffer_info()[0], values.buffer_info()[0], each
        self.native.set_estimates(self.handle, self.numbers[name], *given)

    def ask(self) -> None:
        """Choose the sources to ask once all estimates are set, and ask those in C++."""
        self.native.ask(self.handle)

    def set_behind(self, behind: Sequence[float]) -> None:
        """Set how many tokens beyond the next each root needs to meet its target."""
        values = array("d", behind)
        self.native.set_behind(self.handle, values.buffer_info()[0])

    def weigh(self, most: int, step: Step, costs: StepCosts) -> WeighedSizes:
        """See `Drafting`; `step` is the one that began. `told` has the drafts of `known`."""
        self.native.weigh(self.handle, most, step.spent, byref(costs.native))
        size, gain, seconds, rate, *hoped = self.told.sizes
        known = Size(int(size), gain, seconds, rate)
        return WeighedSizes(known, Size(int(hoped[0]), *hoped[1:]))

    def select(self, most: int) -> list[float]:
        """Return the values of the draft tokens that `weigh` would select."""
        self.native.select(self.handle, most)
        values: list[float] = self.told.values[: self.told.num_selected]
        return values

    def drafts(self, size: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """Cut the drafts of the first `size` selected draft tokens.

        -> numbers of draft tokens by root, and of all roots, one after the other, the tokens, their
        parents and the draft model's numbers
        """
        told = self.told
        if size != told.sizes[0]:
            self.native.cut(self.handle, size)
        columns = told.tokens[:size], told.parents[:size], told.expanded[:size]
        return told.counts[: told.num_asked], *columns

    def took(self, name: str, seconds: float, is_extension: bool) -> None:
        """Count the work of a source in this step."""
        self.native.took(self.handle, self.numbers[name], seconds, is_extension)

    def learn(
        self,
        rows: Sequence[int],
        nodes: Sequence[int],
        tokens: Sequence[int],
        costs: StepCosts,
        num_drafts: int,
        seconds: float,
    ) -> None:
        """Count the results of requests in a step, which took `seconds` with so many draft tokens.
        `rows` holds for each its handle, and how many draft tokens, accepted ones and new tokens it
        has. `told` has the counts.
        """
        given, of_nodes, of_tokens = array("q", rows), array("i", nodes), array("i", tokens)
        address, size = given.buffer_info()
        addresses = of_nodes.buffer_info()[0], of_tokens.buffer_info()[0], byref(costs.native)
        self.native.learn(self.handle, address, size // 4, *addresses, num_drafts, seconds)

    def note_models(self, models: Sequence[ModelRun], bits: Sequence[int]) -> None:
        """Note the models that were run in the step. `bits` has two numbers for each root, see
        plans.cpp.
        """
        given, runs = array("q", bits), (ModelRun * len(models))(*models)
        self.native.note_models(self.handle, byref(runs), len(models), given.buffer_info()[0])

    def settle(self, planning: float, considering: float) -> None:
        """Update all accounts after a step."""
        self.native.settle(self.handle, planning, considering)

    def clear(self) -> None:
        """Forget the step."""
        self.native.clear(self.handle)


class AcceptanceStats:
    """Statistics of one tenant scope's requests: acceptance, and the accounts of sources.

    Machine-wide values, such as step costs, are kept elsewhere.
    """

    def __init__(self, prior: AcceptancePrior | None = None, plans: Plans | None = None) -> None:
        """`prior` has counts of earlier texts, see `specserve tune`."""
        # Of greedy and of sampled requests: draft tokens are right less often in sampled texts.
        self.calibrations = make_calibration(prior), make_calibration(prior)
        self.plans = Plans() if plans is None else plans  # it is freed later than this
        self.native = self.plans.native
        self.handle = self.native.scope(self.plans.handle)
        self.left = 0.0  # seconds that collecting successors from logits may still take
        self.last: tuple[Plan, Step] | None = None  # latest plan of a step without other scopes

    def __del__(self) -> None:
        self.native.free_scope(self.handle)

    def account(self, name: str, id: int = -1) -> AccountState:
        """Return the state of a source's account, and of a request in it."""
        out = array("d", bytes(8 * len(AccountState._fields)))
        self.native.read_account(self.handle, self.plans.number(name), id, out.buffer_info()[0])
        return AccountState(*out)

    def set_account(self, name: str, left: float, saved: float) -> None:
        """Set the budget of a source's trials, and its average over all requests."""
        self.native.set_account(self.handle, self.plans.number(name), left, saved)

    @property
    def accounts(self) -> dict[str, AccountState]:
        return {name: self.account(name) for name in self.plans.names}

    @property
    def kept(self) -> tuple[float, float]:
        """Return the share of the expected draft tokens that was accepted, see `Scope` in C++."""
        return self.state[0], self.state[1]

    @property
    def state(self) -> list[float]:
        """Return the two of `kept`, planning, gain, and if it is paused and may pay."""
        out = array("d", bytes(8 * 6))
        self.native.read_scope(self.handle, out.buffer_info()[0])
        return out.tolist()

    def expect_more(self) -> None:
        """Consider sources in the next step."""
        self.native.expect_more(self.handle)

    def calibration(self, temperature: float) -> Any:
        """Return the calibration of a request with this temperature."""
        return self.calibrations[temperature > 0]

    def counts(self) -> dict[str, list[BinCounts]]:
        """Return the counts of all bins with draft tokens, by source."""
        sums = dict[str, dict[int, BinCounts]]()
        for calibration in self.calibrations:
            for source, bins in calibration.counts().items():
                own = sums.setdefault(source, {})
                for one in bins:
                    own[one.kind] = own[one.kind].plus(one) if one.kind in own else one
        return {source: [own[kind] for kind in sorted(own)] for source, own in sums.items()}

    def forget_model(self, name: str) -> None:
        """Drop statistics of a model that is replaced by another one."""
        self.native.drop_account(self.handle, self.plans.number(name))
        for judged in (name, CHILDREN_BY + name):
            for calibration in self.calibrations:
                calibration.drop(judged)

    def forget(self, id: int) -> None:
        """Drop the statistics of one request."""
        for calibration in self.calibrations:
            calibration.forget(id)
        self.native.forget(self.handle, id)
