"""A speculator whose accounts are in Python: the slow form of `AdaptiveSpeculator`."""

from collections.abc import Sequence
from time import perf_counter

import msgspec

from specserve.engine.runner import KVLost
from specserve.scheduling import ScheduledRequest
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.constants import LATELY, LEAST_ASKED
from specserve.speculation.planner import Plan
from specserve.speculation.verify import (
    NO_COUNTS,
    AcceptedPath,
    DraftSources,
    StepCounts,
    scope_of,
)
from specserve_drafters import ROOT
from specserve_drafters.base import DraftSource
from specserve_drafters.tenants import PerTenant
from tests.drafters.asks import Asks, RequestCandidates
from tests.speculation.oracle_accounts import OracleStats
from tests.speculation.oracle_costs import without_prompts
from tests.speculation.oracle_depth import OracleDepthPolicy
from tests.speculation.oracle_requests import (
    AskedSource,
    OracleDraft,
    SourceChooser,
    SourceWork,
    settle_model,
    settle_sources,
)

RequestDraft = OracleDraft
AcceptanceStats = OracleStats


class OracleSpeculator(AdaptiveSpeculator):
    def __init__(self, *args):
        super().__init__(*args)
        names = [source.name for source in self.sources]
        self.estimating_names = {source.name for source in self.sources if source.is_estimating}
        self.chooser = SourceChooser(self.estimating_names)
        self.model_names = {source.name for source in self.model_sources}
        given = {"sharing": names, "estimating": self.estimating_names}
        self.acceptance = PerTenant(lambda: OracleStats(**given))
        self.scopes: list[AcceptanceStats] = []  # of its roots
        self.saved_per_draft_token = self.row_seconds = 0.0  # seconds, measured
        self.work: list[SourceWork] = []

    def serve(self, request):
        acceptance = self.acceptance.begin(request.id, scope_of(request))
        acceptance.may_pay = True
        allows = request.sampling.speculation.allows
        models = [source.name for source in self.model_sources if allows(source.name)]
        allowed = [source for source in self.sources if allows(source.name)]
        self.served[request.id] = root = OracleDraft(request, acceptance, models, allowed)
        return root

    def begin(self, request):
        self.serve(request)

    def forget(self, id):
        served = self.served.pop(id)
        served.acceptance.forget(id)
        self.acceptance.forget(id)

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
        for _, root, _ in due:
            if root.trie is not None:
                root.trie.clear()
        for scheduled, root, asked in due:
            root.begin_step(scheduled, asked, least, self.num_ids)
            for name in asked:
                by_source.setdefault(name, []).append(root)
        roots = [root for _, root, _ in due]
        self.roots = {root.request.id: root for root in roots}
        kept = {trust: trust.value for trust in {root.kept for root in roots}}
        share = sum([kept[root.kept] for root in roots]) / len(roots)
        self.step = step = msgspec.structs.replace(self.step, kept=share)
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
        asks = Asks(root.ask for root in roots)
        self.plan = self.planner.choose(asks, self.step, self.scheduler.draft_rows)
        self.cut(roots, asks, self.plan)
        if len(self.scopes) == 1:
            self.scopes[0].last = self.plan, self.step

    def depth_policy(self):
        asks = Asks(root.ask for root in self.roots.values())
        values = asks.select(self.scheduler.draft_rows).values
        return OracleDepthPolicy(self.planner.costs, self.step, values)

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

    def cut(
        self, roots: Sequence[RequestDraft], asks: Sequence[RequestCandidates], plan: Plan
    ) -> None:
        """Build the plan's drafts, and reserve their slots."""
        chosen = list[ScheduledRequest]()
        for root, (found, expected) in zip(roots, asks.cut(plan.size), strict=True):
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
        plain = costs.of(without_prompts(step)) if step.prompt_rows else none
        roots = without * plain / none
        self.saved_per_draft_token = roots / step.num_roots

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
            for root, own in zip(learnt, tokens, strict=True):
                root.ask.trie.observe(own)
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
        for names, (number, right) in groups.items():
            gain = self.saved_per_draft_token * right - self.row_seconds * number
            for name in names:  # several sources of a token share its saved seconds
                stats.sums[name].saved_seconds += gain / len(names)
        root.note_savings(groups, self.saved_per_draft_token, self.row_seconds)
        if root.expected:
            root.kept.add(len(accepted), root.expected)
        else:
            root.kept.fade()
        if size:
            for source in self.observing:
                stats.notify(source, "observe", root.request.id, draft, accepted)
        return counts
