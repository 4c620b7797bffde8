"""Merge the draft tokens of all sources into one tree per request, and choose how many to
verify.

Which sources are asked, and what they took and saved, is decided and counted in C++ (plans.cpp).
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter

import msgspec

from specserve.engine.runner import KVLost, TargetTokens
from specserve.exchange.messages import CalibrationPoint, SourceCounts, SpeculationState, Stats
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.speculation.costs import Step
from specserve.speculation.draft_depth import DraftDepthController, DraftDepthPolicy
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import DraftModelSource, ModelExecutor
from specserve.speculation.planner import (
    AcceptanceStats,
    Plan,
    Planner,
    Plans,
    tokens_behind,
)
from specserve.speculation.recycler import TokenRecycler, accepted_rows
from specserve.speculation.verify import (
    NO_COUNTS,
    AcceptedPath,
    SpecDecodeStats,
    StepCounts,
    plan_state,
    scope_of,
)
from specserve_drafters import Draft, DraftRequest
from specserve_drafters.base import DraftSource, SourceRequest
from specserve_drafters.candidates import MAX_NODES, Rules
from specserve_drafters.model_source import RequestTrie
from specserve_drafters.tenants import PerTenant
from specserve_drafters.trie import AcceptancePrior, BaseTrie, table
from specserve_kernels.cpu.plans import ESTIMATES, MODEL, SHARES, ModelRun

NO_NODES = list[int]()  # it is never changed


class RequestDraft:
    """A running request: the sources that serve it, and its draft of the latest step."""

    def __init__(
        self,
        request: Request,
        acceptance: AcceptanceStats,
        models: Sequence[str],
        num_ids: int | None,
    ) -> None:
        """`models` lists the models that the request allows. Draft tokens are below `num_ids`."""
        self.request, self.models, self.num_ids = request, models, num_ids
        self.begun: list[DraftSource] = []  # sources that know the request
        self.allowed: list[DraftSource] = []  # those of them that it allows
        self.nodes = NO_NODES  # those that became its draft, in order, if it wants details
        self.native, self.handle = acceptance.native, 0
        self.use(acceptance)

    def __del__(self) -> None:
        self.native.free_root(self.handle)

    def use(self, acceptance: AcceptanceStats) -> None:
        """Use these statistics of its scope from now on."""
        sampling, before = self.request.sampling, self.handle
        self.acceptance = acceptance  # it is freed later than this
        max_depth = sampling.speculation.max_depth or MAX_NODES
        given = self.request.id, sampling.temperature > 0, max_depth
        self.handle = self.native.root(acceptance.handle, *given)
        if before:
            self.native.free_root(before)
        calibration = acceptance.calibration(sampling.temperature)
        self.trie: BaseTrie = calibration.trie(self.request.id, None, self.num_ids)
        self.native.set_trie(self.handle, self.trie.handle)
        self.bind()

    def bind(self) -> None:
        """Let its sources serve it."""
        number, number_in_trie = self.acceptance.plans.number, self.trie.number
        self.estimating = list[tuple[DraftSource, str, int]]()  # with the bit of their place
        self.names = [*(source.name for source in self.allowed), *self.models]
        self.is_extended = any(source.extends_paths for source in self.allowed)
        fields = array("q")
        for place, source in enumerate(self.allowed):
            name, serving = source.name, source.serving(self.request.id)
            if serving.is_estimating:
                self.estimating.append((serving, name, 1 << place))
            means = ESTIMATES if serving.is_estimating else SHARES
            fields.extend((number(name), number_in_trie(name), means, serving.address))
        for name in self.models:
            fields.extend((number(name), number_in_trie(name), MODEL, 0))
        self.native.bind(self.handle, len(self.names), fields.buffer_info()[0])

    def add(self, source: DraftSource) -> None:
        self.begun.append(source)
        if self.request.sampling.speculation.allows(source.name):
            self.allowed.append(source)
            self.bind()

    def constrain(self, sources: Sequence[DraftSource], grammar: Rules) -> None:
        """Give these sources the grammar of the request; they serve it from now on."""
        for source in sources:
            source.constrain(self.request.id, grammar)
            if source not in self.begun:
                self.add(source)

    def begin_step(self, scheduled: ScheduledRequest, asked: int, limit: int) -> None:
        """Begin a draft. `asked` has the bits of the sources in Python to ask, each for at most
        `limit` tokens.
        """
        self.scheduled, self.asked, self.limit = scheduled, asked, limit
        self.trie.rules = None if self.request.text is None else self.request.text.grammar
        self.trie.num_continued = 0
        self.proposed: dict[str, int] = {}  # number of candidates by source in Python
        self.tried: tuple[str, ...] = ()  # models that were run for it as a trial

    @property
    def item(self) -> DraftRequest:
        """Return the request in the form that sources get."""
        return self.scheduled.draft_item(self.limit)


def behind_targets(requests: Sequence[Request], now: float, step_seconds: float) -> list[float]:
    """Return how far requests are behind their targets. Only the most urgent priority with late
    requests counts; it goes first.
    """
    late = [behind(request, now, step_seconds) for request in requests]
    priorities = [request.sampling.priority for request in requests]
    urgent = min([p for p, tokens in zip(priorities, late, strict=True) if tokens], default=None)
    return [t if p == urgent else 0.0 for p, t in zip(priorities, late, strict=True)]


def behind(request: Request, now: float, step_seconds: float) -> float:
    """Return the tokens that a request lacks to meet its target; 0 before its first token."""
    if request.tpot is None or request.num_output == 0:
        return 0.0
    since_first = now - request.first_token_at
    return tokens_behind(request.tpot, since_first, request.num_output, step_seconds)


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
        self.plans: Plans = Plans() if before is None else before.plans
        self.use_sources()
        self.make_stats = partial(AcceptanceStats, plans=self.plans)
        self.acceptance = PerTenant(partial(self.make_stats, prior))
        self.served: dict[int, RequestDraft] = {}  # by request
        # State of the current step:
        self.number = 0
        self.step = Step(0, 0, 0, 0)
        self.plan: Plan | None = None
        self.is_paused = False  # all tenant scopes of the step are
        self.stepped: list[RequestDraft] = []  # its roots
        self.roots: dict[int, RequestDraft] = {}  # those for which sources were asked, by request
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
        before.plans.settle(before.settled(), before.considering)
        before.acceptance.make = self.acceptance.make
        self.planner, self.acceptance = before.planner, before.acceptance
        self.number = before.number
        self.served = before.served  # running requests begin again, but their grammars do not
        for acceptance in self.acceptance.every:
            if self.draft_model is not before.draft_model:
                acceptance.forget_model("model")

    def use_sources(self) -> None:
        estimating = [source.name for source in self.sources if source.is_estimating]
        self.plans.use([source.name for source in self.sources], estimating)

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        start, asked_before = perf_counter(), bool(self.roots)
        planning = self.settled()
        self.plan, self.step = None, self.scheduler.step
        self.number += 1
        due = self.due([s for s in scheduled if s.is_root], planning)
        for model in self.models if due or asked_before else ():
            model.lend([root.request for root in due])
        asking = self.plans.told.asking
        self.considering = -start + (start := perf_counter()) - asking
        if due:
            self.make(due)
            growing = sum([one.catching_up for one in self.model_sources])
            self.making = perf_counter() - start + asking - growing
            # A plan is reported only to a scope that has all roots and prompts of the step.
            prompts = scheduled if self.step.prompt_rows else ()
            is_own = self.plans.told.num_scopes == 1
            is_own = is_own and len({scope_of(s.request) for s in prompts}) < 2
            if is_own and self.plan is not None:
                due[0].acceptance.last = self.plan, self.step

    def due(self, roots: Sequence[ScheduledRequest], planning: float) -> list[RequestDraft]:
        """Begin a step of the roots' scopes. Return the roots for which sources are asked.
        `planning`: see `settled`.
        """
        rows, stepped = list[int](), list[RequestDraft]()
        for item in roots:
            request = item.request
            root = self.served.get(request.id) or self.serve(request)
            grammar = None if request.text is None else request.text.grammar
            if grammar is not None:
                root.constrain(self.constrained, grammar)
            given = root.handle, item.draft_limit, request.num_output > 0, grammar is not None
            rows += *given, *request.token_ids.buffer_info()
            stepped.append(root)
        plans, told, costs = self.plans, self.plans.told, self.planner.costs
        taken = planning, self.considering
        plans.begin(*taken, rows, self.number, self.asks_always, self.step, costs)
        self.stepped = stepped  # those of the step before lived until now
        self.is_paused = told.num_scopes > 0 and told.num_paused == told.num_scopes
        if told.num_due:
            self.estimate(told.due[: 3 * told.num_due])
        found = iter(told.asked[: 3 * told.num_asked])
        due = list[RequestDraft]()
        for place, asked, limit in zip(found, found, found, strict=True):
            due.append(root := self.stepped[place])
            root.begin_step(roots[place], asked, limit)
        return due

    def estimate(self, due: Sequence[int]) -> None:
        """Let each source whose estimates are due estimate its requests together, and choose the
        sources to ask. `due`: see `Told` in C++.
        """
        by_source = dict[DraftSource, tuple[str, list[int], list[Request]]]()
        each = iter(due)
        for number, place, bits in zip(each, each, each, strict=True):
            root = self.stepped[place]
            for source, name, bit in root.estimating:
                if bits & bit:
                    _, numbers, requests = by_source.setdefault(source, (name, [], []))
                    numbers.append(number)
                    requests.append(root.request)
        start = perf_counter()
        for source, (name, numbers, requests) in by_source.items():
            found = source.expected_of_each([(r.id, r.token_ids) for r in requests])
            taken = (-start + (start := perf_counter())) / len(numbers)
            self.plans.set_estimates(name, numbers, found, taken)
        self.plans.ask()

    def make(self, roots: Sequence[RequestDraft]) -> None:
        """Ask the sources in Python and the models, and choose the nodes to verify."""
        plans, self.roots = self.plans, {root.request.id: root for root in roots}
        self.step = step = msgspec.structs.replace(self.step, kept=plans.told.kept)
        if any([root.request.tpot is not None for root in roots]):
            requests, seconds = [root.request for root in roots], self.planner.costs.of(step)
            plans.set_behind(behind_targets(requests, perf_counter(), seconds))
        self.asking, growing = plans.told.asking, 0.0
        try:
            if any([root.asked or root.is_extended for root in roots]):
                growing = self.ask_sources(roots)
        finally:
            for model in self.models:
                model.take_back()
        step.spent = self.asking + growing
        self.plan = self.planner.choose(plans, step, self.scheduler.draft_rows)
        self.cut(roots, self.plan)

    def ask_sources(self, roots: Sequence[RequestDraft]) -> float:
        """Ask the sources in Python and the models; return the seconds of models."""
        by_source = self.by_source(roots)
        for source in self.sources:
            if source.name in by_source:
                self.ask(source, by_source[source.name])
        self.extend(roots)
        return self.grow(by_source)

    def by_source(self, roots: Sequence[RequestDraft]) -> dict[str, list[RequestDraft]]:
        """Return the roots that each source is asked for."""
        found = dict[str, list[RequestDraft]]()
        for root in roots:
            for name in named(root.names, root.asked):
                found.setdefault(name, []).append(root)
        return found

    def settled(self) -> float:
        """End a step: note the models that were run, and return the seconds of planning."""
        roots, self.roots, planning = self.roots.values(), {}, self.making - self.asking
        if not self.model_sources:
            return planning
        if roots:
            runs = [
                ModelRun(self.plans.number(s.name), s.is_trial_alone, s.seconds, s.catching_up)
                for s in self.model_sources
            ]
            self.plans.note_models(runs, [x for root in roots for x in self.bits_of(root)])
        growing = sum([model_source.seconds for model_source in self.model_sources])
        for model_source in self.model_sources:
            model_source.begin()
        return planning - growing

    def bits_of(self, root: RequestDraft) -> tuple[int, int]:
        """Return bits of the models that were run for a root as a trial only, and of those that
        are still catching up with it.
        """
        tried = catching_up = 0
        asked = {*named(root.names, root.asked)}
        for k, one in enumerate(self.model_sources):
            if one.name in asked:
                tried |= (one.name in root.tried) << k
                catching_up |= one.model.is_catching_up(root.scheduled) << k
        return tried, catching_up

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
        self.took(name, perf_counter() - start)

    def extend(self, roots: Sequence[RequestDraft]) -> None:
        """Let sources continue paths, such as with forced tokens."""
        for source in self.extending:
            own = [root for root in roots if source in root.allowed]
            if not own:
                continue
            start = perf_counter()
            try:
                for root in own:
                    source.extend(root.trie, root.item, root.proposed)
            except Exception:  # an error of a source must not change any text
                self.spec_stats.failed(source.name)
            self.took(source.name, perf_counter() - start, is_extension=True)

    def took(self, name: str, seconds: float, is_extension: bool = False) -> None:
        """Count the seconds of a source."""
        self.asking += seconds
        self.plans.took(name, seconds, is_extension)
        self.spec_stats.took(name, seconds)

    def grow(self, by_source: Mapping[str, Sequence[RequestDraft]]) -> float:
        """Run models one after the other while their levels are worth the time; return the seconds
        to charge to the step. Those with cheap levels go first.
        """
        asked = [one for one in self.model_sources if one.name in by_source]
        if not asked:
            return 0.0
        policy = self.depth_policy()
        for one in sorted(asked, key=lambda one: one.model.costs.seconds(1, 0, 1)):
            self.grow_by(one, by_source[one.name], policy)
        return policy.spent

    def depth_policy(self) -> DraftDepthPolicy:
        """Return the policy for running levels of models in this step, after other sources."""
        values = self.plans.select(self.scheduler.draft_rows)
        return DraftDepthPolicy(self.planner.costs, self.step, values)

    def grow_by(
        self, own: DraftModelSource, roots: Sequence[RequestDraft], policy: DraftDepthPolicy
    ) -> None:
        start, source, name = perf_counter(), own.source, own.name
        requests = [root.request for root in roots]
        scopes = [root.acceptance for root in roots]
        levels = DraftDepthController(policy, scopes, name, own.model, requests, source.max_depth)
        try:
            tries = [RequestTrie(root.item, root.trie, root.proposed) for root in roots]
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

    def cut(self, roots: Sequence[RequestDraft], plan: Plan) -> None:
        """Build the plan's drafts, and reserve their slots."""
        chosen, end = list[ScheduledRequest](), 0
        counts, tokens, parents, expanded = self.plans.drafts(plan.size)
        is_expanded = any(expanded)
        for root, count in zip(roots, counts, strict=True):
            if count:
                begin, end = end, end + count
                ran = expanded[begin:end] if is_expanded else NO_NODES
                draft = Draft(tokens[begin:end], parents[begin:end], ran if any(ran) else [])
                root.scheduled.draft = draft
                if root.request.sampling.return_speculation_details:
                    root.nodes = self.plans.told.nodes[begin:end]
                chosen.append(root.scheduled)
        self.scheduler.reserve_draft_slots(chosen)
        plan.rows = self.step.rows + sum([len(scheduled.draft.tokens) for scheduled in chosen])

    def timed(self, seconds: float) -> None:
        self.verified = seconds
        if self.plan is not None:
            self.planner.observe(self.plan, self.step, seconds)

    def collect_successors(
        self,
        sampled: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        answers: TargetTokens,
    ) -> None:
        for recycler in () if self.is_paused else self.recyclers:
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
        start, counts, plan = perf_counter(), [NO_COUNTS] * len(items), self.plan
        rows, nodes, tokens = list[int](), list[int](), list[int]()
        learnt = list[tuple[int, RequestDraft, AcceptedPath]]()  # with places in `counts`
        for place, (item, path) in enumerate(zip(items, paths, strict=True)):
            root = self.roots.get(item.request.id)
            if root is None or plan is None or not path.tokens:
                continue
            learnt.append((place, root, path))
            rows += root.handle, len(item.draft.tokens), len(path.nodes), len(path.tokens)
            nodes += path.nodes
            tokens += path.tokens
        if learnt and plan is not None:
            plans, told, num_drafts = self.plans, self.plans.told, plan.rows - self.step.rows
            plans.learn(rows, nodes, tokens, self.planner.costs, num_drafts, self.verified)
            found = told.found[: 5 * told.num_found]
            by_request: list[list[int]] = [[] for _ in learnt]
            for k in range(0, len(found), 5):
                by_request[found[k]] += found[k + 1 : k + 5]
            for (place, root, path), own in zip(learnt, by_request, strict=True):
                counts[place] = self.count(root, path, own)
            self.spec_stats.add(plans.names, iter(told.sums[: told.num_sums]))
        self.making += perf_counter() - start
        return counts

    def count(self, root: RequestDraft, path: AcceptedPath, found: Sequence[int]) -> StepCounts:
        """Count the draft's tokens by source, and notify the sources. `found` has the numbers of
        sources, and of their draft tokens: proposed in C++, verified, and accepted.
        """
        draft, stats, proposed = root.scheduled.draft, self.spec_stats, root.proposed
        counts = stats.nothing.copy()
        for name, some in proposed.items():
            counts[name] = SourceCounts(some)
            stats.sums[name].proposed += some
        for k in range(0, len(found), 4):
            name, some = self.plans.names[found[k]], found[k + 1]
            counts[name] = SourceCounts(proposed.get(name, some), *found[k + 2 : k + 4])
        if not draft.tokens:
            return counts, None
        for source in self.observing:
            stats.notify(source, "observe", root.request.id, draft, path.nodes)
        if not root.request.sampling.return_speculation_details:
            return counts, None
        sources = [root.trie.sources(node) for node in root.nodes[: len(draft.tokens)]]
        return counts, stats.tree_of(draft, sources, path.nodes)

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
        acceptance.expect_more()  # the request may differ from earlier ones
        allows = request.sampling.speculation.allows
        models = [source.name for source in self.model_sources if allows(source.name)]
        self.served[request.id] = root = RequestDraft(request, acceptance, models, self.num_ids)
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

    def learn_anew(self, exploration: float | None = None) -> None:
        """Drop all statistics, also those of an earlier start. From now on, ask estimating sources
        in every step, whether or not their draft tokens are worth the planning. Trials may lose a
        share `exploration` of the time.
        """
        self.plans, self.asks_always = Plans(exploration), True
        self.use_sources()
        self.make_stats = partial(AcceptanceStats, plans=self.plans)
        self.acceptance = PerTenant(self.make_stats)
        self.reset()

    def reset(self) -> None:
        self.planner = Planner(self.scheduler.costs)
        self.plans.clear()
        self.acceptance.reset()
        self.roots, self.stepped = {}, []
        for source in self.sources:
            source.reset()
        for served in self.served.values():
            served.use(self.acceptance.begin(served.request.id, scope_of(served.request)))


def named(names: Sequence[str], bits: int) -> list[str]:
    """Return the names whose places have a bit."""
    return [name for place, name in enumerate(names) if bits >> place & 1]
