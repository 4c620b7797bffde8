"""A running request's draft, and what the sources of a step's drafts took and saved."""

from collections.abc import Collection, Sequence

import msgspec

from specserve.scheduling import Request, ScheduledRequest
from specserve.speculation.accounts import AcceptanceStats, SavedShare, SourceAccount
from specserve.speculation.constants import COLD
from specserve.speculation.executor import DraftModelSource
from specserve.speculation.planner import tokens_behind
from specserve.speculation.verify import SourceGroups
from specserve_drafters.base import DraftSource
from specserve_drafters.candidates import MAX_NODES, Rules
from specserve_drafters.trie import BaseTrie, RequestCandidates

Outcome = tuple[SavedShare, float, bool]  # the share that was saved, and whether of a trial
# Of a step so far; they are never changed
NO_NODES, NO_SOURCES, NO_SECONDS = list[int](), list[tuple[str, ...]](), dict[str, float]()


class AskedSource(msgspec.Struct):
    """A source, or a model, that is asked for a request in a step."""

    share: SavedShare
    is_trial: bool
    promised: float = 0.0  # seconds that it expects to save, if it estimates


class RequestDraft:
    """A running request: the sources that serve it, and its draft of the latest step."""

    def __init__(
        self, request: Request, acceptance: AcceptanceStats, models: Sequence[str]
    ) -> None:
        """`models` lists the models that the request allows."""
        self.request, self.models = request, models
        self.begun: list[DraftSource] = []  # sources that know the request
        self.allowed: list[DraftSource] = []  # those of them that it allows
        self.lately = 0.0  # draft tokens verified per step
        self.estimates: dict[str, float] = {}  # expected accepted tokens, by source that is due
        self.bind(acceptance)

    def add(self, source: DraftSource) -> None:
        self.begun.append(source)
        if self.request.sampling.speculation.allows(source.name):
            self.allowed.append(source)
        self.bind(self.acceptance)

    def constrain(self, sources: Sequence[DraftSource], grammar: Rules) -> None:
        """Give these sources the grammar of the request; they serve it from now on."""
        for source in sources:
            source.constrain(self.request.id, grammar)
            if source not in self.begun:
                self.add(source)

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
SourceWork = tuple[str, Sequence[RequestDraft], float, bool]


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
    model_source: DraftModelSource, roots: Sequence[RequestDraft], planning: float, part: float
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


def note_targets(late: Sequence[RequestDraft], now: float, step_seconds: float) -> None:
    """Set how far requests with a target are behind it. Only the most urgent priority with late
    requests counts; it goes first.
    """
    for root in late:
        root.ask.behind = behind(root.request, now, step_seconds)
    urgent = min([r.request.sampling.priority for r in late if r.ask.behind > 0], default=None)
    for root in late:
        if urgent is not None and root.request.sampling.priority > urgent:
            root.ask.behind = 0.0


def behind(request: Request, now: float, step_seconds: float) -> float:
    """Return the tokens that a request lacks to meet its target; 0 before its first token."""
    if request.tpot is None or request.num_output == 0:
        return 0.0
    since_first = now - request.first_token_at
    return tokens_behind(request.tpot, since_first, request.num_output, step_seconds)
