"""Where a step's guesses come from: the seam between the step loop and drafters."""

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from specserve.engine.runner import Answers, KVLost
from specserve.exchange.messages import SpeculationState
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.ledger import DraftSources, Ledger, Told
from specserve.speculation.source import UserCode, UserSource, draft_item
from specserve.speculation.verify import Path
from specserve_drafters import ROOT, Draft, Drafter
from specserve_drafters.candidates import Rules
from specserve_drafters.model import ModelDrafter
from specserve_drafters.ngram import NgramDrafter

BUILT_IN = NgramDrafter, ModelDrafter  # others might write to what they are given


class Guesses(Protocol):
    """Makes the drafts of a step's roots, and learns what became of them.

    names   of the sources
    """

    names: tuple[str, ...]

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Set the drafts of a step's roots, and reserve their slots. It may raise KVLost only."""
        ...

    def timed(self, seconds: float) -> None:
        """Learn how long the target took for the step."""
        ...

    def harvest(
        self, sampled: Sequence[ScheduledRequest], paths: Sequence[Path], answers: Answers
    ) -> None:
        """Learn from the target's logits, in the rows of a step's paths."""
        ...

    def learn(self, item: ScheduledRequest, tokens: Sequence[int], accepted: Sequence[int]) -> Told:
        """Learn which tokens followed a root, and which guesses of its draft were accepted."""
        ...

    def follow(self, request: Request, rules: Rules) -> None:
        """Guess nothing for a request that its rules forbid; until `forget`."""
        ...

    def begin(self, request: Request) -> None:
        """Guess for a request from now on; until `forget`."""
        ...

    def forget(self, id: int) -> None:
        """Drop what is kept of a request: it has ended."""
        ...

    def tell(self, state: SpeculationState) -> SpeculationState:
        """The engine's state, with what guesses are chosen by."""
        ...

    def reset(self) -> None:
        """Drop what was learnt of guesses."""
        ...


class FixedGuesses:
    """Drafts of one drafter, verified as they are, within limits that nothing moves."""

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        scheduler: Scheduler,
        draft_model: ModelExecutor | None,
        num_ids: int,
        user_code: UserCode,
    ) -> None:
        """Draft tokens are below `num_ids`."""
        self.scheduler, self.draft_model = scheduler, draft_model
        self.num_ids, self.user_code = num_ids, user_code
        self.source = UserSource(name, drafter, num_ids)
        self.names: tuple[str, ...] = (name,)
        self.ledger = Ledger(self.names, user_code.stats)
        self.rules: dict[int, Rules] = {}  # by request

    @property
    def drafter(self) -> Drafter:
        drafter: Drafter = self.source.drafter
        return drafter

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        name, start = self.names[0], perf_counter()
        roots = [s for s in scheduled if s.draft_limit]
        roots = [s for s in roots if s.request.sampling.speculation.allows(name)]
        self.scheduler.share_guesses(roots)
        roots = [s for s in roots if s.draft_limit]
        if not roots:
            return
        if self.draft_model is not None:
            self.draft_model.lend([s.request for s in roots])
        try:
            items = [draft_item(s, s.draft_limit) for s in roots]
            if not isinstance(self.drafter, BUILT_IN):
                items = [item.copy() for item in items]
            drafts = self.drafter.propose(items)
            for item, draft in zip(roots, drafts, strict=True):
                draft = Draft.cut(draft, item.draft_limit, self.num_ids)
                draft = draft.shallow(item.request.sampling.speculation.max_depth)
                item.draft = legal(draft, self.rules.get(item.request.id))
        except KVLost:
            raise
        except BaseException:  # a drafter is user code, whose errors must not change any text
            self.user_code.failed(name)
        finally:
            if self.draft_model is not None:
                self.draft_model.take_back()
        self.scheduler.reserve_guesses(roots)
        self.ledger.took(name, perf_counter() - start)

    def timed(self, seconds: float) -> None:
        pass

    def harvest(
        self, sampled: Sequence[ScheduledRequest], paths: Sequence[Path], answers: Answers
    ) -> None:
        """A drafter that is alone sees no logits of the target."""

    def learn(self, item: ScheduledRequest, tokens: Sequence[int], accepted: Sequence[int]) -> Told:
        request, draft = item.request, item.draft
        if not draft.tokens:
            return Told()
        guesses = DraftSources(draft, [self.names] * len(draft), {self.names[0]: len(draft)})
        is_tree_asked = request.sampling.return_speculation_details
        told = self.ledger.enter(guesses, accepted, is_tree_asked)
        self.user_code.tell(self.source, "observe", request.id, draft, accepted)
        return told

    def begin(self, request: Request) -> None:
        """A drafter that is alone sees a request when it is asked for guesses."""

    def follow(self, request: Request, rules: Rules) -> None:
        self.rules[request.id] = rules

    def forget(self, id: int) -> None:
        self.rules.pop(id, None)
        self.user_code.tell(self.source, "forget", id)

    def tell(self, state: SpeculationState) -> SpeculationState:
        return state

    def reset(self) -> None:
        pass


def legal(draft: Draft, rules: Rules | None) -> Draft:
    """The guesses that the rules allow, where there are any."""
    if rules is None:
        return draft
    paths: dict[int, list[int]] = {ROOT: []}
    for k, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        if parent in paths and rules.allows(paths[parent], token):
            paths[k] = [*paths[parent], token]
    return draft if len(paths) > len(draft) else draft.only([k for k in paths if k != ROOT])
