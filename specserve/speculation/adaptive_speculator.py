"""Merge the draft tokens of all sources into one tree per request, and choose how many to
verify.
"""

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import msgspec

from specserve.engine.runner import KVLost, TargetTokens
from specserve.exchange.messages import CalibrationPoint, SpeculationState, Stats
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.cost import Step
from specserve.scheduling.planner import (
    DraftDepthPolicy,
    ExplorationBudget,
    Plan,
    Planner,
    SavedShare,
    tokens_behind,
)
from specserve.speculation.draft_depth import DraftDepthController
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import DraftModelSource, ModelExecutor
from specserve.speculation.recycler import TokenRecycler, accepted_rows
from specserve.speculation.verify import (
    AcceptanceStats,
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
from specserve_drafters.candidates import MAX_NODES
from specserve_drafters.model_source import RequestTrie
from specserve_drafters.tenants import PerTenant
from specserve_drafters.trie import FINDS, AcceptancePrior, BaseTrie, RequestCandidates

LEAST_ASKED = 32  # draft tokens per step that sources are asked for, shared by its requests
COLD = 0.6  # time of drafting in every step, relative to drafting after a pause, 0 to 1
LATELY = 1 / 8  # weight of one step in the average number of a request's verified draft tokens


class AskedSources(NamedTuple):
    """Sources that are asked for a request in a step."""

    is_estimated: bool  # estimating sources are asked
    benefit: SavedShare | None  # savings of the other sources; None: they are not asked
    level_benefits: dict[str, SavedShare]  # savings of the models that are asked, by source

    @property
    def is_any(self) -> bool:
        """Return whether any source is asked, models aside."""
        return self.is_estimated or self.benefit is not None


class RequestDraft(msgspec.Struct, eq=False):
    """A root of the step: its candidates, and the nodes that became its draft, in order."""

    scheduled: ScheduledRequest
    item: DraftRequest
    ask: RequestCandidates
    acceptance: AcceptanceStats  # statistics of the request's tenant scope
    proposed: dict[str, int]  # number of candidates by source
    asked: AskedSources
    nodes: list[int] = []
    sources: list[tuple[str, ...]] = []  # of the nodes
    tried: set[str] = set()  # models that were run for it as a trial
    # Seconds saved by draft tokens; tokens that only models proposed are left out.
    saved: float | None = None
    # Seconds saved by draft tokens that only models proposed, by model.
    saved_by: dict[str, float] = {}
    saved_of: dict[str, float] = {}  # seconds saved by all draft tokens of a source

    @property
    def trie(self) -> BaseTrie:
        return self.ask.trie

    @property
    def priority(self) -> int:
        return self.scheduled.request.sampling.priority

    def may_ask(self, source: str) -> bool:
        return self.scheduled.request.sampling.speculation.allows(source)


class ModelDraft(NamedTuple):
    """A model that is asked in a step."""

    model_source: DraftModelSource
    roots: list[RequestDraft]  # roots that the model is asked for
    levels: DraftDepthController

    def rate(self, is_by_texts: bool) -> float:
        """Return the highest expected rate with only this model's levels. `is_by_texts` uses
        acceptance statistics; otherwise only the levels' costs count.
        """
        name, depth = self.model_source.name, self.levels.max_depth
        if not is_by_texts:
            return self.levels.rate([[FINDS] * depth] * len(self.roots))
        return self.levels.rate([root.trie.chances(name, depth) for root in self.roots])


class AdaptiveSpeculator:
    """Asks all sources, and lets the planner choose the nodes to verify."""

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
        # All models, also a draft model that other sources use.
        self.models: list[ModelExecutor] = [source.model for source in model_sources]
        if draft_model is not None and draft_model not in self.models:
            self.models.append(draft_model)
        self.spec_stats = SpecDecodeStats(self.names, stats)
        self.planner = Planner(scheduler.costs)
        self.prior = prior or {}
        self.acceptance = PerTenant(partial(AcceptanceStats, self.prior))
        self.asks_always = False  # see `learn_anew`
        self.lately: dict[int, float] = {}  # draft tokens verified per step, by request
        self.estimating = [source for source in sources if source.is_estimating]
        self.constrained = [source for source in sources if source.needs_rules]
        self.extending = [source for source in sources if source.extends_paths]
        self.observing = [source for source in sources if source.learns_drafts]
        self.serving: dict[int, list[DraftSource]] = {}  # the sources that serve a request
        self.recyclers = [TokenRecycler(source) for source in sources if source.num_successors]
        self.estimating_names = {source.name for source in self.estimating}
        self.has_other_sources = len(self.estimating) < len(sources)
        # State of the current step:
        self.step = Step(0, 0, 0, 0)
        self.plan: Plan | None = None
        # Statistics of the only tenant scope in the step; None if there are several.
        self.alone: AcceptanceStats | None = None
        self.roots: dict[int, RequestDraft] = {}  # by request
        # Seconds that estimating sources expect to save, by request and source.
        self.expected_seconds: dict[int, dict[str, float]] = {}
        self.saved_per_draft_token = self.row_seconds = 0.0  # seconds
        self.verified = 0.0  # seconds of the target's forward
        self.making = 0.0  # seconds of drafting and of learning
        self.asking = 0.0  # seconds of the sources, models aside
        if before is not None:
            self.go_on_from(before)

    def go_on_from(self, before: "AdaptiveSpeculator") -> None:
        """Keep the statistics of another speculator. If the draft model changes, drop the
        model's.
        """
        before.settle()
        self.planner, self.acceptance, self.lately = (
            before.planner,
            before.acceptance,
            before.lately,
        )
        self.acceptance.make = partial(AcceptanceStats, self.prior)
        # Running requests begin again, but their grammars do not.
        self.serving = {
            id: [source for source in serving if source in self.sources]
            for id, serving in before.serving.items()
        }
        if self.draft_model is not before.draft_model:
            for acceptance in self.acceptance.every:
                acceptance.forget_model("model")

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        asked_before = bool(self.roots)
        if asked_before:
            self.settle()
        self.plan = None
        self.next_step(scheduled)
        for source in self.constrained:
            self.constrain(source, scheduled)
        part, self.expected_seconds = self.part(self.scheduler.step), {}
        due = [(s, self.asked(s.request, part)) for s in scheduled if s.draft_limit]
        due = [(s, asked) for s, asked in due if any(asked)]
        for model in self.models if due or asked_before else ():
            model.lend([s.request for s, _ in due])
        if not due:
            return
        start = perf_counter()
        self.step = self.scheduler.step
        self.roots = {s.request.id: self.root(s, asked, len(due)) for s, asked in due}
        for acceptance in {root.acceptance for root in self.roots.values()}:
            acceptance.passed = acceptance.benefits.passed()
        self.make([*self.roots.values()])
        self.making = perf_counter() - start - sum(g.catching_up for g in self.model_sources)

    def next_step(self, scheduled: Sequence[ScheduledRequest]) -> None:
        each = [(self.acceptance_of(s.request), s.is_root) for s in scheduled]
        scopes = {acceptance for acceptance, _ in each}
        self.alone = next(iter(scopes)) if len(scopes) == 1 else None
        for acceptance in scopes:
            acceptance.next_step()
        for acceptance, is_root in each:
            acceptance.num_roots += is_root

    def constrain(self, source: DraftSource, scheduled: Sequence[ScheduledRequest]) -> None:
        """Give a source the grammars of the requests that allow it; it serves these requests."""
        for request in (item.request for item in scheduled):
            grammar = request.grammar
            if grammar is not None and request.sampling.speculation.allows(source.name):
                source.constrain(request.id, grammar)
                serving = self.serving.setdefault(request.id, [])
                if source not in serving:
                    serving.append(source)

    def serves(self, source: DraftSource, root: "RequestDraft") -> bool:
        return source in self.serving.get(root.item.id, ())

    def acceptance_of(self, request: Request) -> AcceptanceStats:
        if request.id not in self.acceptance.requests:
            self.acceptance.begin(request.id, scope_of(request))
        return self.acceptance.of(request.id)

    def part(self, step: Step) -> float:
        """Return a request's part of a step's seconds: the time that an accepted draft token
        saves.
        """
        return self.planner.costs.of(step) / max(step.num_roots, 1)

    def asked(self, request: Request, part: float) -> AskedSources:
        """Choose the sources to ask. `part` is the time in seconds that an accepted draft token
        saves.
        """
        id, allows = request.id, request.sampling.speculation.allows
        is_estimated, acceptance = self.is_worthwhile(request, part), self.acceptance_of(request)
        is_asked = self.has_other_sources and acceptance.benefits.is_due(id)
        benefit = acceptance.benefits.of(id) if is_asked else None
        growing = self.model_sources if request.num_output > 0 else ()
        benefits = {g.name: acceptance.level_benefits[g.name] for g in growing if allows(g.name)}
        return AskedSources(
            is_estimated,
            benefit,
            {name: each.of(id) for name, each in benefits.items() if each.is_due(id)},
        )

    def is_worthwhile(self, request: Request, part: float) -> bool:
        """Return whether the expected accepted tokens save more time than planning takes."""
        id, text, allows = request.id, request.token_ids, request.sampling.speculation.allows
        acceptance, saved, before = self.acceptance_of(request), dict[str, float](), 0.0
        for source in self.serving.get(id, ()):
            name = source.name
            if not source.is_estimating or not allows(name):
                continue
            if not (self.asks_always or acceptance.may_estimate(name)):
                continue
            before = before or perf_counter()
            saved[name] = part * source.expected_accepted(id, text)
            acceptance.estimating[name] += -before + (before := perf_counter())
        self.expected_seconds[id] = saved
        return self.asks_always or acceptance.is_worthwhile(saved)

    def make(self, roots: Sequence[RequestDraft]) -> None:
        """Ask the sources, and choose the nodes to verify."""
        self.note_targets(roots)
        self.asking = 0.0
        for model_source in self.model_sources:
            model_source.begin()
        try:
            for source in self.sources:
                asked = [root for root in roots if root.asked.benefit is not None]
                if source in self.estimating:
                    asked = [root for root in roots if root.asked.is_any]
                asked = [root for root in asked if self.serves(source, root)]
                self.ask(source, [root for root in asked if root.may_ask(source.name)])
            self.extend(roots)
            growing = self.grow(roots)
        finally:
            for model in self.models:
                model.take_back()
        self.step = msgspec.structs.replace(self.step, spent=self.asking + growing)
        asks = [root.ask for root in roots]
        self.plan = self.planner.choose(asks, self.step, self.scheduler.draft_rows)
        self.cut(roots, self.plan)
        if self.alone is not None:
            self.alone.last = self.plan, self.step

    def settle(self) -> None:
        """Update the statistics of sources and planning after a step with drafts."""
        roots = [*self.roots.values()]
        by_scope = dict[AcceptanceStats, list[RequestDraft]]()
        for root in roots:
            by_scope.setdefault(root.acceptance, []).append(root)
        for acceptance in by_scope:
            acceptance.settle()
        if self.plan is not None and self.saved_per_draft_token:
            num_asked = sum(root.asked.is_any for root in roots)
            growing = sum(model_source.seconds for model_source in self.model_sources)
            planning = (self.making - growing) / max(num_asked, 1)
            if num_asked and not any(root.asked.benefit for root in roots):
                self.note_estimates(roots)
                for acceptance in by_scope:
                    acceptance.note_planning(planning - self.asking / num_asked)
            for acceptance, own in by_scope.items():
                others = [(r.asked.benefit, r.saved) for r in own if r.asked.benefit]
                self.benefit(acceptance.benefits, acceptance.num_roots, others, planning, 0.0)
            # Seconds that only levels have caused.
            extra_seconds = 0.0 if num_asked else self.making - growing
            asked = [
                g
                for g in self.model_sources
                if any(g.name in r.asked.level_benefits for r in roots)
            ]
            for model_source in asked:
                self.turn_levels(model_source, roots, extra_seconds / len(asked))
        self.roots = {}

    def turn_levels(
        self, model_source: DraftModelSource, roots: Sequence[RequestDraft], extra_seconds: float
    ) -> None:
        """Note the share of the step's time that a model's levels have saved. `extra_seconds` is
        overhead that only levels have caused.
        """
        name = model_source.name
        # Levels for a single request, as a trial, take about as long as levels for all requests.
        # They show nothing about the others, so the request is charged its part of a run for all.
        request_tries = [root for root in roots if name in root.asked.level_benefits]
        run = (
            [root for root in request_tries if name in root.tried]
            if model_source.is_trial_alone
            else request_tries
        )
        seconds = model_source.seconds + extra_seconds
        level = seconds / len(request_tries)
        lost = (model_source.catching_up + seconds - level * len(run)) / max(len(run), 1)
        by_scope = dict[AcceptanceStats, list[tuple[SavedShare | None, float | None]]]()
        for root in run:
            outcome = root.asked.level_benefits[name], root.saved_by.get(name)
            by_scope.setdefault(root.acceptance, []).append(outcome)
        for acceptance, own in by_scope.items():
            self.benefit(acceptance.level_benefits[name], acceptance.num_roots, own, level, lost)

    def note_estimates(self, roots: Sequence[RequestDraft]) -> None:
        """Learn the accuracy of estimates from a step that asked only estimating sources."""
        for root in roots:
            expected = self.expected_seconds.get(root.item.id, {})
            for name, seconds in expected.items() if root.asked.is_estimated else ():
                if seconds > 0:
                    root.acceptance.note_share(name, root.saved_of.get(name, 0.0) / seconds)

    def benefit(
        self,
        benefits: ExplorationBudget,
        num_roots: int,
        asked: Sequence[tuple[SavedShare | None, float | None]],
        taken: float,
        lost: float,
    ) -> None:
        """Note the share that draft tokens have saved of each request's part of the step's time.
        `num_roots` counts the scope's roots. Drafting took `taken` seconds per request, and the
        step lost further `lost` seconds per request.
        """
        if not asked:
            return
        part = self.saved_per_draft_token
        saved, more = list[tuple[SavedShare, float]](), lost * len(asked) / part
        for benefit, gained in asked:
            assert benefit is not None, "a request that was asked has a turn"
            usual = taken if benefit.pays else COLD * taken
            more += (taken - usual) / part
            if gained is None:
                more += usual / part
            else:
                saved.append((benefit, (gained - usual) / part))
        benefits.add(saved, num_roots, more)

    def root(
        self, scheduled: ScheduledRequest, asked: AskedSources, num_roots: int
    ) -> RequestDraft:
        """Create the draft of a root. Sources are asked for about twice the draft tokens that were
        lately verified, or for the request's share of LEAST_ASKED if that is more.
        """
        request = scheduled.request
        lately = 2 + 2 * int(self.lately.get(request.id, 0.0))
        depth = request.sampling.speculation.max_depth or MAX_NODES
        limit = min(scheduled.draft_limit, depth, max(lately, LEAST_ASKED // num_roots))
        acceptance = self.acceptance_of(request)
        num_ids = None if self.draft_model is None else self.draft_model.num_ids
        trie = acceptance.calibration.trie(request.id, request.grammar, num_ids)
        ask = RequestCandidates(trie, scheduled.draft_limit, max_depth=depth)
        item = scheduled.draft_item(limit)
        return RequestDraft(scheduled, item, ask, acceptance, {}, asked)

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
        """Add a source's candidates. Skip roots if the source takes more time than it saves."""
        name, start = source.name, perf_counter()
        roots = self.in_time(name, roots)
        if not roots:
            return
        try:
            found = source.candidates([root.item for root in roots])
            for root, candidates in zip(roots, found, strict=True):
                root.trie.merge(candidates)
                root.proposed[name] = len(candidates)
        except KVLost:
            raise
        except BaseException:  # user code may fail, and its errors must not change any text
            self.spec_stats.failed(name)
        self.took(name, perf_counter() - start, roots)

    def extend(self, roots: Sequence[RequestDraft]) -> None:
        """Let sources continue paths, such as with forced tokens."""
        for source in self.extending:
            own = [root for root in roots if self.serves(source, root)]
            if not own:
                continue
            start = perf_counter()
            try:
                for root in own:
                    source.extend(root.trie, root.item, root.proposed)
            except Exception:  # an error of a source must not change any text
                self.spec_stats.failed(source.name)
            self.took(source.name, perf_counter() - start, own)

    def took(self, name: str, seconds: float, roots: Sequence[RequestDraft]) -> None:
        """Count the seconds of a source that was asked for these roots."""
        self.asking += seconds
        each = seconds / len(roots)
        for root in roots:
            root.acceptance.taken[name] += each
        for acceptance in {root.acceptance for root in roots}:
            acceptance.paces[name].note_each(each)
        self.spec_stats.took(name, seconds)

    def in_time(self, name: str, roots: Sequence[RequestDraft]) -> list[RequestDraft]:
        """Return the roots whose scopes save more time with a source than it takes, or try it."""
        if self.asks_always:
            return [*roots]
        step = self.step
        part = self.part(step)
        scopes = {root.acceptance for root in roots}
        asked = {
            acceptance
            for acceptance in scopes
            if acceptance.may_ask(name, part * acceptance.num_roots)
        }
        return [root for root in roots if root.acceptance in asked]

    def grow(self, roots: Sequence[RequestDraft]) -> float:
        """Run models one after the other while their levels are worth the time; return the seconds
        to charge to the step.
        """
        asked = {name for root in roots for name in root.asked.level_benefits}
        if not asked:
            return 0.0
        asks = [root.ask for root in self.roots.values()]
        growth = self.planner.growth(asks, self.step, self.scheduler.draft_rows)
        growing = [self.growing(g, roots, growth) for g in self.model_sources if g.name in asked]
        for one in in_order(growing, self.alone):
            self.grow_by(*one)
        return growth.spent

    def growing(
        self,
        model_source: DraftModelSource,
        roots: Sequence[RequestDraft],
        growth: DraftDepthPolicy,
    ) -> ModelDraft:
        name = model_source.name
        own = [root for root in roots if name in root.asked.level_benefits]
        requests = [root.scheduled.request for root in own]
        acceptance = [root.acceptance for root in own]
        levels = DraftDepthController(
            growth, acceptance, name, model_source.model, requests, model_source.source.max_depth
        )
        return ModelDraft(model_source, own, levels)

    def grow_by(
        self,
        model_source: DraftModelSource,
        roots: Sequence[RequestDraft],
        levels: DraftDepthController,
    ) -> None:
        start, source, name = perf_counter(), model_source.source, model_source.name
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

    def cut(self, roots: Sequence[RequestDraft], plan: Plan) -> None:
        """Build the plan's drafts, and reserve their slots."""
        for root, nodes in zip(roots, plan.nodes, strict=True):
            if nodes:
                root.scheduled.draft, root.nodes, root.sources = root.trie.draft(nodes)
        chosen = [root.scheduled for root in roots if root.nodes]
        self.scheduler.reserve_draft_slots(chosen)
        plan.rows = self.step.rows + sum(len(scheduled.draft) for scheduled in chosen)

    def timed(self, seconds: float) -> None:
        plan, step, self.verified = self.plan, self.step, seconds
        if plan is None:
            return
        self.planner.observe(plan, step, seconds)
        # Other load slows all rows alike.
        costs, num_draft_tokens = self.planner.costs, plan.rows - step.rows
        without = seconds * costs.of(step) / costs.of(step, num_draft_tokens)
        # Bound the first estimates: draft tokens took time, but not more per row than other rows.
        without = min(max(without, seconds * step.rows / plan.rows), seconds)
        extra = seconds - without
        self.row_seconds = extra / num_draft_tokens if num_draft_tokens else 0.0
        self.saved_per_draft_token = without / step.num_roots
        self.spec_stats.begin(self.saved_per_draft_token, self.row_seconds)

    def collect_successors(
        self,
        sampled: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        answers: TargetTokens,
    ) -> None:
        for recycler in self.recyclers:
            name, start = recycler.source.name, perf_counter()
            try:
                acceptance = [self.acceptance_of(s.request) for s in sampled]
                if not recycler.has_time(acceptance, self.verified):
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
        """Update the request's average draft size, and end trials of sources whose first token was
        right: `accepted` is its node.
        """
        id, size = root.item.id, len(root.scheduled.draft)
        self.lately[id] = lately = self.lately.get(id, 0.0)
        self.lately[id] += LATELY * (size - lately)
        acceptance = root.acceptance
        if accepted is None or not (acceptance.tried or root.tried):
            return
        names = root.trie.sources(accepted)
        if acceptance.tried:
            for name in names:
                acceptance.might_save[name] += self.saved_per_draft_token
        for name in root.tried.intersection(names):
            acceptance.exploration.worked(name)

    def count(self, root: RequestDraft, accepted: Sequence[int]) -> StepCounts:
        """Count the draft's tokens by source, and notify the sources."""
        draft, request = root.scheduled.draft, root.scheduled.request
        sources = root.sources[: len(draft)]
        draft_sources = DraftSources(draft, sources, root.proposed)
        groups = draft_sources.groups(accepted)
        is_tree_asked = request.sampling.return_speculation_details
        counts, tree = self.spec_stats.enter(draft_sources, accepted, groups, is_tree_asked)
        self.note_savings(root, groups)
        for name in root.proposed:
            right = counts[name].accepted
            root.acceptance.saved[name] += right * self.saved_per_draft_token
            root.acceptance.net[name] += root.saved_of.get(name, 0.0)
        if draft.tokens:
            for source in self.observing:
                self.spec_stats.notify(source, "observe", root.item.id, draft, accepted)
        return counts, tree

    def note_savings(self, root: RequestDraft, groups: SourceGroups) -> None:
        """Note the seconds that the draft's tokens saved, for each model and for other sources.

        If only models proposed a token, the first of them gets the credit. If a trial runs together
        with estimating sources, only tokens that estimating sources did not propose count for it.
        """
        is_combined = root.asked.is_estimated and root.asked.benefit is not None
        saved = dict.fromkeys(root.asked.level_benefits, 0.0)
        root.saved, root.saved_of = 0.0, {}
        for names, (number, right) in groups.items():
            gain = self.saved_per_draft_token * right - self.row_seconds * number
            for name in names:
                root.saved_of[name] = root.saved_of.get(name, 0.0) + gain
            if saved and saved.keys() >= set(names):
                saved[names[0]] += gain
            elif not is_combined or self.estimating_names.isdisjoint(names):
                root.saved += gain
        if not saved:
            root.saved_by = {}
            return
        late = [g.name for g in self.model_sources if g.model.is_catching_up(root.scheduled)]
        root.saved_by = {name: gain for name, gain in saved.items() if name not in late}

    def begin(self, request: Request) -> None:
        begun = SourceRequest(
            request.id,
            request.token_ids,
            request.num_prompt,
            scope_of(request),
            request.sampling.prediction,
            request.sampling.speculation.learn,
        )
        kept = [source for source in self.serving.get(request.id, ()) if source.needs_rules]
        serving = [source for source in self.sources if not source.needs_rules]
        if not begun.prediction:
            serving = [source for source in serving if not source.needs_prediction]
        for source in serving:
            source.begin(begun)
        self.serving[request.id] = kept + serving

    def forget(self, id: int) -> None:
        if id in self.acceptance.requests:
            self.acceptance.of(id).forget(id)
            self.acceptance.forget(id)
        self.lately.pop(id, None)
        for source in self.serving.pop(id, ()):
            self.spec_stats.notify(source, "forget", id)

    def tell(self, state: SpeculationState) -> SpeculationState:
        acceptance = self.acceptance.find((state.tenant, "", "")) or AcceptanceStats()
        table = acceptance.calibration.table()
        return msgspec.structs.replace(
            state,
            calibration=msgspec.convert(table, dict[str, list[CalibrationPoint]]),
            plan=None if acceptance.last is None else plan_state(*acceptance.last),
        )

    def learn_anew(self) -> None:
        """Drop all statistics, also those of an earlier start. From now on, ask estimating sources
        in every step, whether or not their draft tokens are worth the planning.
        """
        self.acceptance, self.asks_always = PerTenant(AcceptanceStats), True
        self.reset()

    def reset(self) -> None:
        self.planner = Planner(self.scheduler.costs)
        self.acceptance.reset()
        self.roots, self.alone = {}, None
        for source in self.sources:
            source.reset()
        self.lately = {}


def in_order(growing: Sequence[ModelDraft], alone: AcceptanceStats | None) -> list[ModelDraft]:
    """Sort models by expected rate, best first: later models add only levels that still pay.

    As a trial, another model runs first from time to time, so that its statistics stay current. If
    several scopes share the step, statistics do not decide: they would leak between tenants.
    """
    if len(growing) < 2:
        return [*growing]
    is_alone = alone is not None
    best, *others = sorted(growing, key=lambda one: one.rate(is_alone), reverse=True)
    tried = list[ModelDraft]()
    if alone is not None:
        due, passed = alone.exploration.is_due, alone.passed
        tried = [one for one in others if due((one.model_source.name, "first"), passed)]
    return [*tried, best, *(one for one in others if one not in tried)]


def behind(request: Request, now: float, step_seconds: float) -> float:
    """Return the tokens that a request lacks to meet its target; 0 before its first token."""
    if request.tpot is None or request.num_output == 0:
        return 0.0
    since_first = now - request.first_token_at
    return tokens_behind(request.tpot, since_first, request.num_output, step_seconds)
