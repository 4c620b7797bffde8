"""Guesses of all sources in one tree a request, as many as raise the expected tokens a second."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import msgspec

from specserve.engine.runner import KVLost, TargetTokens
from specserve.exchange.messages import SpeculationState, Stats
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.scheduling.cost import Step
from specserve.scheduling.planner import (
    Ask,
    DraftDepthPolicy,
    ExplorationBudget,
    Plan,
    Planner,
    Turn,
    tokens_behind,
)
from specserve.speculation.draft_depth import DraftDepthController
from specserve.speculation.draft_model import DraftModel
from specserve.speculation.executor import DraftModelSource, ModelExecutor
from specserve.speculation.recycler import TokenRecycler, reached
from specserve.speculation.speculator import Foreseen, Source
from specserve.speculation.verify import (
    AcceptanceStats,
    AcceptedPath,
    DraftSources,
    SpecDecodeStats,
    StepSpecStats,
    calibration_state,
    owner_of,
    plan_state,
)
from specserve_drafters import DraftItem
from specserve_drafters.candidates import FINDS, MAX_NODES, ROOT, Trie
from specserve_drafters.grammar import GrammarSource
from specserve_drafters.model_source import Grown
from specserve_drafters.owners import Owners, OwnSources
from specserve_drafters.prediction import PredictionSource
from specserve_drafters.recycle import RecycleSource
from specserve_drafters.suffix import SuffixSource

LEAST_ASKED = 32  # guesses that sources are asked for in a step, shared by its requests
COLD = 0.6  # of the time of making guesses after a pause that it takes in every step
LATELY = 1 / 8  # weight of a step in how many guesses of a request were lately verified


LISTENING = PredictionSource, SuffixSource, RecycleSource, OwnSources  # are told of each request


class Asked(NamedTuple):
    """Which sources are asked for a request in a step."""

    is_promised: bool  # those that foresee their guesses
    turn: Turn | None  # others; None: they are not
    level_turns: dict[str, Turn]  # models, by their sources: those that are not asked are left out

    @property
    def is_any(self) -> bool:
        """Of those beside models."""
        return self.is_promised or self.turn is not None


class Root(msgspec.Struct, eq=False):
    """A root of the step: its candidates, and which of them are its draft's guesses, in order."""

    scheduled: ScheduledRequest
    item: DraftItem
    ask: Ask
    learned: AcceptanceStats  # from requests of its owner
    proposed: dict[str, int]  # by source
    asked: Asked
    nodes: list[int] = []
    tried: set[str] = set()  # models that were run for it as a trial
    saved: float | None = None  # seconds by guesses that others than models made, too
    saved_by: dict[str, float] = {}  # and by others; without models that are catching up

    @property
    def trie(self) -> Trie:
        return self.ask.trie

    @property
    def priority(self) -> int:
        return self.scheduled.request.sampling.priority

    def may_ask(self, source: str) -> bool:
        return self.scheduled.request.sampling.speculation.allows(source)


class Growing(NamedTuple):
    """A model that is asked in a step."""

    grower: DraftModelSource
    roots: list[Root]  # that it is asked for
    levels: DraftDepthController

    def rate(self, is_by_texts: bool) -> float:
        """What its levels alone are expected to bring, at best: by what texts have shown, or only
        by what levels take.
        """
        name, depth = self.grower.name, self.levels.max_depth
        if not is_by_texts:
            return self.levels.rate([[FINDS] * depth] * len(self.roots))
        return self.levels.rate([root.trie.chances(name, depth) for root in self.roots])


class AdaptiveSpeculator:
    """Asks all sources, and lets the planner choose what is verified."""

    def __init__(
        self,
        sources: Sequence[Source],
        growers: Sequence[DraftModelSource],
        scheduler: Scheduler,
        draft_model: DraftModel | None,
        stats: Stats,
        names: Sequence[str] = (),
        before: "AdaptiveSpeculator | None" = None,
    ) -> None:
        """`names` are those of all sources, in the order in which they are told. What guesses
        `before` have shown is gone on with.
        """
        self.sources, self.growers = sources, growers
        self.scheduler, self.draft_model = scheduler, draft_model
        self.names = (*names,) or (*(s.name for s in sources), *(g.name for g in growers))
        self.models: list[ModelExecutor] = [grower.model for grower in growers]  # and others' one
        if draft_model is not None and draft_model not in self.models:
            self.models.append(draft_model)
        self.ledger = SpecDecodeStats(self.names, stats)
        self.planner = Planner(scheduler.costs)
        self.learned = Owners(AcceptanceStats)
        self.lately: dict[int, float] = {}  # by request: guesses verified a step
        self.foreseen = [source for source in sources if isinstance(source, Foreseen)]
        self.grammar = next((s for s in sources if isinstance(s, GrammarSource)), None)
        self.prediction = next((s for s in sources if isinstance(s, PredictionSource)), None)
        self.suffix = next((s for s in sources if isinstance(s, SuffixSource)), None)
        recycle = next((s for s in sources if isinstance(s, RecycleSource)), None)
        self.harvester = None if recycle is None else TokenRecycler(recycle)
        self.own = [source for source in sources if isinstance(source, OwnSources)]
        self.foreseen_names = {source.name for source in self.foreseen}
        self.has_unforeseen = len(self.foreseen) < len(sources)
        # Of the step:
        self.step = Step(0, 0, 0, 0)
        self.plan: Plan | None = None
        self.alone: AcceptanceStats | None = (
            None  # of the owner that all its requests have, if one has
        )
        self.roots: dict[int, Root] = {}  # by request
        self.promised: dict[int, float] = {}  # by request: seconds
        self.saved_by_guess = self.row_seconds = 0.0  # of an accepted guess, and of each
        self.verified = 0.0  # seconds that the target took
        self.making = 0.0  # seconds of making guesses and of learning from them
        if before is not None:
            self.go_on_from(before)

    def go_on_from(self, before: "AdaptiveSpeculator") -> None:
        """Take over what other guesses have shown, but for another draft model's."""
        before.settle()
        self.planner, self.learned, self.lately = before.planner, before.learned, before.lately
        if self.draft_model is not before.draft_model:
            for learned in self.learned.every:
                learned.forget_model("model")

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        asked_before = bool(self.roots)
        if asked_before:
            self.settle()
        self.plan = None
        self.next_step(scheduled)
        if self.grammar is not None:
            self.follow_grammars(self.grammar, scheduled)
        part, self.promised = self.part(self.scheduler.step), {}
        due = [(s, self.asked(s.request, part)) for s in scheduled if s.draft_limit]
        due = [(s, asked) for s, asked in due if any(asked)]
        for model in self.models if due or asked_before else ():
            model.lend([s.request for s, _ in due])
        if not due:
            return
        start = perf_counter()
        self.step = self.scheduler.step
        self.roots = {s.request.id: self.root(s, asked, len(due)) for s, asked in due}
        for learned in {root.learned for root in self.roots.values()}:
            learned.passed = learned.turns.passed()
        self.make([*self.roots.values()])
        self.making = perf_counter() - start - sum(g.catching_up for g in self.growers)

    def next_step(self, scheduled: Sequence[ScheduledRequest]) -> None:
        each = [(self.learned_of(s.request), s.is_root) for s in scheduled]
        owners = {learned for learned, _ in each}
        self.alone = next(iter(owners)) if len(owners) == 1 else None
        for learned in owners:
            learned.next_step()
        for learned, is_root in each:
            learned.num_roots += is_root

    def follow_grammars(self, source: GrammarSource, scheduled: Sequence[ScheduledRequest]) -> None:
        for request in (item.request for item in scheduled):
            grammar = request.grammar
            if grammar is not None and request.sampling.speculation.allows(source.name):
                source.follow(request.id, grammar)

    def learned_of(self, request: Request) -> AcceptanceStats:
        if request.id not in self.learned.requests:
            self.learned.begin(request.id, owner_of(request))
        return self.learned.of(request.id)

    def part(self, step: Step) -> float:
        """A request's part of the seconds of a step, which is what a right guess saves."""
        return self.planner.costs.of(step) / max(step.num_roots, 1)

    def asked(self, request: Request, part: float) -> Asked:
        """Part: what a right guess saves, in seconds."""
        id, allows = request.id, request.sampling.speculation.allows
        is_promised, learned = self.is_promising(request, part), self.learned_of(request)
        is_asked = self.has_unforeseen and learned.turns.is_due(id)
        turn = learned.turns.of(id) if is_asked else None
        growing = self.growers if request.num_output > 0 else ()
        turns = {g.name: learned.level_turns[g.name] for g in growing if allows(g.name)}
        return Asked(
            is_promised,
            turn,
            {name: each.of(id) for name, each in turns.items() if each.is_due(id)},
        )

    def is_promising(self, request: Request, part: float) -> bool:
        """Whether right guesses are likely to save the time of planning them."""
        id, text, speculation = request.id, request.token_ids, request.sampling.speculation
        asked = [source for source in self.foreseen if speculation.allows(source.name)]
        asked = [source for source in asked if self.knows(source, id)]
        saved = part * max((source.promise(id, text) for source in asked), default=0.0)
        self.promised[id] = saved
        return self.learned_of(request).is_promising(saved)

    def knows(self, source: object, id: int) -> bool:
        """Whether there is anything that a source could guess for a request from."""
        if isinstance(source, GrammarSource):
            return id in source.rules
        if isinstance(source, LISTENING):
            return id in source.requests
        return True

    def make(self, roots: Sequence[Root]) -> None:
        """Ask the sources, and choose what is verified."""
        self.note_targets(roots)
        spent = 0.0
        for grower in self.growers:
            grower.begin()
        try:
            for source in self.sources:
                asked = [root for root in roots if root.asked.turn is not None]
                if source in self.foreseen:
                    asked = [root for root in roots if root.asked.is_any]
                asked = [root for root in asked if self.knows(source, root.item.id)]
                spent += self.ask(source, [root for root in asked if root.may_ask(source.name)])
            spent += self.force(roots)
            spent += self.grow(roots)
        finally:
            for model in self.models:
                model.take_back()
        self.step = msgspec.structs.replace(self.step, spent=spent)
        asks = [root.ask for root in roots]
        self.plan = self.planner.choose(asks, self.step, self.scheduler.guess_rows)
        self.cut(roots, self.plan)
        if self.alone is not None:
            self.alone.last = self.plan, self.step

    def settle(self) -> None:
        """Note what an asked step has shown of the sources' pace, and of making guesses."""
        roots = [*self.roots.values()]
        by_owner = dict[AcceptanceStats, list[Root]]()
        for root in roots:
            by_owner.setdefault(root.learned, []).append(root)
        for learned in by_owner:
            learned.settle()
        if self.plan is not None and self.saved_by_guess:
            num_asked = sum(root.asked.is_any for root in roots)
            growing = sum(grower.seconds for grower in self.growers)
            planning = (self.making - growing) / max(num_asked, 1)
            if num_asked and not any(root.asked.turn for root in roots):
                self.note_promises(roots)
                for learned in by_owner:
                    learned.note_planning(planning)
            for learned, own in by_owner.items():
                others = [(r.asked.turn, r.saved) for r in own if r.asked.turn]
                self.turn(learned.turns, learned.num_roots, others, planning, 0.0)
            beside = 0.0 if num_asked else self.making - growing  # what levels alone have caused
            asked = [g for g in self.growers if any(g.name in r.asked.level_turns for r in roots)]
            for grower in asked:
                self.turn_levels(grower, roots, beside / len(asked))
        self.roots = {}

    def turn_levels(self, grower: DraftModelSource, roots: Sequence[Root], beside: float) -> None:
        """Note what a model's levels have saved of the step's time, which took so many seconds more
        for them than they did.
        """
        name = grower.name
        # Levels for one request alone, as a trial, take about as long as for all, and say nothing
        # of the others: it bears the part that it would have then.
        grown = [root for root in roots if name in root.asked.level_turns]
        run = [root for root in grown if name in root.tried] if grower.is_trial_alone else grown
        seconds = grower.seconds + beside
        level = seconds / len(grown)
        lost = (grower.catching_up + seconds - level * len(run)) / max(len(run), 1)
        by_owner = dict[AcceptanceStats, list[tuple[Turn | None, float | None]]]()
        for root in run:
            turned = root.asked.level_turns[name], root.saved_by.get(name)
            by_owner.setdefault(root.learned, []).append(turned)
        for learned, own in by_owner.items():
            self.turn(learned.level_turns[name], learned.num_roots, own, level, lost)

    def note_promises(self, roots: Sequence[Root]) -> None:
        """Learn what came of promises in a step in which only such sources were asked."""
        for root in roots:
            promised = self.promised.get(root.item.id, 0.0)
            if root.asked.is_promised and root.saved is not None and promised > 0:
                root.learned.note_share(root.saved / promised)

    def turn(
        self,
        turns: ExplorationBudget,
        num_roots: int,
        asked: Sequence[tuple[Turn | None, float | None]],
        taken: float,
        lost: float,
    ) -> None:
        """Note what guesses have saved of the part that each request of an owner with so many roots
        has of the step's time. Making them took so many seconds a request, and the step has lost
        some more for each.
        """
        if not asked:
            return
        part = self.saved_by_guess
        saved, more = list[tuple[Turn, float]](), lost * len(asked) / part
        for turn, gained in asked:
            assert turn is not None, "a request that was asked has a turn"
            usual = taken if turn.pays else COLD * taken
            more += (taken - usual) / part
            if gained is None:
                more += usual / part
            else:
                saved.append((turn, (gained - usual) / part))
        turns.add(saved, num_roots, more)

    def root(self, scheduled: ScheduledRequest, asked: Asked, num_roots: int) -> Root:
        """What sources see of a root. They are asked for the guesses that are likely to be
        verified, and as many more.
        """
        request = scheduled.request
        lately = 2 + 2 * int(self.lately.get(request.id, 0.0))
        depth = request.sampling.speculation.max_depth or MAX_NODES
        limit = min(scheduled.draft_limit, depth, max(lately, LEAST_ASKED // num_roots))
        learned = self.learned_of(request)
        num_ids = None if self.draft_model is None else self.draft_model.num_ids
        trie = Trie(learned.calibration, request.id, request.grammar, num_ids)
        ask = Ask(trie, scheduled.draft_limit, max_depth=depth)
        item = scheduled.draft_item(limit)
        return Root(scheduled, item, ask, learned, {}, asked)

    def note_targets(self, roots: Sequence[Root]) -> None:
        """Note how far requests are behind their targets: those of the most urgent priority that
        has any, as they come before all others.
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

    def ask(self, source: Source, roots: Sequence[Root]) -> float:
        """Add a source's candidates; its seconds. One that takes more than it saves is left out."""
        name, start = source.name, perf_counter()
        roots = self.in_time(name, roots)
        if not roots:
            return 0.0
        try:
            found = source.candidates([root.item for root in roots])
            for root, candidates in zip(roots, found, strict=True):
                root.trie.merge(candidates)
                root.proposed[name] = len(candidates)
        except KVLost:
            raise
        except BaseException:  # it may be user code, whose errors must not change any text
            self.ledger.failed(name)
        return self.took(name, perf_counter() - start, roots)

    def force(self, roots: Sequence[Root]) -> float:
        """Continue other sources' paths by what grammars force; its seconds."""
        grammar = self.grammar
        if grammar is None or not grammar.rules:
            return 0.0
        start = perf_counter()
        for root in roots:
            grammar.extend(root.trie, root.item, root.proposed)
        return self.took(grammar.name, perf_counter() - start, roots)

    def took(self, name: str, seconds: float, roots: Sequence[Root]) -> float:
        """Note the seconds of a source that was asked for such roots; these seconds."""
        for root in roots:
            root.learned.taken[name] += seconds / len(roots)
        self.ledger.took(name, seconds)
        return seconds

    def in_time(self, name: str, roots: Sequence[Root]) -> list[Root]:
        """The roots whose owners' requests a source takes no more time for than it saves."""
        step = self.step
        part = self.part(step)
        owners = {root.learned for root in roots}
        asked = {learned for learned in owners if learned.may_ask(name, part * learned.num_roots)}
        return [root for root in roots if root.learned in asked]

    def grow(self, roots: Sequence[Root]) -> float:
        """Let models add what is worth its time, one after the other; the seconds to charge."""
        asked = {name for root in roots for name in root.asked.level_turns}
        if not asked:
            return 0.0
        asks = [root.ask for root in self.roots.values()]
        growth = self.planner.growth(asks, self.step, self.scheduler.guess_rows)
        growing = [self.growing(g, roots, growth) for g in self.growers if g.name in asked]
        for one in in_order(growing, self.alone):
            self.grow_by(*one)
        return growth.spent

    def growing(
        self, grower: DraftModelSource, roots: Sequence[Root], growth: DraftDepthPolicy
    ) -> Growing:
        name = grower.name
        own = [root for root in roots if name in root.asked.level_turns]
        requests = [root.scheduled.request for root in own]
        learned = [root.learned for root in own]
        levels = DraftDepthController(
            growth, learned, name, grower.model, requests, grower.source.max_depth
        )
        return Growing(grower, own, levels)

    def grow_by(
        self, grower: DraftModelSource, roots: Sequence[Root], levels: DraftDepthController
    ) -> None:
        start, source, name = perf_counter(), grower.source, grower.name
        try:
            grown = [Grown(root.item, root.trie, root.proposed) for root in roots]
            source.grow(grown, levels, self.grammar)
        except KVLost:
            raise
        except Exception:  # as it has too little memory
            self.ledger.failed(name)
        for root in roots:
            if root.item.id in levels.tried:
                root.tried = root.tried | {name}
        taken = perf_counter() - start
        grower.is_trial_alone = levels.is_trial_alone
        grower.catching_up = levels.catching_up_took
        grower.seconds = taken - grower.catching_up
        self.ledger.took(name, taken)

    def cut(self, roots: Sequence[Root], plan: Plan) -> None:
        """Make the plan's drafts, and reserve their slots."""
        for root, nodes in zip(roots, plan.nodes, strict=True):
            if nodes:
                root.scheduled.draft, root.nodes = root.trie.draft(nodes)
        chosen = [root.scheduled for root in roots if root.nodes]
        self.scheduler.reserve_guesses(chosen)
        plan.rows = self.step.rows + sum(len(scheduled.draft) for scheduled in chosen)

    def timed(self, seconds: float) -> None:
        plan, step, self.verified = self.plan, self.step, seconds
        if plan is None:
            return
        self.planner.observe(plan, step, seconds)
        without = self.planner.costs.of(step)
        # No estimate of the first steps may be absurd: guesses took time, but no more a row.
        without = min(max(without, seconds * step.rows / plan.rows), seconds)
        guesses = plan.rows - step.rows
        self.row_seconds = max(0.0, seconds - without) / guesses if guesses else 0.0
        self.saved_by_guess = without / step.num_roots
        self.ledger.begin(self.saved_by_guess, self.row_seconds)

    def harvest(
        self,
        sampled: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        answers: TargetTokens,
    ) -> None:
        if self.harvester is None:
            return
        name, learned = self.harvester.source.name, [self.learned_of(s.request) for s in sampled]
        start = perf_counter()
        try:
            self.harvester.harvest(reached(sampled, paths, learned), answers, self.verified)
        except Exception:  # as there is too little memory
            self.ledger.failed(name)
        self.ledger.took(name, perf_counter() - start)

    def learn(
        self, item: ScheduledRequest, tokens: Sequence[int], accepted: Sequence[int]
    ) -> StepSpecStats:
        root = self.roots.get(item.request.id)
        if root is None:
            return StepSpecStats()
        start = perf_counter()
        root.trie.observe(tokens)
        self.note_use(root, tokens)
        told = self.count(root, accepted)
        self.making += perf_counter() - start
        return told

    def note_use(self, root: Root, tokens: Sequence[int]) -> None:
        """Note what the step has shown of the use of guessing for the request."""
        id, size = root.item.id, len(root.scheduled.draft)
        self.lately[id] = lately = self.lately.get(id, 0.0)
        self.lately[id] += LATELY * (size - lately)
        trie, learned = root.trie, root.learned
        right = trie.children[ROOT].get(tokens[0])
        if right is None:
            return
        if learned.tried:
            for name in trie.sources(right):
                learned.might_save[name] += self.saved_by_guess
        for name in root.tried.intersection(trie.sources(right)):
            learned.trials.worked(name)

    def count(self, root: Root, accepted: Sequence[int]) -> StepSpecStats:
        """Tell of the draft's guesses by source, and tell the sources."""
        draft, request = root.scheduled.draft, root.scheduled.request
        sources = [root.trie.sources(node) for node in root.nodes[: len(draft)]]
        guesses = DraftSources(draft, sources, root.proposed)
        told = self.ledger.enter(guesses, accepted, request.sampling.return_speculation_details)
        self.note_savings(root, sources, accepted)
        for name, counts in told.sources.items():
            root.learned.saved[name] += counts.accepted * self.saved_by_guess
        if draft.tokens:
            for source in self.sources:
                self.ledger.notify(source, "observe", root.item.id, draft, accepted)
        return told

    def note_savings(
        self, root: Root, sources: Sequence[Sequence[str]], accepted: Sequence[int]
    ) -> None:
        """Note what the draft's guesses have saved: those of models alone, and others. What two
        models have guessed is the merit of the one that was run first: the other has only agreed.
        What was promised would have been guessed anyway: a turn beside it is for what else there
        was.
        """
        is_beside = root.asked.is_promised and root.asked.turn is not None
        each, row, right = self.saved_by_guess, self.row_seconds, set(accepted)
        saved = dict.fromkeys(root.asked.level_turns, 0.0)
        root.saved = 0.0
        for node, names in enumerate(sources, 1):
            gain = each * (node in right) - row
            if saved.keys() >= set(names):
                saved[names[0]] += gain
            elif not is_beside or self.foreseen_names.isdisjoint(names):
                root.saved += gain
        late = [g.name for g in self.growers if g.model.is_catching_up(root.scheduled)]
        root.saved_by = {name: gain for name, gain in saved.items() if name not in late}

    def begin(self, request: Request) -> None:
        id, asked, num_prompt = request.id, request.sampling, request.num_prompt
        owner = owner_of(request)
        if self.prediction is not None and asked.prediction:
            self.prediction.expect(id, asked.prediction, num_prompt, owner)
        if self.suffix is not None:
            self.suffix.begin(id, request.token_ids, num_prompt, owner, asked.speculation.learn)
        if self.harvester is not None:
            self.harvester.source.begin(id, owner, asked.speculation.learn)
        for source in self.own:
            source.begin(id, owner)

    def forget(self, id: int) -> None:
        if id in self.learned.requests:
            self.learned.of(id).forget(id)
            self.learned.forget(id)
        self.lately.pop(id, None)
        for source in self.sources:
            if self.knows(source, id):
                self.ledger.notify(source, "forget", id)

    def tell(self, state: SpeculationState) -> SpeculationState:
        learned = self.learned.find((state.tenant, "", "")) or AcceptanceStats()
        return msgspec.structs.replace(
            state,
            calibration=calibration_state(learned.calibration),
            plan=None if learned.last is None else plan_state(*learned.last),
        )

    def reset(self) -> None:
        self.planner = Planner(self.scheduler.costs)
        self.learned.reset()
        self.roots, self.alone = {}, None
        for source in self.foreseen:
            source.reset()
        self.lately = {}


def in_order(growing: Sequence[Growing], alone: AcceptanceStats | None) -> list[Growing]:
    """The most promising first: those after it only add what is still worth its time. Now and then
    another one is, so that what is known of it stays true. Where an owner is not alone in the step
    no texts decide, as they would tell others of themselves.
    """
    if len(growing) < 2:
        return [*growing]
    is_alone = alone is not None
    best, *others = sorted(growing, key=lambda one: one.rate(is_alone), reverse=True)
    tried = list[Growing]()
    if alone is not None:
        due, passed = alone.trials.is_due, alone.passed
        tried = [one for one in others if due((one.grower.name, "first"), passed)]
    return [*tried, best, *(one for one in others if one not in tried)]


def behind(request: Request, now: float, step_seconds: float) -> float:
    """Tokens that a request lacks to meet its target; none before its first token."""
    if request.tpot is None or request.num_output == 0:
        return 0.0
    since_first = now - request.first_token_at
    return tokens_behind(request.tpot, since_first, request.num_output, step_seconds)
