"""Which sources are asked, and what they took and saved, in Python: the slow form of plans.cpp."""

from collections.abc import Collection, Sequence
from math import ceil, log
from time import perf_counter

import msgspec

from specserve.scheduling import Request, ScheduledRequest
from specserve.speculation.constants import COLD, FEW
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.executor import DraftModelSource
from specserve.speculation.verify import SourceGroups
from specserve_drafters.base import DraftSource
from specserve_drafters.candidates import MAX_NODES
from specserve_drafters.trie import BaseTrie
from tests.drafters.asks import RequestCandidates
from tests.speculation.oracle_accounts import OracleStats as AcceptanceStats
from tests.speculation.oracle_accounts import SavedShare, SourceAccount
from tests.speculation.oracle_costs import without_prompts

Outcome = tuple[SavedShare, float, bool]  # the share that was saved, and whether of a trial
# Of a step so far; they are never changed
NO_NODES, NO_SOURCES, NO_SECONDS = list[int](), list[tuple[str, ...]](), dict[str, float]()


class AskedSource(msgspec.Struct):
    """A source, or a model, that is asked for a request in a step."""

    share: SavedShare
    is_trial: bool
    promised: float = 0.0  # seconds that it expects to save, if it estimates


class OracleDraft:
    """A running request: the sources that serve it, and its draft of the latest step."""

    def __init__(
        self, request: Request, acceptance: AcceptanceStats, models: Sequence[str], allowed
    ) -> None:
        """`models` lists the models that the request allows."""
        self.request, self.models = request, models
        self.allowed = allowed  # sources
        self.lately = 0.0  # draft tokens verified per step
        self.estimates: dict[str, float] = {}  # expected accepted tokens, by source that is due
        self.bind(acceptance)

    @property
    def may_pay(self) -> bool:
        """Return whether any of its sources pays, or whether that is not known so far."""
        return any(account.may_pay(self.request.id) for account in self.accounts.values())

    def bind(self, acceptance: AcceptanceStats) -> None:
        """Use these statistics of its scope."""
        self.acceptance, account = acceptance, acceptance.account
        self.calibration = acceptance.calibration(self.request.sampling.temperature)
        self.kept = acceptance.kept_of(self.request.sampling.temperature)
        each = [(source.name, source.serving(self.request.id)) for source in self.allowed]
        self.sources = [(source, name, account(name)) for name, source in each]
        self.accounts = {name: account(name) for name in (*(n for n, _ in each), *self.models)}
        # Those that have an average for this request, because they estimate nothing
        self.others = [name for name, source in each if not source.is_estimating]
        self.trie: BaseTrie | None = None  # of the latest step

    def begin_step(
        self,
        scheduled: ScheduledRequest,
        asked: dict[str, AskedSource],
        least: int,
        num_ids: int | None,
    ) -> None:
        """Begin a draft. Sources are asked for about twice the draft tokens that were lately
        verified, or for `least` if that is more. Tokens are below `num_ids`.
        """
        request = self.request
        self.scheduled, self.asked = scheduled, asked
        if self.trie is None:
            self.trie = self.calibration.trie(request.id, None, num_ids)
            depth = request.sampling.speculation.max_depth or MAX_NODES
            self.ask = RequestCandidates(self.trie, 0, depth)
        self.trie.rules = None if request.text is None else request.text.grammar
        self.ask.limit = limit = scheduled.draft_limit
        self.ask.behind = 0.0
        most = 2 + 2 * int(self.lately)
        self.item = scheduled.draft_item(
            min(limit, self.ask.max_depth, most if most > least else least)
        )
        self.proposed: dict[str, int] = {}  # number of candidates by source
        # The nodes that became its draft, in order, their sources, and expected accepted ones
        self.nodes, self.node_sources, self.expected = NO_NODES, NO_SOURCES, 0.0
        # Seconds saved by draft tokens, less those of their rows: by the source that proposed
        # first, and by each source that proposed
        self.credit = self.saved_of = NO_SECONDS
        # Seconds that a verified first token saves, by source on trial that had it.
        self.might_save = NO_SECONDS
        self.tried: tuple[str, ...] = ()  # models that were run for it as a trial

    def saved_by(self, name: str) -> float:
        """Return the seconds that a source has saved, or might have saved in a trial."""
        credit = self.credit.get(name, 0.0)
        return max(credit, self.might_save.get(name, credit)) if self.might_save else credit

    def note_savings(self, groups: SourceGroups, saved: float, row: float) -> None:
        """Note the seconds that the draft's tokens saved: `saved` per accepted one, less `row` for
        each. The source that was first to propose a token gets the credit, because sources that
        take little time are asked first.
        """
        gains = {names: saved * right - row * number for names, (number, right) in groups.items()}
        self.credit = {}
        for names, gain in gains.items():
            self.credit[names[0]] = self.credit.get(names[0], 0.0) + gain
        self.saved_of = self.credit
        if any([len(names) > 1 for names in gains]):
            each = {name: None for names in gains for name in names}
            self.saved_of = {n: sum([g for names, g in gains.items() if n in names]) for n in each}


# The work of a source in a step: its requests, seconds per request, and whether it only extended
SourceWork = tuple[str, Sequence[OracleDraft], float, bool]


def settle_sources(
    work: Sequence[SourceWork], planning: float, part: float, estimating_names: Collection[str]
) -> None:
    """Count what sources took and saved. The sources that are asked for a request share its
    seconds of planning.
    """
    # By account: its scope, outcomes, and parts of the step that only trials lose
    results = dict[SourceAccount, tuple[AcceptanceStats, list[Outcome], float]]()
    for name, roots, each, is_extension in work:
        is_estimating = name in estimating_names
        for root in roots:
            asked, account, acceptance = (
                root.asked.get(name),
                root.accounts[name],
                root.acceptance,
            )
            if is_extension and asked is not None:
                account.spent += each
                acceptance.gain -= 0.0 if asked.is_trial else each
                continue
            taken = each if asked is None else each + planning / len(root.asked)
            is_trial = asked is not None and asked.is_trial
            if not is_trial:
                acceptance.gain += root.credit.get(name, 0.0) - taken
            if is_estimating:
                account.spent += taken
                account.saved += root.saved_by(name)
                account.is_tried |= is_trial
                if asked is not None and asked.promised:
                    account.promised += asked.promised
                    account.kept += root.saved_of.get(name, 0.0)
            elif asked is not None:
                usual = COLD * taken if is_trial else taken
                net = (root.saved_by(name) - usual) / part
                _, outcomes, more = results.get(account, (acceptance, [], 0.0))
                outcomes.append((asked.share, net, is_trial))
                results[account] = acceptance, outcomes, more + (taken - usual) / part
    for account, (acceptance, outcomes, more) in results.items():
        account.add(outcomes, acceptance.num_roots, more)


def settle_model(
    model_source: DraftModelSource, roots: Sequence[OracleDraft], planning: float, part: float
) -> None:
    """Note the share of the step's time that a model's levels have saved."""
    name = model_source.name
    asked = [root for root in roots if name in root.asked]
    if not asked:
        return
    # Levels for a single request, as a trial, take about as long as levels for all requests.
    # They show nothing about the others, so the request is charged its part of a run for all.
    run = [root for root in asked if name in root.tried or not model_source.is_trial_alone]
    seconds = model_source.seconds + sum([planning / len(root.asked) for root in asked])
    level = seconds / len(asked)
    lost = (model_source.catching_up + seconds - level * len(run)) / max(len(run), 1) / part
    for acceptance in {root.acceptance: None for root in run}:
        outcomes, more = list[Outcome](), 0.0
        for root in [root for root in run if root.acceptance is acceptance]:
            share, is_trial = root.asked[name].share, root.asked[name].is_trial
            usual = COLD * level if is_trial else level
            more += lost + (level - usual) / part
            if model_source.model.is_catching_up(root.scheduled):
                more += usual / part
                continue
            is_tried = is_trial or name in root.tried
            saved = root.saved_by(name) - usual
            outcomes.append((share, saved / part, is_tried))
            acceptance.gain += 0.0 if is_tried else saved
        acceptance.account(name).add(outcomes, acceptance.num_roots, more)


class SourceChooser:
    """Asks sources that promise to save time, or that have saved time, and others as trials."""

    def __init__(self, estimating_names: Collection[str]) -> None:
        self.estimating_names = estimating_names
        self.part = 0.0  # seconds that an accepted draft token saves, expected
        self.row_share = 0.0  # time of a row, relative to that

    def weigh_tokens(self, costs: StepCosts, step: Step) -> None:
        """Set what an accepted draft token of this step saves, and what its row takes."""
        none, *some = costs.of_each(step, (0, *FEW))
        roots = costs.of(without_prompts(step)) if step.prompt_rows else none
        self.part, rows = roots / max(step.num_roots, 1), zip(some, FEW, strict=True)
        self.row_share = min([(seconds - none) / size for seconds, size in rows]) / self.part

    def estimate(self, roots: Sequence[OracleDraft], is_always: bool) -> None:
        """Let each source whose estimates are due estimate its requests together."""
        by_source = dict[DraftSource, list[tuple[OracleDraft, str, SourceAccount]]]()
        for root in roots:
            root.estimates = {}
            for source, name, account in root.sources:
                if name in self.estimating_names and (account.is_due or is_always):
                    by_source.setdefault(source, []).append((root, name, account))
        start = perf_counter()
        for source, asked in by_source.items():
            texts = [(root.request.id, root.request.token_ids) for root, _, _ in asked]
            found = source.expected_of_each(texts)
            each = (-start + (start := perf_counter())) / len(asked)
            for (root, name, account), expected in zip(asked, found, strict=True):
                root.estimates[name] = expected
                account.is_estimated = True
                account.spent += each

    def promise(self, expected: float) -> float:
        """Return the seconds that draft tokens save beyond the time of their rows, if so many are
        expected to be accepted. Each is right with the same probability if the one before is.
        """
        p, share = expected / (1 + expected), self.row_share
        if p <= share:
            return 0.0
        # Those whose probability, a power of p, is above what a row takes
        number = MAX_NODES if share <= 0 else min(ceil(log(share) / log(p)) - 1, MAX_NODES)
        return self.part * (expected * (1 - p**number) - number * share)

    def asked(self, root: OracleDraft, is_always: bool) -> dict[str, AskedSource]:
        """Choose the sources and models to ask for a request.

        A source that estimates is asked if it promises to save more than it takes, and if one of
        them promises more than planning takes. Others are asked if they have saved time. All are
        asked as a trial if that is due.
        """
        asked, unsure, best = {}, {}, 0.0
        for name, expected in root.estimates.items():
            if expected <= 0 and not is_always:
                continue
            account, promised = root.accounts[name], self.promise(expected)
            net = account.trusted * promised - account.seconds
            if net > 0:
                best = net if net > best else best
                unsure[name] = AskedSource(account.all, False, promised)
            elif is_always or (promised > account.seconds and account.is_exploring):
                asked[name] = AskedSource(account.all, True, promised)
        if root.others:
            self.ask_by_share(asked, root, root.others)
        is_worth = bool(asked) or is_always or best > root.acceptance.planning
        if root.models and root.request.num_output:
            self.ask_by_share(asked, root, root.models)
        if is_worth:
            return asked | unsure if asked else unsure
        for name, one in unsure.items():
            # Planning would take more time than it saves, but only planning shows that.
            if root.accounts[name].is_exploring:
                one.is_trial = True
                asked[name] = one
        return asked

    def ask_by_share(
        self, asked: dict[str, AskedSource], root: OracleDraft, names: Sequence[str]
    ) -> None:
        """Ask sources and models that have an average for each request."""
        for name in names:
            account = root.accounts[name]
            share = account.of(root.request.id)
            if share.pays or account.may_try(share):
                asked[name] = AskedSource(share, not share.pays)
