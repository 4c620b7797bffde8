"""Guesses of all sources in one tree a request, as many as raise the expected tokens a second."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from specserve.engine.draft_model import DraftModel
from specserve.engine.guesses import draft_item
from specserve.engine.levels import Levels
from specserve.engine.runner import KVLost
from specserve.engine.user_code import UserCode
from specserve.scheduling import ScheduledRequest, Scheduler
from specserve.scheduling.cost import StepCosts
from specserve.scheduling.planner import Ask, Plan, Planner
from specserve.scheduling.step import Step
from specserve.scheduling.trials import Trials
from specserve_drafters import DraftItem
from specserve_drafters.calibration import Calibration
from specserve_drafters.candidates import Candidate, Trie
from specserve_drafters.model_source import ModelSource
from specserve_drafters.tree import ROOT

LEAST_ASKED = 32  # guesses that sources are asked for in a step, shared by its requests
LATELY = 1 / 8  # weight of a step in how many guesses of a request were lately verified


class Source(Protocol):
    """Proposes candidates; of user code they are checked already."""

    name: str

    def candidates(self, items: Sequence[DraftItem]) -> list[list[Candidate]]: ...

    def forget(self, id: int) -> None: ...


class Guess(msgspec.Struct, eq=False):
    """A root's candidates, and which of them are the guesses of its draft, in order."""

    trie: Trie
    nodes: list[int] = []


class PlannedGuesses:
    """Asks all sources, and lets the planner choose what is verified."""

    def __init__(
        self,
        sources: Sequence[Source],
        model: ModelSource | None,
        scheduler: Scheduler,
        draft_model: DraftModel | None,
        planner: Planner,
        draft_costs: StepCosts,
        user_code: UserCode,
    ) -> None:
        self.sources, self.model = sources, model
        self.scheduler, self.draft_model = scheduler, draft_model
        self.planner, self.draft_costs, self.user_code = planner, draft_costs, user_code
        self.calibration, self.trials = Calibration(), Trials()
        self.lately: dict[int, float] = {}  # by request: guesses verified a step
        # Of the step:
        self.step = Step(0, 0, 0, 0)
        self.plan: Plan | None = None
        self.guesses: dict[int, Guess] = {}  # by request
        self.tried: set[int] = set()  # requests that the draft model was run for as a trial

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        roots = [s for s in scheduled if s.draft_limit]
        self.step, self.plan = step_of(scheduled), None
        self.guesses, self.tried = {}, set()
        if not roots:
            return
        items = [draft_item(root, self.limit(root, len(roots))) for root in roots]
        tries = [Trie(self.calibration, item.id) for item in items]
        for source in self.sources:
            self.ask(source, items, tries)
        asks = [Ask(trie, root.draft_limit) for trie, root in zip(tries, roots, strict=True)]
        spent = self.grow(roots, items, asks)
        self.step = msgspec.structs.replace(self.step, spent=spent)
        most = self.scheduler.guess_rows
        self.plan = self.planner.choose(asks, self.step, most)
        self.cut(roots, tries, self.plan)

    def limit(self, root: ScheduledRequest, num_roots: int) -> int:
        """Guesses to ask for: those that are likely to be verified, and as many more."""
        lately = 2 + 2 * int(self.lately.get(root.request.id, 0.0))
        return min(root.draft_limit, max(lately, LEAST_ASKED // num_roots))

    def ask(self, source: Source, items: Sequence[DraftItem], tries: Sequence[Trie]) -> None:
        for trie, found in zip(tries, source.candidates(items), strict=True):
            trie.merge(found)

    def grow(
        self, roots: Sequence[ScheduledRequest], items: Sequence[DraftItem], asks: Sequence[Ask]
    ) -> float:
        """Let the draft model add what is worth its time; the seconds to charge for it."""
        begun = [i for i, root in enumerate(roots) if root.request.num_output > 0]
        if self.model is None or self.draft_model is None or not begun:
            return 0.0
        requests = [roots[i].request for i in begun]
        growth = self.planner.growth(asks, self.step, self.scheduler.guess_rows)
        depth = self.model.max_depth
        levels = Levels(growth, self.draft_costs, self.trials, self.draft_model, requests, depth)
        self.draft_model.lend(requests)
        try:
            self.model.grow([items[i] for i in begun], [asks[i].trie for i in begun], levels)
        except KVLost:
            raise
        except Exception:
            self.user_code.failed("the draft model")
        finally:
            self.draft_model.take_back()
        self.tried = {*levels.tried}
        return growth.spent

    def cut(self, roots: Sequence[ScheduledRequest], tries: Sequence[Trie], plan: Plan) -> None:
        """Make the plan's drafts, and reserve their slots."""
        for root, trie, nodes in zip(roots, tries, plan.nodes, strict=True):
            guess = self.guesses[root.request.id] = Guess(trie)
            if nodes:
                root.draft, guess.nodes = trie.draft(nodes)
        self.scheduler.reserve_guesses(root for root in roots if root.draft.tokens)
        plan.rows = self.step.rows + sum(len(root.draft) for root in roots)

    def timed(self, seconds: float) -> None:
        if self.plan is not None:
            self.planner.observe(self.plan, self.step, seconds)
        else:
            step = self.step
            self.planner.costs.observe(step.rows, step.context, step.requests, seconds)

    def learn(self, item: ScheduledRequest, tokens: Sequence[int], accepted: Sequence[int]) -> None:
        id = item.request.id
        guess = self.guesses.get(id)
        if guess is None:
            return
        guess.trie.observe(tokens)
        lately = self.lately.get(id, 0.0)
        self.lately[id] = lately + LATELY * (len(item.draft) - lately)
        if id in self.tried:
            right = guess.trie.children[ROOT].get(tokens[0])
            if right is not None and "model" in guess.trie.sources(right):
                self.trials.worked(id)

    def forget(self, id: int) -> None:
        self.calibration.forget(id)
        self.trials.forget([id])
        self.lately.pop(id, None)
        for source in self.sources:
            source.forget(id)


def step_of(scheduled: Sequence[ScheduledRequest]) -> Step:
    """The step without guesses."""
    sizes = [s.end - s.start for s in scheduled]
    roots = [s.is_root for s in scheduled]
    return Step(
        rows=sum(sizes),
        context=sum(s.end for s in scheduled),
        requests=len(scheduled),
        num_roots=sum(roots),
        prompt_rows=sum(size for size, is_root in zip(sizes, roots, strict=True) if not is_root),
    )
