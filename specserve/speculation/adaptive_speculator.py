"""Merge the draft tokens of all sources into one tree per request, and choose how many to
verify.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import ceil, log
from time import perf_counter

import msgspec

from specserve.engine.runner import KVLost, TargetTokens
from specserve.exchange.messages import CalibrationPoint, SpeculationState, Stats
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.speculation.constants import COLD, FEW, LATELY, LEAST_ASKED
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.draft_depth import DraftDepthController, DraftDepthPolicy
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import DraftModelSource, ModelExecutor
from specserve.speculation.planner import (
    AcceptanceStats,
    Plan,
    Planner,
    SavedShare,
    SourceAccount,
    select,
    tokens_behind,
)
from specserve.speculation.recycler import TokenRecycler, accepted_rows
from specserve.speculation.verify import (
    NO_COUNTS,
    AcceptedPath,
    DraftSources,
    SourceGroups,
    SpecDecodeStats,
    StepCounts,
    plan_state,
    scope_of,
)
from specserve_drafters import ROOT
from specserve_drafters.base import DraftSource, SourceRequest
from specserve_drafters.candidates import MAX_NODES, Rules
from specserve_drafters.model_source import RequestTrie
from specserve_drafters.tenants import PerTenant
from specserve_drafters.trie import AcceptancePrior, BaseTrie, RequestCandidates, table

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


class SourceChooser:
    """Asks sources that promise to save time, or that have saved time, and others as trials."""

    def __init__(self, estimating_names: Collection[str]) -> None:
        self.estimating_names = estimating_names
        self.part = 0.0  # seconds that an accepted draft token saves, expected
        self.row_share = 0.0  # time of a row, relative to that

    def weigh_tokens(self, costs: StepCosts, step: Step) -> None:
        """Set what an accepted draft token of this step saves, and what its row takes."""
        none, *some = costs.of_each(step, (0, *FEW))
        roots = costs.of(step.without_prompts) if step.prompt_rows else none
        self.part, rows = roots / max(step.num_roots, 1), zip(some, FEW, strict=True)
        self.row_share = min([(seconds - none) / size for seconds, size in rows]) / self.part

    def estimate(self, roots: Sequence[RequestDraft], is_always: bool) -> None:
        """Let each source whose estimates are due estimate its requests together."""
        by_source = dict[DraftSource, list[tuple[RequestDraft, str, SourceAccount]]]()
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

    def asked(self, root: RequestDraft, is_always: bool) -> dict[str, AskedSource]:
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
        self, asked: dict[str, AskedSource], root: RequestDraft, names: Sequence[str]
    ) -> None:
        """Ask sources and models that have an average for each request."""
        for name in names:
            account = root.accounts[name]
            share = account.of(root.request.id)
            if share.pays or account.may_try(share):
                asked[name] = AskedSource(share, not share.pays)


class AdaptiveSpeculator:
    """Asks the sources that pay, and lets the planner choose the nodes to verify."""

    asks_always = False  # see `learn_anew`

    def __init__(
        self,
        sources: Sequence[DraftSource],
        model_sources: Sequence[DraftModelSource],
        scheduler: Scheduler,
        draft_model: DraftModel | None,
        stats: Stats,
        names: Sequence[str] = (),
        before: "AdaptiveSpeculator | None" = None,
        prior: AcceptancePrior | None = None,
    ) -> None:
        """`names` lists all sources, in the order of reports. Statistics of `before` are kept.
        `prior` has the acceptance with which scopes begin.
        """
        self.sources, self.model_sources = sources, model_sources
        self.scheduler, self.draft_model = scheduler, draft_model
        self.names = (*names,) or (*(s.name for s in sources), *(g.name for g in model_sources))
        self.num_ids = None if draft_model is None else draft_model.num_ids
        # All models, also a draft model that other sources use.
        self.models: list[ModelExecutor] = [source.model for source in model_sources]
        if draft_model is not None and draft_model not in self.models:
            self.models.append(draft_model)
        self.spec_stats = SpecDecodeStats(self.names, stats)
        self.planner = Planner(scheduler.costs)
        self.constrained = [source for source in sources if source.needs_rules]
        self.extending = [source for source in sources if source.extends_paths]
        self.observing = [source for source in sources if source.learns_drafts]
        self.recyclers = [TokenRecycler(source) for source in sources if source.num_successors]
        self.estimating_names = {source.name for source in sources if source.is_estimating}
        self.chooser = SourceChooser(self.estimating_names)
        self.model_names = {source.name for source in model_sources}
        self.make_stats = partial(
            AcceptanceStats, sharing=[s.name for s in sources], estimating=self.estimating_names
        )
        self.acceptance = PerTenant(partial(self.make_stats, prior))
        self.served: dict[int, RequestDraft] = {}  # by request
        # State of the current step:
        self.number = 0
        self.step = Step(0, 0, 0, 0)
        self.plan: Plan | None = None
        self.scopes: list[AcceptanceStats] = []  # of its roots
        self.roots: dict[int, RequestDraft] = {}  # those for which sources were asked, by request
        self.work: list[SourceWork] = []
        self.saved_per_draft_token = self.row_seconds = 0.0  # seconds, measured
        self.verified = 0.0  # seconds of the target's forward
        self.making = 0.0  # seconds of drafting and of learning
        self.asking = 0.0  # seconds of the sources, models aside
        self.considering = 0.0  # seconds of choosing the sources to ask
        if before is not None:
            self.go_on_from(before)

    def go_on_from(self, before: "AdaptiveSpeculator") -> None:
        """Keep the statistics of another speculator. If the draft model changes, drop the
        model's.
        """
        before.settle()
        before.acceptance.make = self.acceptance.make
        self.planner, self.acceptance = before.planner, before.acceptance
        self.number = before.number
        self.served = before.served  # running requests begin again, but their grammars do not
        for acceptance in self.acceptance.every:
            acceptance.use_sources([s.name for s in self.sources], self.estimating_names)
            if self.draft_model is not before.draft_model:
                acceptance.forget_model("model")

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        start, asked_before = perf_counter(), bool(self.roots)
        self.settle()
        self.plan, self.step = None, self.scheduler.step
        self.number += 1
        due = self.due([s for s in scheduled if s.is_root])
        for model in self.models if due or asked_before else ():
            model.lend([item.request for item, _, _ in due])
        self.considering = -start + (start := perf_counter())
        if due:
            self.make(due)
            growing = sum([one.catching_up for one in self.model_sources])
            self.making = perf_counter() - start - growing

    def due(
        self, roots: Sequence[ScheduledRequest]
    ) -> list[tuple[ScheduledRequest, RequestDraft, dict[str, AskedSource]]]:
        """Begin a step of the roots' scopes; return the roots for which sources are asked, with
        these sources.
        """
        considered, self.scopes = list[tuple[ScheduledRequest, RequestDraft]](), []
        for item in roots:
            request = item.request
            root = self.served.get(request.id) or self.serve(request)
            acceptance = root.acceptance
            if acceptance.number != self.number:
                acceptance.next_step(self.number, self.asks_always)
                self.scopes.append(acceptance)
            acceptance.num_roots += 1
            if acceptance.is_paused:
                continue
            if request.text is not None and request.text.grammar is not None:
                root.constrain(self.constrained, request.text.grammar)
            if item.draft_limit:
                considered.append((item, root))
            acceptance.may_pay = acceptance.may_pay or root.may_pay
        if not all([acceptance.is_paused for acceptance in self.scopes]):
            self.chooser.weigh_tokens(self.planner.costs, self.step)
            self.chooser.estimate([root for _, root in considered], self.asks_always)
        each = [(s, root, self.chooser.asked(root, self.asks_always)) for s, root in considered]
        return [one for one in each if one[2]]

    def make(
        self, due: Sequence[tuple[ScheduledRequest, RequestDraft, dict[str, AskedSource]]]
    ) -> None:
        """Ask the sources, and choose the nodes to verify."""
        least, by_source = LEAST_ASKED // len(due), dict[str, list[RequestDraft]]()
        used = [root.trie for _, root, _ in due if root.trie is not None]
        if used:
            used[0].clear_each(used)
        for scheduled, root, asked in due:
            root.begin_step(scheduled, asked, least, self.num_ids)
            for name in asked:
                by_source.setdefault(name, []).append(root)
        roots = [root for _, root, _ in due]
        self.roots = {root.request.id: root for root in roots}
        kept = {trust: trust.value for trust in {root.kept for root in roots}}
        share = sum([kept[root.kept] for root in roots]) / len(roots)
        self.step = step = msgspec.structs.replace(self.step, kept=share)
        if late := [root for root in roots if root.request.tpot is not None]:
            note_targets(late, perf_counter(), self.planner.costs.of(step))
        self.asking, self.work = 0.0, []
        for model_source in self.model_sources:
            model_source.begin()
        try:
            for source in self.sources:
                if source.name in by_source:
                    self.ask(source, by_source[source.name])
            self.extend(roots)
            growing = self.grow(by_source)
        finally:
            for model in self.models:
                model.take_back()
        step.spent = self.asking + growing
        asks = [root.ask for root in roots]
        self.plan = self.planner.choose(asks, self.step, self.scheduler.draft_rows)
        self.cut(roots, asks, self.plan)
        if len(self.scopes) == 1:
            self.scopes[0].last = self.plan, self.step

    def settle(self) -> None:
        """Update the accounts of sources after a step."""
        roots, self.roots, part = [*self.roots.values()], {}, self.chooser.part
        if roots and self.plan is not None and self.saved_per_draft_token:
            part = self.saved_per_draft_token
            growing = sum([model_source.seconds for model_source in self.model_sources])
            planning = (self.making - growing - self.asking) / len(roots)
            settle_sources(self.work, planning, part, self.estimating_names)
            for acceptance in {r.acceptance for r in roots if self.model_names.isdisjoint(r.asked)}:
                acceptance.note_planning(planning, acceptance.num_roots)
            for model_source in self.model_sources:
                settle_model(model_source, roots, planning, part)
        considered = [acceptance for acceptance in self.scopes if not acceptance.is_paused]
        each = self.considering / max(sum([one.num_roots for one in considered]), 1)
        for acceptance in considered:
            acceptance.settle(part * acceptance.num_roots, each * acceptance.num_roots)
        self.scopes = []

    def ask(self, source: DraftSource, roots: Sequence[RequestDraft]) -> None:
        """Add a source's candidates."""
        name, start = source.name, perf_counter()
        try:
            found = source.add_candidates([r.item for r in roots], [r.ask.trie for r in roots])
            for root, number in zip(roots, found, strict=True):
                root.proposed[name] = number
        except KVLost:
            raise
        except BaseException:  # user code may fail, and its errors must not change any text
            self.spec_stats.failed(name)
            for root in roots:  # some may have candidates
                root.proposed[name] = 0
        each = self.took(name, perf_counter() - start, roots)
        for account in {root.accounts[name] for root in roots}:
            account.took(each)

    def extend(self, roots: Sequence[RequestDraft]) -> None:
        """Let sources continue paths, such as with forced tokens."""
        for source in self.extending:
            own = [root for root in roots if source in root.allowed]
            if not own:
                continue
            start = perf_counter()
            try:
                for root in own:
                    source.extend(root.ask.trie, root.item, root.proposed)
            except Exception:  # an error of a source must not change any text
                self.spec_stats.failed(source.name)
            self.took(source.name, perf_counter() - start, own, is_extension=True)

    def took(
        self, name: str, seconds: float, roots: Sequence[RequestDraft], is_extension: bool = False
    ) -> float:
        """Count the seconds of a source for these roots; return those of each."""
        self.asking += seconds
        self.work.append((name, roots, each := seconds / len(roots), is_extension))
        self.spec_stats.took(name, seconds)
        return each

    def grow(self, by_source: Mapping[str, Sequence[RequestDraft]]) -> float:
        """Run models one after the other while their levels are worth the time; return the seconds
        to charge to the step. Those with cheap levels go first.
        """
        asked = [one for one in self.model_sources if one.name in by_source]
        if not asked:
            return 0.0
        policy = self.depth_policy([root.ask for root in self.roots.values()])
        for one in sorted(asked, key=lambda one: one.model.costs.seconds(1, 0, 1)):
            self.grow_by(one, by_source[one.name], policy)
        return policy.spent

    def depth_policy(self, asks: Sequence[RequestCandidates]) -> DraftDepthPolicy:
        """Return the policy for running levels of models in this step, after other sources."""
        values = select(asks, self.scheduler.draft_rows).values
        return DraftDepthPolicy(self.planner.costs, self.step, values)

    def grow_by(
        self, own: DraftModelSource, roots: Sequence[RequestDraft], policy: DraftDepthPolicy
    ) -> None:
        start, source, name = perf_counter(), own.source, own.name
        requests = [root.request for root in roots]
        scopes = [root.acceptance for root in roots]
        levels = DraftDepthController(policy, scopes, name, own.model, requests, source.max_depth)
        try:
            tries = [RequestTrie(root.item, root.ask.trie, root.proposed) for root in roots]
            source.grow(tries, levels, self.extending)
        except KVLost:
            raise
        except Exception:  # for example, too little memory
            self.spec_stats.failed(name)
        for root in roots:
            if root.request.id in levels.tried:
                root.tried += (name,)
        taken = perf_counter() - start
        own.is_trial_alone, own.catching_up = levels.is_trial_alone, levels.catching_up_took
        own.seconds = taken - own.catching_up
        self.spec_stats.took(name, taken)

    def cut(
        self, roots: Sequence[RequestDraft], asks: Sequence[RequestCandidates], plan: Plan
    ) -> None:
        """Build the plan's drafts, and reserve their slots."""
        chosen = list[ScheduledRequest]()
        for root, (found, expected) in zip(roots, plan.cut(asks), strict=True):
            if found.nodes:
                root.scheduled.draft, root.nodes, root.node_sources = found
                root.expected = expected
                chosen.append(root.scheduled)
        self.scheduler.reserve_draft_slots(chosen)
        plan.rows = self.step.rows + sum([len(scheduled.draft.tokens) for scheduled in chosen])

    def timed(self, seconds: float) -> None:
        plan, step, self.verified = self.plan, self.step, seconds
        if plan is None:
            return
        self.planner.observe(plan, step, seconds)
        # Other load slows all rows alike.
        costs, num_draft_tokens = self.planner.costs, plan.rows - step.rows
        none, drafted = costs.of_each(step, (0, num_draft_tokens))
        without = seconds * none / drafted
        # Bound the first estimates: draft tokens took time, but not more per row than other rows.
        without = min(max(without, seconds * step.rows / plan.rows), seconds)
        extra = seconds - without
        self.row_seconds = extra / num_draft_tokens if num_draft_tokens else 0.0
        # An accepted token spares later steps a root's part of them, but no rows of prompts.
        plain = costs.of(step.without_prompts) if step.prompt_rows else none
        roots = without * plain / none
        self.saved_per_draft_token = roots / step.num_roots
        self.spec_stats.begin(self.saved_per_draft_token, self.row_seconds)

    def collect_successors(
        self,
        sampled: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        answers: TargetTokens,
    ) -> None:
        is_paused = self.scopes and all(acceptance.is_paused for acceptance in self.scopes)
        for recycler in () if is_paused else self.recyclers:
            name, start = recycler.source.name, perf_counter()
            try:
                acceptance = [self.acceptance.of(s.request.id) for s in sampled]
                ids = [s.request.id for s in sampled]
                if not recycler.has_time(ids, acceptance, self.verified):
                    continue
                rows = accepted_rows(sampled, paths, acceptance)
                recycler.collect_successors(rows, answers, start)
            except Exception:  # for example, too little memory
                self.spec_stats.failed(name)
            self.spec_stats.took(name, perf_counter() - start)

    def learn(
        self, items: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath]
    ) -> list[StepCounts]:
        start, counts, learnt = perf_counter(), list[StepCounts](), list[RequestDraft]()
        tokens = list[list[int]]()
        for item, path in zip(items, paths, strict=True):
            root = self.roots.get(item.request.id)
            if root is None or not path.tokens:
                counts.append(NO_COUNTS)
                continue
            counts.append(self.count(root, path))
            learnt.append(root)
            tokens.append(path.tokens)
        if learnt:
            tries = [root.ask.trie for root in learnt]
            tries[0].observe_each(tries, tokens)
        self.making += perf_counter() - start
        return counts

    def count(self, root: RequestDraft, path: AcceptedPath) -> StepCounts:
        """Count the draft's tokens by source, and notify the sources."""
        draft, accepted, stats = root.scheduled.draft, path.nodes, self.spec_stats
        size = len(draft.tokens)
        root.lately += LATELY * (size - root.lately)
        for name, asked in root.asked.items():
            if asked.is_trial and name not in self.estimating_names:
                first = root.ask.trie.child(ROOT, path.tokens[0])
                if first is not None and name in root.ask.trie.sources(first):
                    root.might_save = root.might_save | {name: self.saved_per_draft_token}
        draft_sources = DraftSources(draft, root.node_sources[:size], root.proposed)
        groups = draft_sources.groups(accepted)
        is_tree_asked = root.request.sampling.return_speculation_details
        counts = stats.enter(draft_sources, accepted, groups, is_tree_asked)
        root.note_savings(groups, self.saved_per_draft_token, self.row_seconds)
        if root.expected:
            root.kept.add(len(accepted), root.expected)
        else:
            root.kept.fade()
        if size:
            for source in self.observing:
                stats.notify(source, "observe", root.request.id, draft, accepted)
        return counts

    def begin(self, request: Request) -> None:
        begun = SourceRequest(
            request.id,
            request.token_ids,
            request.num_prompt,
            scope_of(request),
            request.sampling.prediction,
            request.sampling.speculation.learn,
        )
        before = self.served.pop(request.id, None)
        root = self.serve(request)
        for source in self.sources:
            if source.needs_rules:
                if before is not None and source in before.begun:
                    root.add(source)
            elif begun.prediction or not source.needs_prediction:
                source.begin(begun)
                root.add(source)

    def serve(self, request: Request) -> RequestDraft:
        """Serve a request with models. Other sources serve it once they know it, see `begin`."""
        acceptance = self.acceptance.begin(request.id, scope_of(request))
        acceptance.may_pay = True  # the request may differ from earlier ones
        allows = request.sampling.speculation.allows
        models = [source.name for source in self.model_sources if allows(source.name)]
        self.served[request.id] = root = RequestDraft(request, acceptance, models)
        return root

    def forget(self, id: int) -> None:
        served = self.served.pop(id, None)
        if served is not None:
            served.acceptance.forget(id)
            self.acceptance.forget(id)
            for source in served.begun:
                self.spec_stats.notify(source, "forget", id)

    def tell(self, state: SpeculationState) -> SpeculationState:
        acceptance = self.acceptance.find((state.tenant, "", "")) or AcceptanceStats()
        points = table(acceptance.counts())
        return msgspec.structs.replace(
            state,
            calibration=msgspec.convert(points, dict[str, list[CalibrationPoint]]),
            plan=None if acceptance.last is None else plan_state(*acceptance.last),
        )

    def learn_anew(self) -> None:
        """Drop all statistics, also those of an earlier start. From now on, ask estimating sources
        in every step, whether or not their draft tokens are worth the planning.
        """
        self.acceptance, self.asks_always = PerTenant(self.make_stats), True
        self.reset()

    def reset(self) -> None:
        self.planner = Planner(self.scheduler.costs)
        self.acceptance.reset()
        self.roots, self.scopes = {}, []
        for source in self.sources:
            source.reset()
        for served in self.served.values():
            served.bind(self.acceptance.begin(served.request.id, scope_of(served.request)))
