"""Decide which draft tokens are verified, to raise the expected tokens per second.

All plans are compared by expected tokens per expected second, with the measured costs of steps on
this machine. A plan without draft tokens is compared in the same way.

A source has an account in each tenant scope: what it takes and saves, as a share of a request's
part of a step's time. Trials of sources that do not pay have a budget.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

import msgspec

from specserve.speculation.constants import (
    AT_FIRST,
    BETTER,
    EXPLORATION,
    FADE,
    FEW,
    FINE,
    FREE,
    FREE_ESTIMATES,
    HOPED,
    KEPT,
    LEAST_EXPECTED,
    MOST_LOST,
    PATIENCE,
    PAUSE,
    RATE,
    REINVESTED,
    SCOPE_RATE,
    SEEM_FREE,
)
from specserve.speculation.costs import Step, StepCosts, prefill_value
from specserve_drafters.base import make_calibration
from specserve_drafters.candidates import ChosenDraft, Selection, Size, WeighedSizes
from specserve_drafters.trie import (
    CHILDREN_BY,
    AcceptancePrior,
    BinCounts,
    Calibration,
    RequestCandidates,
)

if TYPE_CHECKING:
    from specserve.speculation.costs import Step


class SavedShare:
    """Average share of a request's step time that draft tokens of a source save."""

    __slots__ = ("free", "num_own", "num_steps", "rate", "saved")

    def __init__(
        self, saved: float = 0.0, num_steps: int = 0, rate: float = RATE, free: float = FREE
    ) -> None:
        """`rate`: weight of a step. `free`: share that may be lost."""
        self.saved, self.num_steps, self.rate, self.free = saved, num_steps, rate, free
        self.num_own = 0  # steps of its own; it begins with those of others

    def add(self, saved: float) -> None:
        self.num_own += 1
        self.num_steps = self.num_steps + 1 if self.pays else 1  # restart the average after a trial
        self.saved += max(1 / self.num_steps, self.rate) * (saved - self.saved)

    def charge(self, lost: float) -> None:
        """Spread a loss over the steps of the average."""
        self.saved -= max(1 / max(self.num_steps, PATIENCE), self.rate) * lost

    @property
    def pays(self) -> bool:
        return self.num_steps > 0 and self.saved >= -self.free


class Trust:
    """Ratio of what was saved to what estimates promised, in seconds or tokens."""

    __slots__ = ("least", "most", "num_steps", "promised", "rate", "saved")

    def __init__(self, rate: float = RATE, least: float = 0.0, most: float = 1.0) -> None:
        """`rate`: weight of a step."""
        self.saved = self.promised = 0.0
        self.num_steps, self.rate, self.least, self.most = 0, rate, least, most

    @property
    def value(self) -> float:
        """Return the ratio, `least` to `most`; 1 before the first step."""
        if self.num_steps == 0:
            return 1.0
        ratio, least, most = self.saved / self.promised, self.least, self.most
        return least if ratio < least else most if ratio > most else ratio

    def add(self, saved: float, promised: float, is_trial: bool = False) -> None:
        """Count a step; that of a trial replaces the earlier ones."""
        if self.num_steps == 0:
            self.saved, self.promised, self.num_steps = promised, promised, round(0.5 / self.rate)
        self.num_steps = 1 if is_trial else self.num_steps + 1
        first = 1 / self.num_steps
        rate = first if first > self.rate else self.rate
        self.saved += rate * (saved - self.saved)
        self.promised += rate * (promised - self.promised)

    def fade(self) -> None:
        """Trust a little more: only drafts show that less trust is due, and it prevents them."""
        self.saved += self.rate * (self.promised - self.saved)


class SourceAccount:
    """A source's savings in a scope, and the loss budget of its trials.

    A source that estimates has one average for all requests, because its estimates tell them apart.
    Others have an average for each request.
    """

    def __init__(self, share: float = 1.0, is_estimating: bool = False) -> None:
        """`share` of the budget of trials is this source's."""
        self.budget = EXPLORATION * share  # steps' time per step
        self.all = SavedShare(rate=SCOPE_RATE, free=FREE_ESTIMATES if is_estimating else FREE)
        self.by_request: dict[int, SavedShare] = {}
        self.trust = Trust()
        self.trusted = 1.0  # its value in this step
        self.seconds = 0.0  # usual seconds of asking for a request
        self.left = AT_FIRST  # steps' time that trials may lose
        self.earned = 0.0  # the same, for finding out about new requests
        self.loss = 0.0  # recent average loss of a trial
        # False until the first result, which takes far more time than later ones
        self.is_warm = False
        # State of the step:
        self.is_due = True  # estimates are asked for
        self.is_estimated = self.is_tried = False
        self.spent = self.saved = 0.0  # seconds of a source that estimates
        self.promised = self.kept = 0.0  # seconds that it promised and saved, if it was asked

    def may_pay(self, id: int) -> bool:
        """Return whether it saves time of a request, or has a large budget to find that out."""
        return self.left > AT_FIRST / 2 or self.by_request.get(id, self.all).saved > 0

    def next_step(self, num_steps: int) -> None:
        """Begin a step, the last of so many."""
        self.left = min(self.left + num_steps * self.budget, AT_FIRST)
        self.loss *= FADE**num_steps
        self.trusted = self.trust.value
        self.is_due = self.all.pays or self.is_exploring

    @property
    def is_exploring(self) -> bool:
        """Return whether the budget allows a trial."""
        return self.left >= min(self.loss, AT_FIRST)

    def may_try(self, share: SavedShare) -> bool:
        """Return whether this step tries a request that does not pay."""
        return self.is_exploring or (share.num_own == 0 and self.earned >= min(self.loss, AT_FIRST))

    def of(self, id: int) -> SavedShare:
        """Return a request's savings. A new request starts with the average of all."""
        share = self.by_request.get(id)
        if share is None:
            share = self.by_request[id] = SavedShare(
                self.all.saved, min(self.all.num_steps, PATIENCE)
            )
        return share

    def took(self, seconds: float) -> None:
        """Learn the seconds of asking for a request. Only a series of slow calls counts as slow."""
        self.seconds += (
            RATE * (min(seconds, 2 * self.seconds) - self.seconds) if self.seconds else seconds
        )

    def add(
        self,
        outcomes: Sequence[tuple[SavedShare, float, bool]],
        num_roots: int = 1,
        more: float = 0.0,
    ) -> None:
        """Count a step with `num_roots` roots: the shares that were saved, and whether each is of a
        trial. `more` counts further parts of the step's time that were lost.

        If a source pays, other losses, such as catching up with a prompt, are spread over what it
        saves: they decide about new requests, but not about those that go on. Trials and sources
        that do not pay lose their budget.
        """
        tried = [saved for _, saved, is_trial in outcomes if is_trial]
        if not self.is_warm:
            self.is_warm |= len(outcomes) > 0
            self.lose(more / num_roots, is_trial=False)
            return
        lost, once, found_out, gained = more - sum(tried), 0.0, 0.0, 0.0
        if self.all.pays and not tried:
            lost, once = 0.0, more / max(len(outcomes), 1)
        for share, saved, is_trial in outcomes:
            did_pay, is_new = share.pays, share.num_own < PATIENCE
            if is_trial and share.num_own == 0:
                found_out -= saved
            gained += 0.0 if is_trial else max(saved, 0.0)
            share.add(saved)
            self.all.add(saved - once)
            if did_pay and not share.pays:  # it only seemed to pay: count it as a trial
                seemed = -share.saved * min(share.num_steps, 1 / RATE)
                lost, found_out = lost + seemed, found_out + (seemed if is_new else 0.0)
        if not outcomes:
            self.all.charge(once)
            found_out = lost
        paid = min(max(min(found_out, lost), 0.0) / num_roots, self.earned)
        self.earned = min(self.earned - paid + REINVESTED * gained / num_roots, AT_FIRST)
        self.lose(lost / num_roots, len(tried) > 0, paid)

    def lose(self, lost: float, is_trial: bool, paid: float = 0.0) -> None:
        """Charge the budget, except for what is paid from gains."""
        if is_trial:
            self.loss += (max(lost, 0.0) - self.loss) / 2
        self.left = max(self.left - lost + paid, -MOST_LOST)

    def settle(self, part: float) -> None:
        """Count the step of a source that estimates; `part` is the scope's part of the step, in
        seconds.
        """
        if not self.is_estimated:
            return
        saved = (self.saved - self.spent) / part
        is_trial = self.is_tried or not self.all.pays
        if self.is_warm:
            self.all.add(saved)
            if is_trial:
                self.lose(-saved, is_trial)
        if self.promised:
            self.trust.add(self.kept, self.promised, self.is_tried)
        self.is_warm, self.is_estimated, self.is_tried = True, False, False
        self.spent = self.saved = self.promised = self.kept = 0.0


class AcceptanceStats:
    """Statistics of one tenant scope's requests: acceptance, and the accounts of sources.

    Machine-wide values, such as step costs, are kept elsewhere.
    """

    def __init__(
        self,
        prior: AcceptancePrior | None = None,
        sharing: Collection[str] = (),
        estimating: Collection[str] = (),
    ) -> None:
        """`prior` has counts of earlier texts, see `specserve tune`. `estimating` lists the sources
        that estimate what they save.
        """
        # Of greedy and of sampled requests: draft tokens are right less often in sampled texts.
        self.calibrations = make_calibration(prior), make_calibration(prior)
        # Share of the expected draft tokens of both that were accepted: plans prefer tokens whose
        # probability is estimated too high.
        self.kept = Trust(SCOPE_RATE, *KEPT), Trust(SCOPE_RATE, *KEPT)
        self.use_sources(sharing, estimating)
        self.accounts: dict[str, SourceAccount] = {}  # by source
        # Usual seconds per request of planning. The time depends on which sources are asked and on
        # the number of draft tokens, so it is kept per scope.
        self.planning = 0.0
        self.is_warm = False  # False until the first planning, which takes far longer
        self.left = 0.0  # seconds that collecting successors from logits may still take
        self.last: tuple[Plan, Step] | None = None  # latest plan of a step without other scopes
        self.number, self.num_roots = 0, 0  # number of the current step, and its roots
        # If no source may pay, sources are considered only in every PAUSE-th step. Likewise if all
        # of them save less than considering them takes, after a step that saved nothing.
        self.may_pay, self.is_paused = True, False
        self.considered = 0  # number of the step in which they were considered last
        self.gain = 0.0  # seconds that all sources saved in this step, trials aside
        # Long and short average share of a step's time that they save, less all that they take
        self.nets = [FREE, FREE]
        self.has_gained = True  # in the step in which they were considered last

    def use_sources(self, sharing: Collection[str], estimating: Collection[str]) -> None:
        """Use these sources from now on. Accounts are kept. Those of `sharing` share one budget of
        trials; a model has a budget of its own.
        """
        self.sharing, self.estimating = sharing, estimating

    def account(self, name: str) -> SourceAccount:
        if name not in self.accounts:
            share = 1 / len(self.sharing) if name in self.sharing else 1.0
            self.accounts[name] = SourceAccount(share, name in self.estimating)
        return self.accounts[name]

    def calibration(self, temperature: float) -> Calibration:
        """Return the calibration of a request with this temperature."""
        return self.calibrations[temperature > 0]

    def kept_of(self, temperature: float) -> Trust:
        return self.kept[temperature > 0]

    def counts(self) -> dict[str, list[BinCounts]]:
        """Return the counts of all bins with draft tokens, by source."""
        sums = dict[str, dict[int, BinCounts]]()
        for calibration in self.calibrations:
            for source, bins in calibration.counts().items():
                own = sums.setdefault(source, {})
                for one in bins:
                    own[one.kind] = own[one.kind].plus(one) if one.kind in own else one
        return {source: [own[kind] for kind in sorted(own)] for source, own in sums.items()}

    def next_step(self, number: int, asks_always: bool = False) -> None:
        self.number, self.num_roots, passed = number, 0, number - self.considered
        is_worth = self.may_pay and (max(self.nets) > 0 or self.has_gained)
        self.is_paused = passed < PAUSE and not (is_worth or asks_always)
        if not self.is_paused:
            self.considered, self.may_pay = number, False
            for account in self.accounts.values():
                account.next_step(passed)

    def settle(self, part: float, considering: float) -> None:
        """Count a step in which sources were considered: `part` is the scope's part of its time,
        `considering` the time of choosing the sources to ask, both in seconds.
        """
        for account in self.accounts.values():
            account.settle(part)
        net, self.gain = (self.gain - considering) / part, 0.0
        rates = SCOPE_RATE, RATE
        self.nets = [was + rate * (net - was) for was, rate in zip(self.nets, rates, strict=True)]
        self.has_gained = net > 0

    def note_planning(self, seconds: float, num_roots: int) -> None:
        """Learn the planning time per request from a step."""
        if self.planning:
            rate = 1 - (1 - RATE) ** num_roots
            self.planning += (min(seconds, 2 * self.planning) - self.planning) * rate
        elif self.is_warm:
            self.planning = seconds
        self.is_warm = True

    def forget_model(self, name: str) -> None:
        """Drop statistics of a model that is replaced by another one."""
        if name in self.accounts:
            self.accounts[name] = SourceAccount()
        for judged in (name, CHILDREN_BY + name):
            for calibration in self.calibrations:
                calibration.drop(judged)

    def forget(self, id: int) -> None:
        """Drop the statistics of one request."""
        for calibration in self.calibrations:
            calibration.forget(id)
        for account in self.accounts.values():
            account.by_request.pop(id, None)


class Plan(msgspec.Struct):
    """The chosen draft tokens, and the step's expected results."""

    found: Selection
    size: int  # the first of these nodes are chosen
    rows: int  # including draft tokens
    tokens: float
    seconds: float
    rival: float | None = None  # best known rate, if the plan tries rows of unknown cost
    drafts: list[tuple[ChosenDraft, float]] | None = None  # see `cut`; None: not cut so far

    @property
    def rate(self) -> float:
        """Return expected tokens per second."""
        return self.tokens / self.seconds

    def cut(self, asks: Sequence[RequestCandidates]) -> list[tuple[ChosenDraft, float]]:
        """Return the draft of each request, and how many of its likely nodes the estimates alone
        expect to be accepted.
        """
        if self.drafts is not None:
            return self.drafts
        return asks[0].trie.cut(asks, self.found, self.size, LEAST_EXPECTED)


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


def select(asks: Sequence[RequestCandidates], most: int) -> Selection:
    """Select up to `most` draft tokens, see `BaseTrie.select`."""
    return asks[0].trie.select(asks, most) if asks else Selection.of([])


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
    trie, native = asks[0].trie if asks else None, (step.native, costs.native)
    weighed = None if trie is None else trie.weigh(asks, most, LEAST_EXPECTED, *native)
    found, known, hoped, drafts = weighed or weigh(asks, step, costs, most)
    best, rival = known, None
    if known.size and costs.is_stale(step.rows):
        plain = costs.of(step)
        # Rows may only seem free: no plan shows that steps without draft tokens have become faster.
        if known.seconds < SEEM_FREE * (step.spent + plain):
            seconds = step.spent + HOPED * plain
            none = Size(0, 0.0, seconds, step.root_tokens / seconds)
            hoped = max(hoped, none, key=lambda size: size.rate)
    if hoped.rate > BETTER * known.rate and is_tried(step.rows + hoped.size):
        best, rival, drafts = hoped, step.kept * known.rate, None
    tokens = step.num_roots + step.kept * best.gain
    return Plan(found, best.size, step.rows + best.size, tokens, best.seconds, rival, drafts)


def weigh(
    asks: Sequence[RequestCandidates], step: Step, costs: StepCosts, most: int
) -> WeighedSizes:
    """Select draft tokens, and find the best number of them. Tries in C++ do the same.

    Only right edges of row buckets, and all tokens, are compared: rows up to an edge are free. A
    step that exceeds the allowed time gets none.
    """
    found = select(asks, most)
    num, sums = len(found.values), [*accumulate(found.values, initial=0.0)]
    first, last = bisect_right(costs.edges, step.rows), len(costs.edges)
    last = bisect_left(costs.edges, step.rows + num, hi=last)
    sizes = [0, *(edge - step.rows for edge in costs.edges[first:last])]
    if step.rows >= FINE:
        sizes += [size for size in FEW if size < num]
    if num:
        sizes.append(num)
    gains = [sums[size] for size in sizes]
    known = best_of(step, sizes, gains, costs, is_hopeful=False)
    if costs.are_known(step, sizes):
        return WeighedSizes(found, known, known)
    return WeighedSizes(found, known, best_of(step, sizes, gains, costs, is_hopeful=True))


def best_of(
    step: Step, sizes: Sequence[int], gains: Sequence[float], costs: StepCosts, is_hopeful: bool
) -> Size:
    """Return the size with the highest rate; `gains` holds each size's expected draft tokens."""
    spent, worth, allowed = step.spent, 0.0, inf
    tokens = [step.root_tokens + gain for gain in gains]
    none = costs.of(step, 0, is_hopeful)  # exactly: of several sizes, it may differ by rounding
    each_size = none, *costs.of_each(step, sizes[1:], is_hopeful)
    takes = [spent + seconds for seconds in each_size]
    if step.prompt_rows or step.allowed < inf:
        roots = costs.of(step.without_prompts, 0, is_hopeful)
        allowed = step.allowed_with_draft(roots)
        if step.prompt_rows and step.num_roots:
            worth = prefill_value(none - roots, tokens, takes)
    each = zip(tokens, takes, strict=True)
    rates = [(t + worth) / s if s <= allowed else 0.0 for t, s in each]
    best = rates.index(max(rates))  # no draft token, if nothing is allowed
    return Size(sizes[best], gains[best], takes[best], tokens[best] / takes[best])


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
