"""Accounts of draft sources in Python: the slow form of plans.cpp, which defines its results."""

from collections.abc import Collection, Sequence

from specserve.speculation.constants import (
    AT_FIRST,
    EXPLORATION,
    FADE,
    FREE,
    FREE_ESTIMATES,
    KEPT,
    MOST_LOST,
    PATIENCE,
    PAUSE,
    RATE,
    REINVESTED,
    SCOPE_RATE,
)
from specserve_drafters.trie import AcceptancePrior
from tests.drafters.oracle_trie import Calibration


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


class OracleStats:
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
        self.calibrations = Calibration(prior), Calibration(prior)
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
        self.last: object | None = None  # latest plan of a step without other scopes
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

    def forget(self, id: int) -> None:
        """Drop the statistics of one request."""
        for calibration in self.calibrations:
            calibration.forget(id)
        for account in self.accounts.values():
            account.by_request.pop(id, None)
