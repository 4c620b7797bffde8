"""The interface between the step loop and drafters."""

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, ClassVar, Protocol

from specserve.engine.runner import KVLost, TargetTokens
from specserve.exchange.messages import SpeculationState, Stats
from specserve.scheduling import Request, ScheduledRequest, Scheduler
from specserve.speculation.executor import ModelExecutor
from specserve.speculation.verify import (
    NO_COUNTS,
    AcceptedPath,
    DraftSources,
    SpecDecodeStats,
    StepCounts,
)
from specserve_drafters import ROOT, Draft, Drafter, DraftRequest
from specserve_drafters.base import BUILT_IN, DraftSource
from specserve_drafters.candidates import MAX_CANDIDATES, Candidate, Rules, checked, of_draft

log = logging.getLogger("specserve")


class UserSource(DraftSource):
    """A user's drafter as a source. It may raise anything, and its candidates are checked."""

    learns_drafts: ClassVar[bool] = True

    def __init__(self, name: str, drafter: Any, vocab_size: int) -> None:
        self.name, self.drafter, self.vocab_size = name, drafter, vocab_size
        self.has_warned = False  # True after a warning about invalid candidates

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        """Return the drafter's scored candidates, or its draft without scores."""
        items = [item.copy() for item in items]
        scored = getattr(self.drafter, "candidates", None)  # optional in a drafter
        if scored is not None:
            return [self.valid(found) for _, found in zip(items, scored(items), strict=True)]
        drafts: Sequence[Draft] = self.drafter.propose(items)
        return [
            of_draft(Draft.cut(draft, item.limit, self.vocab_size), self.name)
            for draft, item in zip(drafts, items, strict=True)
        ]

    def valid(self, found: Iterable[object]) -> list[Candidate]:
        """Return the candidates before the first invalid one. Only the first such list logs a
        warning.
        """
        given = [*islice(found, MAX_CANDIDATES)]
        valid = checked(given, self.name, self.vocab_size)
        if len(valid) < len(given) and not self.has_warned:
            self.has_warned = True
            log.warning(
                "drafter %s: candidate %d of a list, %.200r, is invalid, and the rest of the list "
                "is dropped. Return Candidates with a token in [0, %d) and as parent ROOT or the "
                "number of an earlier candidate, counted from 1. Later cases are not logged.",
                *(self.name, len(valid) + 1, given[len(valid)], self.vocab_size),
            )
        return valid

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        """Notify the drafter of the whole draft, including the draft tokens of other sources."""
        call_if_present(self.drafter, "observe", id, draft.copy(), [*accepted])

    def forget(self, id: int) -> None:
        call_if_present(self.drafter, "forget", id)


def call_if_present(drafter: object, what: str, *args: object) -> None:
    """Call a method of a drafter, if it has the method. The method may raise any exception."""
    method = getattr(drafter, what, None)  # optional in a drafter
    if method is not None:
        method(*args)


class Speculator(Protocol):
    """Creates the drafts of a step's roots, and learns from their results.

    names   of the sources
    """

    names: tuple[str, ...]

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Set the drafts of a step's roots, and reserve their slots. It raises only KVLost."""
        ...

    def timed(self, seconds: float) -> None:
        """Learn how long the target took for the step."""
        ...

    def collect_successors(
        self,
        sampled: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        answers: TargetTokens,
    ) -> None:
        """Learn successors from the target's logits, in the rows of a step's paths."""
        ...

    def learn(
        self, items: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath]
    ) -> list[StepCounts]:
        """Learn which tokens followed the roots of a step, and which draft tokens were accepted."""
        ...

    def begin(self, request: Request) -> None:
        """Propose draft tokens for a request until `forget`."""
        ...

    def forget(self, id: int) -> None:
        """Drop the state of a request: it has ended."""
        ...

    def tell(self, state: SpeculationState) -> SpeculationState:
        """Add the values that decide about draft tokens to the engine's state."""
        ...

    def reset(self) -> None:
        """Drop all statistics about draft tokens."""
        ...


class FixedSpeculator:
    """Verifies the drafts of one drafter unchanged, within fixed limits."""

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        scheduler: Scheduler,
        draft_model: ModelExecutor | None,
        num_ids: int,
        stats: Stats,
    ) -> None:
        """Draft tokens are below `num_ids`."""
        self.scheduler, self.draft_model = scheduler, draft_model
        self.num_ids = num_ids
        self.source = UserSource(name, drafter, num_ids)
        self.names: tuple[str, ...] = (name,)
        self.spec_stats = SpecDecodeStats(self.names, stats)

    @property
    def drafter(self) -> Drafter:
        drafter: Drafter = self.source.drafter
        return drafter

    def draft(self, scheduled: Sequence[ScheduledRequest]) -> None:
        name, start = self.names[0], perf_counter()
        roots = [s for s in scheduled if s.draft_limit]
        roots = [s for s in roots if s.request.sampling.speculation.allows(name)]
        self.scheduler.share_draft_rows(roots)
        roots = [s for s in roots if s.draft_limit]
        if not roots:
            return
        if self.draft_model is not None:
            self.draft_model.lend([s.request for s in roots])
        try:
            items = [s.draft_item(s.draft_limit) for s in roots]
            if name not in BUILT_IN:  # a user's drafter might write to its input
                items = [item.copy() for item in items]
            drafts = self.drafter.propose(items)
            for item, draft in zip(roots, drafts, strict=True):
                draft = Draft.cut(draft, item.draft_limit, self.num_ids)
                draft = draft.shallow(item.request.sampling.speculation.max_depth)
                item.draft = legal(draft, item.request.grammar)
        except KVLost:
            raise
        except BaseException:  # user code may fail, and its errors must not change any text
            self.spec_stats.failed(name)
        finally:
            if self.draft_model is not None:
                self.draft_model.take_back()
        self.scheduler.reserve_draft_slots(roots)
        self.spec_stats.took(name, perf_counter() - start)

    def timed(self, seconds: float) -> None:
        pass

    def collect_successors(
        self,
        sampled: Sequence[ScheduledRequest],
        paths: Sequence[AcceptedPath],
        answers: TargetTokens,
    ) -> None:
        """Do nothing: a single drafter gets no logits of the target."""

    def learn(
        self, items: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath]
    ) -> list[StepCounts]:
        return [*map(self.count, items, paths)]

    def count(self, item: ScheduledRequest, path: AcceptedPath) -> StepCounts:
        request, draft = item.request, item.draft
        if not draft.tokens or not path.tokens:
            return NO_COUNTS
        sources = DraftSources(draft, [self.names] * len(draft), {self.names[0]: len(draft)})
        is_tree_asked = request.sampling.return_speculation_details
        groups = sources.groups(path.nodes)
        counts = self.spec_stats.enter(sources, path.nodes, groups, is_tree_asked)
        self.spec_stats.notify(self.source, "observe", request.id, draft, path.nodes)
        return counts

    def begin(self, request: Request) -> None:
        """Do nothing: a single drafter gets the request with `propose`."""

    def forget(self, id: int) -> None:
        self.spec_stats.notify(self.source, "forget", id)

    def tell(self, state: SpeculationState) -> SpeculationState:
        return state

    def reset(self) -> None:
        pass


def legal(draft: Draft, rules: Rules | None) -> Draft:
    """Return the draft tokens that the rules allow; all of them if there are no rules."""
    if rules is None:
        return draft
    paths: dict[int, list[int]] = {ROOT: []}
    for k, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True), 1):
        if parent in paths and rules.allows(paths[parent], token):
            paths[k] = [*paths[parent], token]
    return draft if len(paths) > len(draft) else draft.only([k for k in paths if k != ROOT])
