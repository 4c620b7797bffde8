"""Merge the draft tokens of all sources into one tree per request, and choose how many to
verify.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, log
from time import perf_counter

import msgspec

from specserve.engine.runner import KVLost, TargetTokens
from specserve.exchange.messages import CalibrationPoint, SpeculationState, Stats
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.speculation.constants import COLD, FEW, LATELY, LEAST_ASKED
from specserve.speculation.costs import Step
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
    AcceptedPath,
    DraftSources,
    SourceGroups,
    SpecDecodeStats,
    StepCounts,
    plan_state,
    scope_of,
)
from specserve_drafters import DraftRequest
from specserve_drafters.base import DraftSource, SourceRequest
from specserve_drafters.candidates import MAX_NODES, Rules
from specserve_drafters.model_source import RequestTrie
from specserve_drafters.tenants import PerTenant
from specserve_drafters.trie import AcceptancePrior, BaseTrie, RequestCandidates, table


class AskedSource(msgspec.Struct):
    """A source, or a model, that is asked for a request in a step."""

    share: SavedShare
    is_trial: bool
    promised: float = 0.0  # seconds that it expects to save, if it estimates


class ServedRequest:
    """A running request: the sources that serve it, each with the account of its scope."""

    def __init__(
        self, request: Request, acceptance: AcceptanceStats, models: Sequence[str]
    ) -> None:
        """`models` lists the models that the request allows."""
        self.request, self.models = request, models
        self.begun: list[DraftSource] = []  # sources that know the request
        self.allowed: list[DraftSource] = []  # those of them that it allows
        self.lately = 0.0  # draft tokens verified per step
        self.bind(acceptance)

    def add(self, source: DraftSource) -> None:
        self.begun.append(source)
        if self.request.sampling.speculation.allows(source.name):
            self.allowed.append(source)
        self.bind(self.acceptance)

    @property
    def may_pay(self) -> bool:
        """Return whether any of its sources pays, or whether that is not known so far."""
        accounts = [*(account for _, _, account in self.sources), *self.model_accounts.values()]
        return any(account.may_pay(self.request.id) for account in accounts)

    def bind(self, acceptance: AcceptanceStats) -> None:
        """Use these statistics of its scope."""
        self.acceptance, account = acceptance, acceptance.account
        self.calibration = acceptance.calibration(self.request.sampling.temperature)
        self.kept = acceptance.kept_of(self.request.sampling.temperature)
        each = [(source.name, source.serving(self.request.id)) for source in self.allowed]
        self.sources = [(source, name, account(name)) for name, source in each]
        self.trie: BaseTrie | None = None  # of the latest step
        self.model_accounts = {name: account(name) for name in self.models}

    def begin_trie(self, num_ids: int | None) -> BaseTrie:
        """Return the request's trie without draft tokens. Tokens are below `num_ids`."""
        request = self.request
        if self.trie is None:
            self.trie = self.calibration.trie(request.id, None, num_ids)
        else:
            self.trie.clear()
        self.trie.rules = None if request.text is None else request.text.grammar
        return self.trie


class RequestDraft(msgspec.Struct, eq=False):
    """A root of the step: its candidates, and the nodes that became its draft, in order."""

    scheduled: ScheduledRequest
    item: DraftRequest
    ask: RequestCandidates
    served: ServedRequest
    asked: dict[str, AskedSource]
    trie: BaseTrie
    acceptance: AcceptanceStats
    proposed: dict[str, int] = {}  # number of candidates by source
    nodes: list[int] = []
    sources: list[tuple[str, ...]] = []  # of the nodes
    expected: float = 0.0  # accepted nodes
    tried: set[str] = set()  # models that were run for it as a trial
    taken: dict[str, float] = {}  # seconds of asking, by source
    # Seconds saved by draft tokens, less those of their rows, by the source that proposed first.
    credit: dict[str, float] = {}
    saved_of: dict[str, float] = {}  # seconds saved by all draft tokens of a source
    # Seconds that a verified first token saves, by source on trial that had it.
    might_save: dict[str, float] = {}

    @property
    def priority(self) -> int:
        return self.scheduled.request.sampling.priority

    def saved_by(self, name: str) -> float:
        """Return the seconds that a source has saved, or might have saved in a trial."""
        credit = self.credit.get(name, 0.0)
        return max(credit, self.might_save.get(name, credit)) if self.might_save else credit


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
        self.model_names = {source.name for source in model_sources}
        self.make_stats = partial(
            AcceptanceStats, sharing=[s.name for s in sources], estimating=self.estimating_names
        )
        self.acceptance = PerTenant(partial(self.make_stats, prior))
        self.served: dict[int, ServedRequest] = {}  # by request
        # State of the current step:
        self.number = 0
        self.step = Step(0, 0, 0, 0)
        self.plan: Plan | None = None
        self.scopes: list[AcceptanceStats] = []  # of its roots
        self.roots: dict[int, RequestDraft] = {}  # by request
        self.part = 0.0  # seconds that an accepted draft token saves, expected
        self.row_share = 0.0  # time of a row, relative to that
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

    @property
    def alone(self) -> AcceptanceStats | None:
        """Return the statistics of the only tenant scope in the step; None if there are several."""
        return self.scopes[0] if len(self.scopes) == 1 else None

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        start, asked_before = perf_counter(), bool(self.roots)
        self.settle()
        self.plan, self.step = None, self.scheduler.step
        self.number += 1
        due = self.due([s for s in scheduled if s.is_root])
        for model in self.models if due or asked_before else ():
            model.lend([item.request for item, _, _ in due])
        self.considering = -start + (start := perf_counter())
        if not due:
            return
        self.roots = {each[0].request.id: self.root(*each, len(due)) for each in due}
        self.make([*self.roots.values()])
        self.making = perf_counter() - start - sum(g.catching_up for g in self.model_sources)

    def due(
        self, roots: Sequence[ScheduledRequest]
    ) -> list[tuple[ScheduledRequest, ServedRequest, dict[str, AskedSource]]]:
        """Begin a step of the roots' scopes; return the roots for which sources are asked, with
        these sources.
        """
        found, self.scopes, self.part = [], [], 0.0
        for item in roots:
            served = self.served.get(item.request.id) or self.serve(item.request)
            acceptance = served.acceptance
            if acceptance.number != self.number:
                acceptance.next_step(self.number, self.asks_always)
                self.scopes.append(acceptance)
            acceptance.num_roots += 1
            if acceptance.is_paused:
                continue
            text = item.request.text
            if text is not None and text.grammar is not None:
                self.constrain(served, text.grammar)
            if self.part == 0.0:
                self.weigh_tokens()
            if item.draft_limit and (asked := self.asked(served)):
                found.append((item, served, asked))
            acceptance.may_pay = acceptance.may_pay or served.may_pay
        return found

    def weigh_tokens(self) -> None:
        """Set what an accepted draft token of this step saves, and what its row takes."""
        costs, step = self.planner.costs, self.step
        none, *some = costs.of_each(step, (0, *FEW))
        roots = costs.of(step.without_prompts) if step.prompt_rows else none
        self.part, rows = roots / max(step.num_roots, 1), zip(some, FEW, strict=True)
        self.row_share = min([(seconds - none) / size for seconds, size in rows]) / self.part

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

    def constrain(self, served: ServedRequest, grammar: Rules) -> None:
        """Give sources the grammar of a request; they serve it from now on."""
        for source in self.constrained:
            source.constrain(served.request.id, grammar)
            if source not in served.begun:
                served.add(source)

    def asked(self, served: ServedRequest) -> dict[str, AskedSource]:
        """Choose the sources and models to ask for a request.

        A source that estimates is asked if it promises to save more than it takes, and if one of
        them promises more than planning takes. Others are asked if they have saved time. All are
        asked as a trial if that is due.
        """
        id, text = served.request.id, served.request.token_ids
        asked, unsure, best = dict[str, AskedSource](), dict[str, AskedSource](), 0.0
        start = perf_counter()
        for source, name, account in served.sources:
            if name not in self.estimating_names:
                self.ask_by_share(asked, id, name, account)
            elif account.is_due or self.asks_always:
                expected = source.expected_accepted(id, text)
                account.is_estimated = True
                account.spent += -start + (start := perf_counter())
                if expected <= 0 and not self.asks_always:
                    continue
                promised = self.promise(expected)
                net = account.trust.value * promised - account.seconds
                if net > 0:
                    best = max(best, net)
                    unsure[name] = AskedSource(account.all, False, promised)
                elif self.asks_always or (promised > account.seconds and account.is_exploring):
                    asked[name] = AskedSource(account.all, True, promised)
        if asked or self.asks_always or best > served.acceptance.planning:
            asked |= unsure
        elif unsure:  # planning would take more time than it saves, but only planning shows that
            accounts = served.acceptance.accounts
            due = {name: one for name, one in unsure.items() if accounts[name].is_exploring}
            for one in due.values():
                one.is_trial = True
            asked |= due
        if served.model_accounts and served.request.num_output:
            for name, account in served.model_accounts.items():
                self.ask_by_share(asked, id, name, account)
        return asked

    def ask_by_share(
        self, asked: dict[str, AskedSource], id: int, name: str, account: SourceAccount
    ) -> None:
        share = account.of(id)
        if share.pays or account.may_try(share):
            asked[name] = AskedSource(share, not share.pays)

    def make(self, roots: Sequence[RequestDraft]) -> None:
        """Ask the sources, and choose the nodes to verify."""
        kept = sum([root.served.kept.value for root in roots]) / len(roots)
        self.step = step = msgspec.structs.replace(self.step, kept=kept)
        self.note_targets(roots)
        self.asking = 0.0
        for model_source in self.model_sources:
            model_source.begin()
        by_source = dict[str, list[RequestDraft]]()
        for root in roots:
            for name in root.asked:
                by_source.setdefault(name, []).append(root)
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
        if (alone := self.alone) is not None:
            alone.last = self.plan, self.step

    def settle(self) -> None:
        """Update the accounts of sources after a step."""
        roots, self.roots = [*self.roots.values()], {}
        if roots and self.plan is not None and self.saved_per_draft_token:
            self.part = self.saved_per_draft_token
            growing = sum(model_source.seconds for model_source in self.model_sources)
            planning = (self.making - growing - self.asking) / len(roots)
            for acceptance in self.scopes:
                own = [root for root in roots if root.acceptance is acceptance]
                if own:
                    self.settle_scope(acceptance, own, planning)
            for model_source in self.model_sources:
                self.settle_model(model_source, roots, planning)
        considered = [acceptance for acceptance in self.scopes if not acceptance.is_paused]
        each = self.considering / max(sum([one.num_roots for one in considered]), 1)
        for acceptance in considered:
            acceptance.settle(self.part * acceptance.num_roots, each * acceptance.num_roots)
        self.scopes = []

    def settle_scope(
        self, acceptance: AcceptanceStats, roots: Sequence[RequestDraft], planning: float
    ) -> None:
        """Count what sources took and saved of a scope's roots. The sources that are asked share
        the seconds of planning.
        """
        outcomes = dict[str, list[tuple[SavedShare, float, bool]]]()
        more = dict[str, float]()  # parts of the step that only trials lose, by source
        for root in roots:
            each = planning / len(root.asked)
            for name, taken in root.taken.items():
                account, asked = acceptance.account(name), root.asked.get(name)
                taken += 0.0 if asked is None else each
                is_trial = asked is not None and asked.is_trial
                if not is_trial:
                    acceptance.gain += root.credit.get(name, 0.0) - taken
                if name in self.estimating_names:
                    account.spent += taken
                    account.saved += root.saved_by(name)
                    account.is_tried |= is_trial
                    if asked is not None and asked.promised:
                        account.promised += asked.promised
                        account.kept += root.saved_of.get(name, 0.0)
                elif asked is not None:
                    usual = COLD * taken if is_trial else taken
                    net = (root.saved_by(name) - usual) / self.part
                    outcomes.setdefault(name, []).append((asked.share, net, is_trial))
                    more[name] = more.get(name, 0.0) + (taken - usual) / self.part
            if self.model_names.isdisjoint(root.asked):
                acceptance.note_planning(planning)
        for name, own in outcomes.items():
            acceptance.account(name).add(own, acceptance.num_roots, more[name])

    def settle_model(
        self, model_source: DraftModelSource, roots: Sequence[RequestDraft], planning: float
    ) -> None:
        """Note the share of the step's time that a model's levels have saved."""
        name, part = model_source.name, self.part
        asked = [root for root in roots if name in root.asked]
        if not asked:
            return
        # Levels for a single request, as a trial, take about as long as levels for all requests.
        # They show nothing about the others, so the request is charged its part of a run for all.
        run = asked
        if model_source.is_trial_alone:
            run = [root for root in asked if name in root.tried]
        seconds = model_source.seconds + sum(planning / len(root.asked) for root in asked)
        level = seconds / len(asked)
        lost = (model_source.catching_up + seconds - level * len(run)) / max(len(run), 1)
        for acceptance in self.scopes:
            own = [root for root in run if root.acceptance is acceptance]
            outcomes, more = list[tuple[SavedShare, float, bool]](), lost * len(own) / part
            account = acceptance.account(name)
            for root in own:
                share, is_trial = root.asked[name].share, root.asked[name].is_trial
                usual = COLD * level if is_trial else level
                more += (level - usual) / part
                if model_source.model.is_catching_up(root.scheduled):
                    more += usual / part
                    continue
                is_tried = is_trial or name in root.tried
                saved = root.saved_by(name) - usual
                outcomes.append((share, saved / part, is_tried))
                acceptance.gain += 0.0 if is_tried else saved
            if own:
                account.add(outcomes, acceptance.num_roots, more)

    def root(
        self,
        scheduled: ScheduledRequest,
        served: ServedRequest,
        asked: dict[str, AskedSource],
        num_roots: int,
    ) -> RequestDraft:
        """Create the draft of a root. Sources are asked for about twice the draft tokens that were
        lately verified, or for the request's share of LEAST_ASKED if that is more.
        """
        request = scheduled.request
        lately = 2 + 2 * int(served.lately)
        depth = request.sampling.speculation.max_depth or MAX_NODES
        limit = min(scheduled.draft_limit, depth, max(lately, LEAST_ASKED // num_roots))
        trie = served.begin_trie(self.num_ids)
        ask = RequestCandidates(trie, scheduled.draft_limit, depth)
        item = scheduled.draft_item(limit)
        return RequestDraft(scheduled, item, ask, served, asked, trie, served.acceptance)

    def note_targets(self, roots: Sequence[RequestDraft]) -> None:
        """Set how far requests are behind their targets. Only the most urgent priority with late
        requests counts; it goes first.
        """
        late = [root for root in roots if root.scheduled.request.tpot is not None]
        if not late:
            return
        now, step = perf_counter(), self.step
        takes = self.planner.costs.of(step)
        for root in late:
            root.ask.behind = behind(root.scheduled.request, now, takes)
        priorities = [root.priority for root in late if root.ask.behind > 0]
        for root in late:
            if root.priority > min(priorities, default=root.priority):
                root.ask.behind = 0.0

    def ask(self, source: DraftSource, roots: Sequence[RequestDraft]) -> None:
        """Add a source's candidates."""
        name, start = source.name, perf_counter()
        try:
            found = source.add_candidates([r.item for r in roots], [r.trie for r in roots])
            for root, number in zip(roots, found, strict=True):
                root.proposed[name] = number
        except KVLost:
            raise
        except BaseException:  # user code may fail, and its errors must not change any text
            self.spec_stats.failed(name)
            for root in roots:  # some may have candidates
                root.proposed[name] = 0
        each = self.took(name, perf_counter() - start, roots)
        for acceptance in {root.acceptance for root in roots}:
            acceptance.account(name).took(each)

    def extend(self, roots: Sequence[RequestDraft]) -> None:
        """Let sources continue paths, such as with forced tokens."""
        for source in self.extending:
            own = [root for root in roots if source in root.served.allowed]
            if not own:
                continue
            start = perf_counter()
            try:
                for root in own:
                    source.extend(root.trie, root.item, root.proposed)
            except Exception:  # an error of a source must not change any text
                self.spec_stats.failed(source.name)
            self.took(source.name, perf_counter() - start, own)

    def took(self, name: str, seconds: float, roots: Sequence[RequestDraft]) -> float:
        """Count the seconds of a source for these roots; return those of each."""
        self.asking += seconds
        each = seconds / len(roots)
        for root in roots:
            root.taken[name] = root.taken.get(name, 0.0) + each
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
        self,
        model_source: DraftModelSource,
        roots: Sequence[RequestDraft],
        policy: DraftDepthPolicy,
    ) -> None:
        start, source, name = perf_counter(), model_source.source, model_source.name
        requests = [root.scheduled.request for root in roots]
        scopes = [root.acceptance for root in roots]
        levels = DraftDepthController(
            policy, scopes, name, model_source.model, requests, source.max_depth
        )
        try:
            request_tries = [RequestTrie(root.item, root.trie, root.proposed) for root in roots]
            source.grow(request_tries, levels, self.extending)
        except KVLost:
            raise
        except Exception:  # for example, too little memory
            self.spec_stats.failed(name)
        for root in roots:
            if root.item.id in levels.tried:
                root.tried = root.tried | {name}
        taken = perf_counter() - start
        model_source.is_trial_alone = levels.is_trial_alone
        model_source.catching_up = levels.catching_up_took
        model_source.seconds = taken - model_source.catching_up
        self.spec_stats.took(name, taken)

    def cut(
        self, roots: Sequence[RequestDraft], asks: Sequence[RequestCandidates], plan: Plan
    ) -> None:
        """Build the plan's drafts, and reserve their slots."""
        chosen = list[ScheduledRequest]()
        for root, (found, expected) in zip(roots, plan.cut(asks), strict=True):
            if found.nodes:
                root.scheduled.draft, root.nodes, root.sources = found
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
        self, item: ScheduledRequest, tokens: Sequence[int], accepted: Sequence[int]
    ) -> StepCounts:
        root = self.roots.get(item.request.id)
        if root is None:
            return {}, None
        start = perf_counter()
        self.note_use(root, root.trie.observe(tokens))
        counts = self.count(root, accepted)
        self.making += perf_counter() - start
        return counts

    def note_use(self, root: RequestDraft, accepted: int | None) -> None:
        """Update the request's average draft size, and note the sources on trial whose first token
        was right: `accepted` is its node.
        """
        served, size = root.served, len(root.scheduled.draft.tokens)
        served.lately += LATELY * (size - served.lately)
        tried = [name for name, asked in root.asked.items() if asked.is_trial]
        if tried and accepted is not None:
            names = {*tried}.intersection(root.trie.sources(accepted)) - self.estimating_names
            root.might_save = dict.fromkeys(names, self.saved_per_draft_token)

    def count(self, root: RequestDraft, accepted: Sequence[int]) -> StepCounts:
        """Count the draft's tokens by source, and notify the sources."""
        draft, request = root.scheduled.draft, root.scheduled.request
        sources = root.sources[: len(draft.tokens)]
        draft_sources = DraftSources(draft, sources, root.proposed)
        groups = draft_sources.groups(accepted)
        is_tree_asked = request.sampling.return_speculation_details
        counts, tree = self.spec_stats.enter(draft_sources, accepted, groups, is_tree_asked)
        self.note_savings(root, groups)
        if root.expected:
            root.served.kept.add(len(accepted), root.expected)
        else:
            root.served.kept.fade()
        if draft.tokens:
            for source in self.observing:
                self.spec_stats.notify(source, "observe", root.item.id, draft, accepted)
        return counts, tree

    def note_savings(self, root: RequestDraft, groups: SourceGroups) -> None:
        """Note the seconds that the draft's tokens saved. The source that was first to propose a
        token gets the credit, because sources that take little time are asked first.
        """
        root.credit, root.saved_of = {}, {}
        for names, (number, right) in groups.items():
            gain = self.saved_per_draft_token * right - self.row_seconds * number
            root.credit[names[0]] = root.credit.get(names[0], 0.0) + gain
            for name in names:
                root.saved_of[name] = root.saved_of.get(name, 0.0) + gain

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
        served = self.serve(request)
        for source in self.sources:
            if source.needs_rules:
                if before is not None and source in before.begun:
                    served.add(source)
            elif begun.prediction or not source.needs_prediction:
                source.begin(begun)
                served.add(source)

    def serve(self, request: Request) -> ServedRequest:
        """Serve a request with models. Other sources serve it once they know it, see `begin`."""
        acceptance = self.acceptance.begin(request.id, scope_of(request))
        acceptance.may_pay = True  # the request may differ from earlier ones
        allows = request.sampling.speculation.allows
        models = [source.name for source in self.model_sources if allows(source.name)]
        self.served[request.id] = served = ServedRequest(request, acceptance, models)
        return served

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


def behind(request: Request, now: float, step_seconds: float) -> float:
    """Return the tokens that a request lacks to meet its target; 0 before its first token."""
    if request.tpot is None or request.num_output == 0:
        return 0.0
    since_first = now - request.first_token_at
    return tokens_behind(request.tpot, since_first, request.num_output, step_seconds)
