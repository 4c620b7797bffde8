"""Decide which draft tokens are verified, to raise the expected tokens per second.

All plans are compared by expected tokens per expected second, with the measured costs of steps on
this machine. A plan without draft tokens is compared in the same way.

A source has an account in each tenant scope: what it takes and saves, as a share of a request's
part of a step's time. Trials of sources that do not pay have a budget. Accounts are kept in C++
(plans.cpp).
"""

import weakref
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from ctypes import byref
from typing import Any, NamedTuple

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
from specserve_drafters.candidates import (
    MAX_NODES,
    ChosenDraft,
    Selection,
    Size,
)
from specserve_drafters.trie import (
    CHILDREN_BY,
    AcceptancePrior,
    BinCounts,
    RequestCandidates,
)
from specserve_kernels.cpu import BuildError
from specserve_kernels.cpu.plans import SUMS, ModelRun, PlanSettings, plan_functions


class Plan(msgspec.Struct):
    """The chosen draft tokens, and the step's expected results."""

    found: Selection
    size: int  # the first of these nodes are chosen
    rows: int  # including draft tokens
    tokens: float
    seconds: float
    rival: float | None = None  # best known rate, if the plan tries rows of unknown cost
    is_cut: bool = False  # its drafts are in the buffers of tries in C++

    @property
    def rate(self) -> float:
        """Return expected tokens per second."""
        return self.tokens / self.seconds

    def cut(self, asks: Sequence[RequestCandidates]) -> list[tuple[ChosenDraft, float]]:
        """Return the draft of each request, and how many of its likely nodes the estimates alone
        expect to be accepted.
        """
        return asks[0].trie.cut(asks, self.found, self.size, LEAST_EXPECTED)

    def columns(self, asks: Sequence[RequestCandidates]) -> Any:
        """Return the same of tries in C++ by column, see `CutColumns`."""
        trie: Any = asks[0].trie
        if not self.is_cut:
            trie.cut_columns(asks, self.found, self.size, LEAST_EXPECTED)
        return trie.columns(len(asks), self.size)


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


def choose(
    asks: Sequence[RequestCandidates],
    step: Step,
    costs: StepCosts,
    most: int,
    is_tried: Callable[[int], bool] = lambda rows: False,
) -> Plan:
    """Choose at most `most` draft tokens so that the step has the highest expected rate.

    If rows of unknown cost may be better, is_tried(rows) decides.
    """
    if not asks:
        return Plan(Selection.of([]), 0, step.rows, step.num_roots, step.spent + costs.of(step))
    weighed = asks[0].trie.weigh(asks, most, LEAST_EXPECTED, step, costs)
    found, known, hoped, is_cut = weighed
    best, rival = known, None
    if known.size and costs.is_stale(step.rows):
        plain = costs.of(step)
        # Rows may only seem free: no plan shows that steps without draft tokens have become faster.
        if known.seconds < SEEM_FREE * (step.spent + plain):
            seconds = step.spent + HOPED * plain
            none = Size(0, 0.0, seconds, step.root_tokens / seconds)
            hoped = max(hoped, none, key=lambda size: size.rate)
    if hoped.rate > BETTER * known.rate and is_tried(step.rows + hoped.size):
        best, rival, is_cut = hoped, step.kept * known.rate, False
    tokens = step.num_roots + step.kept * best.gain
    return Plan(found, best.size, step.rows + best.size, tokens, best.seconds, rival, is_cut)


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
            *(MOST_LOST, COLD, LATELY, *KEPT, PATIENCE, PAUSE, MAX_NODES),
        )
        self.handle = self.native.plans(byref(settings))
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

    def consider(
        self, rows: Sequence[int], number: int, is_always: bool, step: "Step", costs: "StepCosts"
    ) -> tuple[int, int, list[int], list[int]]:
        """Begin a step. `rows` holds for each root its handle, its limit, and if it has output. If
        `is_always`, estimating sources are asked, whether or not that is worth the planning.

        -> how many scopes it has, how many of them are paused, the places of roots that are
        considered, and bits of their sources whose estimates are due
        """
        rooted, num = array("q", rows), len(rows) // 3
        out = array("q", bytes(16 * num + 16))
        given = rooted.buffer_info()[0], num, number, is_always
        addresses = byref(step.native), byref(costs.native), out.buffer_info()[0]
        n = self.native.consider(self.handle, *given, *addresses)
        scopes, paused, *found = out[: 2 * n + 2].tolist()
        return scopes, paused, found[::2], found[1::2]

    def set_estimates(
        self, name: str, places: Sequence[int], expected: Sequence[float], each: float
    ) -> None:
        """Set a source's estimates for considered roots, each of which took so many seconds."""
        at, values = array("q", places), array("d", expected)
        given = len(at), at.buffer_info()[0], values.buffer_info()[0], each
        self.native.set_estimates(self.handle, self.numbers[name], *given)

    def ask(self, num: int) -> Iterable[tuple[int, int, int]]:
        """Choose the sources to ask for `num` considered roots. Return for each root that asks any
        its place, bits of the sources, and about how many draft tokens it uses.
        """
        out = array("q", bytes(24 * num))
        n = self.native.ask(self.handle, out.buffer_info()[0])
        found = iter(out[: 3 * n].tolist())
        return zip(found, found, found, strict=True)

    @property
    def kept_share(self) -> float:
        """Return the share of expected draft tokens that is accepted, of the step's roots."""
        return self.native.kept_share(self.handle)

    def took(self, name: str, seconds: float, is_extension: bool) -> None:
        """Count the work of a source in this step."""
        self.native.took(self.handle, self.numbers[name], seconds, is_extension)

    def prices(
        self, step: "Step", costs: "StepCosts", drafts: int, seconds: float
    ) -> tuple[float, float]:
        """Return the seconds that an accepted draft token saved, and that a row took, in a step of
        `seconds` with so many draft tokens.
        """
        out = array("d", (0.0, 0.0))
        given = byref(step.native), byref(costs.native), drafts, seconds
        self.native.price_rows(*given, out.buffer_info()[0])
        return out[0], out[1]

    def note_drafts(self, addresses: tuple[int, int, int]) -> None:
        """Note the drafts of roots that ask sources, see `CutColumns`."""
        self.native.note_drafts(self.handle, *addresses)

    def learn(
        self,
        rows: Sequence[int],
        nodes: Sequence[int],
        tokens: Sequence[int],
        prices: tuple[float, float],
        num_sources: int,
    ) -> tuple[list[int], "array[float]"]:
        """Count the results of requests. `rows` holds for each its handle, and how many draft
        tokens, accepted ones and new tokens it has. `num_sources` is of all of them together.

        -> verified and accepted draft tokens by request and source, and `SourceSums`
        """
        given, of_nodes, of_tokens = array("q", rows), array("i", nodes), array("i", tokens)
        counts = array("q", bytes(16 * num_sources))
        sums = array("d", bytes(8 * SUMS * len(self.names)))
        addresses = (a.buffer_info()[0] for a in (of_nodes, of_tokens))
        out = (a.buffer_info()[0] for a in (counts, sums))
        n = len(rows) // 4
        self.native.learn(self.handle, given.buffer_info()[0], n, *addresses, *prices, *out)
        return counts.tolist(), sums

    def settle(
        self, taken: Sequence[float], models: Sequence[ModelRun], bits: Sequence[int]
    ) -> None:
        """Update all accounts after a step. `taken` holds the seconds that an accepted token saved,
        of planning and of considering; `bits` are those of `note_models`.
        """
        runs, seconds = None, array("d", taken)
        if models:
            given = array("q", bits)
            self.native.note_models(self.handle, given.buffer_info()[0])
            runs = byref((ModelRun * len(models))(*models))
        self.native.settle(self.handle, seconds.buffer_info()[0], runs, len(models))

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
