"""Verification: following the target's tokens down trees of draft tokens, and what this has shown.

`SpecDecodeStats` counts over all requests. `AcceptanceStats` learns from the requests of one owner,
and no other owner's draft tokens depend on it.
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import msgspec

from specserve.engine.runner import AskedLogprobs, Runner, TargetTokens, scored
from specserve.exchange.messages import (
    CalibrationPoint,
    CostState,
    PlanState,
    RowCost,
    SourceCounts,
    SourceStats,
    Stats,
    TokenLogprobs,
    VerifiedTree,
)
from specserve.scheduling import Request, ScheduledRequest
from specserve.scheduling.cost import Step, StepCosts
from specserve.scheduling.planner import ExplorationBudget, ExplorationSchedule, Plan
from specserve_drafters import ROOT, Draft
from specserve_drafters.candidates import CHILDREN_BY, Calibration
from specserve_drafters.tenants import TenantScope
from specserve_kernels import Logprobs

log = logging.getLogger("specserve")

# The target's token after each node, given as (request's number in the step, node of its tree);
# called only for nodes that the verify_tree has reached.
TokensAfter = Callable[[list[tuple[int, int]]], list[int]]
IsLast = Callable[[int, list[int]], bool]


class AcceptedPath(msgspec.Struct, eq=False):
    """A request's new tokens in a step, and the nodes that proposed them, from the root down.

    failure  NO_TOKEN or NOT_FINITE if the last row that was reached gave no token; else 0
    """

    tokens: list[int]
    nodes: list[int]
    failure: int = 0
    logprobs: list[TokenLogprobs] = []  # of these tokens, where the request asked for them

    def cut_failure(self) -> None:
        """Take out what is no token. The request fails if that comes first, so in the next step
        after tokens: where it fails depends on no draft.
        """
        if self.tokens[-1] < 0:
            self.failure = self.tokens.pop()
            del self.nodes[len(self.tokens) - 1 :]


def verify_tree(
    drafts: Sequence[Draft], tokens_after: TokensAfter, is_last: IsLast
) -> list[AcceptedPath]:
    """Follow the target's tokens down each tree for as long as a child has guessed them.

    All requests go down a level at once. is_last(request, tokens) ends a request's output. The
    last token of a path, which no node has guessed, is the bonus token. A draft decides how many
    tokens a path has, never which.
    """
    paths = [AcceptedPath([], []) for _ in drafts]
    at = [(i, ROOT) for i in range(len(drafts))]
    while at:
        below = []
        for (i, node), token in zip(at, tokens_after(at), strict=True):
            path, draft = paths[i], drafts[i]
            path.tokens.append(token)
            child = draft.child(node, token) if draft.tokens else None
            if child is not None and not is_last(i, path.tokens):
                path.nodes.append(child)
                below.append((i, child))
        at = below
    return paths


def accepted_paths(
    sampled: Sequence[ScheduledRequest], answers: TargetTokens
) -> list[AcceptedPath]:
    """The new tokens of each sampled request, and the accepted nodes of its tree."""
    drafts = [item.draft for item in sampled]
    roots = [0, *accumulate([1 + len(draft.tokens) for draft in drafts])]

    def tokens_after(at: list[tuple[int, int]]) -> list[int]:
        return answers.after([roots[i] + node for i, node in at])

    def is_last(i: int, tokens: list[int]) -> bool:
        return sampled[i].request.finish_reason(tokens) is not None

    paths = verify_tree(drafts, tokens_after, is_last)
    for path in paths:
        path.cut_failure()
    return paths


def give_logprobs(
    asked: AskedLogprobs,
    target: Runner,
    scheduled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    answers: TargetTokens,
) -> None:
    """Give paths the logprobs of their tokens, and requests those of their prompts' tokens."""
    report_drawn([s for s in scheduled if s.is_sampled], paths, answers, asked.k)
    if len(asked.rows):
        report_prompts(scheduled, target.score(asked))


def report_prompts(scheduled: Sequence[ScheduledRequest], said: Logprobs) -> None:
    """Give the items what is said of their prompts' tokens, in the order of the step's rows."""
    each = iter(token_logprobs(said))
    for item in scheduled:
        some = islice(each, len(scored(item)))
        item.scores = [first(x, item.request.sampling.prompt_logprobs) for x in some]


def report_drawn(
    sampled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    answers: TargetTokens,
    k: int,
) -> None:
    """Give the paths of requests that asked for them their tokens' logprobs."""
    rows, tokens, asking = list[int](), list[int](), list[tuple[Request, AcceptedPath]]()
    roots = accumulate([1 + len(s.draft) for s in sampled], initial=0)
    for item, path, root in zip(sampled, paths, roots, strict=False):
        if item.request.sampling.logprobs is not None:
            asking.append((item.request, path))
            rows += [root + node for node in (ROOT, *path.nodes)][: len(path.tokens)]
            tokens += path.tokens
    if not asking:
        return
    each = iter(token_logprobs(answers.logprobs(rows, tokens, k)))
    for request, path in asking:
        some = islice(each, len(path.tokens))
        path.logprobs = [first(x, request.sampling.logprobs) for x in some]


def token_logprobs(said: Logprobs) -> list[TokenLogprobs]:
    columns = said.token, said.rank, said.ids, said.top
    return [TokenLogprobs(*x) for x in zip(*(c.tolist() for c in columns), strict=True)]


def first(said: TokenLogprobs, k: int | None) -> TokenLogprobs:
    """With the k likeliest alone: another request of the step may have asked for more."""
    return TokenLogprobs(said.logprob, said.rank, said.ids[:k], said.top[:k])


class StepSpecStats(msgspec.Struct, frozen=True):
    """What a step's output tells of its guesses."""

    sources: dict[str, SourceCounts] = {}
    tree: VerifiedTree | None = None


class DraftSources(NamedTuple):
    """A draft, the sources of each of its guesses, and how many each source had proposed."""

    draft: Draft
    sources: Sequence[Sequence[str]]
    proposed: dict[str, int]


def count_error(stats: Stats, name: str) -> None:
    """Count the exception of a source that is being handled, and log it, the first with its
    traceback.
    """
    sums = stats.sources[name]
    sums.errors += 1
    count = sums.errors
    if count & (count - 1) == 0:  # 1, 2, 4, ...: failures in every step must not fill the log
        message = "drafter %s failed (%s), %d times so far; the text does not change"
        log.error(message, name, sys.exception(), count, exc_info=count == 1)


class SpecDecodeStats:
    """Sums over all steps by source, in `stats`. A guess of several sources counts for each."""

    def __init__(self, names: Sequence[str], stats: Stats) -> None:
        """Adds to the sums that there are. A source that comes later has the next bit."""
        self.names, self.stats, self.sums = names, stats, stats.sources
        for name in names:
            self.sums.setdefault(name, SourceStats())
        self.bits = {name: 1 << i for i, name in enumerate(self.sums)}
        self.saved_per_draft_token = self.row_seconds = 0.0

    def failed(self, name: str) -> None:
        """Count the exception that is being handled."""
        count_error(self.stats, name)

    def notify(self, source: Any, what: str, *args: object) -> None:
        """Call a method of a source, if it has it, and count what it raises."""
        try:
            if (method := getattr(source, what, None)) is not None:
                method(*args)
        except BaseException:  # the rest of the commit has to be done
            self.failed(source.name)

    def took(self, name: str, seconds: float) -> None:
        self.sums[name].seconds += seconds
        self.sums[name].saved_seconds -= seconds

    def begin(self, saved_per_draft_token: float, row_seconds: float) -> None:
        """Begin a step, with the seconds that an accepted guess saves, and that each one took."""
        self.saved_per_draft_token, self.row_seconds = saved_per_draft_token, row_seconds

    def enter(
        self, guesses: DraftSources, accepted: Sequence[int], is_tree_asked: bool
    ) -> StepSpecStats:
        """Count a request's guesses of the step. One of several sources saves for all together."""
        draft, sources, proposed = guesses
        verified, right = dict.fromkeys(proposed, 0), dict.fromkeys(proposed, 0)
        for names in sources:
            for name in names:
                verified[name] += 1
                self.sums[name].saved_seconds -= self.row_seconds / len(names)
        for depth, node in enumerate(accepted):
            for name in (names := sources[node - 1]):
                right[name] += 1
                self.add_accepted(name, depth, self.saved_per_draft_token / len(names))
        for name, number in proposed.items():
            self.sums[name].proposed += number
            self.sums[name].verified += verified[name]
        each = proposed, verified, right
        counts = {name: SourceCounts(*(n.get(name, 0) for n in each)) for name in self.names}
        if not is_tree_asked or not draft.tokens:
            return StepSpecStats(counts)
        bits = [sum(self.bits[name] for name in names) for names in sources]
        return StepSpecStats(counts, VerifiedTree(draft.tokens, draft.parents, bits, [*accepted]))

    def add_accepted(self, name: str, depth: int, saved: float) -> None:
        sums = self.sums[name]
        sums.accepted += [0] * (depth + 1 - len(sums.accepted))
        sums.accepted[depth] += 1
        sums.saved_seconds += saved


def cost_state(costs: StepCosts) -> CostState:
    steps = [RowCost(rows, s, costs.is_known(rows)) for rows, s in costs.table().items()]
    per_token, per_row, per_request = costs.added
    return CostState(steps, per_token, per_row, per_request, costs.slowdown)


def calibration_state(calibration: Calibration) -> dict[str, list[CalibrationPoint]]:
    return msgspec.convert(calibration.table(), dict[str, list[CalibrationPoint]])


def plan_state(plan: Plan, step: Step) -> PlanState:
    return PlanState(
        roots=step.num_roots,
        prompt_rows=step.prompt_rows,
        guesses=plan.rows - step.rows,
        rows=plan.rows,
        tokens=plan.tokens,
        seconds=plan.seconds,
    )


LAST_TRIAL = 128  # steps from a trial of a source to the next, at most
RATE = 1 / 16  # of a step in what planning usually takes, and what promises are worth
FREE = 0.02  # of a step's time, which a source may take whatever it saves
FIRST = 8  # steps that show nothing yet
DOUBT = 1 / 2048  # of what they are worth less: by each step it is forgotten


def scope_of(request: Request) -> TenantScope:
    digest = "" if request.adapter is None else request.adapter.digest
    return request.caller.tenant, request.sampling.cache_salt, digest


class CostBenefit:
    """The seconds of a step that a source has lately taken, and those that it has saved."""

    def __init__(self) -> None:
        self.taken = self.saved = 0.0
        self.num_steps = 0

    def add(self, taken: float, saved: float) -> None:
        self.num_steps += 1
        self.taken += RATE * (taken - self.taken)
        self.saved += RATE * (saved - self.saved)

    def is_late(self, step_seconds: float) -> bool:
        return self.num_steps > FIRST and self.taken > max(self.saved, FREE * step_seconds)


class AcceptanceStats:
    """By what its requests' texts have shown, and so by acceptance. What holds for the machine, as
    what steps cost, is not here. Seconds are the owner's part of those of a step.
    """

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.benefits = ExplorationBudget()  # of planning what sources say
        self.level_benefits: dict[str, ExplorationBudget] = defaultdict(
            ExplorationBudget
        )  # of levels, by the model's source
        self.exploration = ExplorationSchedule(
            last=LAST_TRIAL
        )  # of sources that are late, and of models
        self.paces: dict[str, CostBenefit] = defaultdict(CostBenefit)  # by source
        self.share = 1.0  # of the seconds that sources promise to save, which guesses lately did
        # Usual seconds of a request's guesses, without those of models. Which sources are asked,
        # and how many guesses there are to plan, depends on what texts have shown.
        self.planning = 0.0
        self.is_warm = False  # the first guesses take far longer
        self.left = 0.0  # seconds that taking successors over from logits may take
        self.last: tuple[Plan, Step] | None = None  # of its latest step alone that had a plan
        # Of the step:
        self.num_roots = 0
        self.passed = 1  # steps since the one before in which any request was asked
        self.taken: dict[str, float] = defaultdict(float)  # seconds of each source that was asked
        self.saved: dict[str, float] = defaultdict(float)  # seconds, by source
        self.might_save: dict[str, float] = defaultdict(float)  # if first guesses were verified
        self.tried: set[str] = set()  # sources that were asked although they are late

    def next_step(self) -> None:
        self.num_roots = 0
        self.benefits.next_step()
        for benefits in self.level_benefits.values():
            benefits.next_step()
        self.share += (1 - self.share) * DOUBT

    def is_worthwhile(self, seconds: float) -> bool:
        """Whether guesses that promise to save so many seconds are worth the time of planning."""
        return seconds * self.share > self.planning

    def note_planning(self, seconds: float) -> None:
        """Learn what planning took for a request where only sources that promise were asked."""
        if self.planning:
            self.planning += (min(seconds, 2 * self.planning) - self.planning) * RATE
        elif self.is_warm:
            self.planning = seconds
        self.is_warm = True

    def note_share(self, share: float) -> None:
        """Learn which share of the seconds that were promised guesses have saved."""
        self.share += (min(max(share, 0.0), 1.0) - self.share) * RATE

    def may_ask(self, name: str, step_seconds: float) -> bool:
        """Whether a source is asked: one that takes more than it saves only as a trial."""
        if not self.paces[name].is_late(step_seconds):
            return True
        if is_due := self.exploration.is_due(name, self.passed):
            self.tried.add(name)
        return is_due

    def settle(self) -> None:
        """Note what a step has shown of the sources' pace."""
        for name, taken in self.taken.items():
            self.paces[name].add(taken, self.saved[name])
            if name in self.tried and self.might_save[name] > taken:
                self.exploration.worked(name)
                self.paces[name] = CostBenefit()
        for each in (self.taken, self.saved, self.might_save, self.tried):
            each.clear()

    def forget_model(self, name: str) -> None:
        """Drop what was learnt of a model: another one takes its place."""
        self.level_benefits.pop(name, None)
        for trial in (name, (name, "first")):
            self.exploration.worked(trial)
        for judged in (name, CHILDREN_BY + name):
            self.calibration.drop(judged)

    def forget(self, id: int) -> None:
        """Drop what was learnt for a request alone."""
        self.calibration.forget(id)
        self.benefits.forget(id)
        for benefits in self.level_benefits.values():
            benefits.forget(id)
