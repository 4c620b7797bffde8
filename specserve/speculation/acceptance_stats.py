"""What the requests of one owner have shown of guesses. No other owner's guesses go by it."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import msgspec

from specserve.engine.runner import TargetTokens
from specserve.exchange.messages import (
    CostState,
    GuessKind,
    PlanState,
    RowCost,
    SourceCounts,
    SourceStats,
    Stats,
    VerifiedTree,
)
from specserve.scheduling import Request, ScheduledRequest
from specserve.scheduling.cost import Step, StepCosts
from specserve.scheduling.planner import ExplorationBudget, Plan, Trials
from specserve.speculation.verify import AcceptedPath
from specserve_drafters import Draft
from specserve_drafters.candidates import CHILDREN_BY, Calibration
from specserve_drafters.owners import Owner
from specserve_drafters.recycle import NUM_SUCCESSORS, RecycleSource


class StepSpecStats(msgspec.Struct, frozen=True):
    """What a step's output tells of its guesses."""

    sources: dict[str, SourceCounts] = {}
    tree: VerifiedTree | None = None


class DraftSources(NamedTuple):
    """A draft, the sources of each of its guesses, and how many each source had proposed."""

    draft: Draft
    sources: Sequence[Sequence[str]]
    proposed: dict[str, int]


class SpecDecodeStats:
    """Sums over all steps by source, in `stats`. A guess of several sources counts for each."""

    def __init__(self, names: Sequence[str], stats: Stats) -> None:
        """Adds to the sums that there are. A source that comes later has the next bit."""
        self.names, self.sums = names, stats.sources
        for name in names:
            self.sums.setdefault(name, SourceStats())
        self.bits = {name: 1 << i for i, name in enumerate(self.sums)}
        self.saved_by_guess = self.row_seconds = 0.0

    def took(self, name: str, seconds: float) -> None:
        self.sums[name].seconds += seconds
        self.sums[name].saved_seconds -= seconds

    def begin(self, saved_by_guess: float, row_seconds: float) -> None:
        """Begin a step, with the seconds that an accepted guess saves, and that each one took."""
        self.saved_by_guess, self.row_seconds = saved_by_guess, row_seconds

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
                self.add_accepted(name, depth, self.saved_by_guess / len(names))
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


def calibration_state(calibration: Calibration) -> dict[str, list[GuessKind]]:
    return msgspec.convert(calibration.table(), dict[str, list[GuessKind]])


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


def owner_of(request: Request) -> Owner:
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
        self.turns = ExplorationBudget()  # of planning what sources say
        self.level_turns: dict[str, ExplorationBudget] = defaultdict(
            ExplorationBudget
        )  # of levels, by the model's source
        self.trials = Trials(last=LAST_TRIAL)  # of sources that are late, and of models
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
        self.turns.next_step()
        for turns in self.level_turns.values():
            turns.next_step()
        self.share += (1 - self.share) * DOUBT

    def is_promising(self, seconds: float) -> bool:
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
        if is_due := self.trials.is_due(name, self.passed):
            self.tried.add(name)
        return is_due

    def settle(self) -> None:
        """Note what a step has shown of the sources' pace."""
        for name, taken in self.taken.items():
            self.paces[name].add(taken, self.saved[name])
            if name in self.tried and self.might_save[name] > taken:
                self.trials.worked(name)
                self.paces[name] = CostBenefit()
        for each in (self.taken, self.saved, self.might_save, self.tried):
            each.clear()

    def forget_model(self, name: str) -> None:
        """Drop what was learnt of a model: another one takes its place."""
        self.level_turns.pop(name, None)
        for trial in (name, (name, "first")):
            self.trials.worked(trial)
        for judged in (name, CHILDREN_BY + name):
            self.calibration.drop(judged)

    def forget(self, id: int) -> None:
        """Drop what was learnt for a request alone."""
        self.calibration.forget(id)
        self.turns.forget(id)
        for turns in self.level_turns.values():
            turns.forget(id)


SHARE = 0.005  # of the target's time: what this may take
MOST_ROWS = 4  # of a request, in a step


class Row(NamedTuple):
    """A row of the target that a path came through: the token there, and the one after it."""

    row: int  # of those that are read
    token: int
    after: int


class Reached(NamedTuple):
    """A request's rows, in the order of its text."""

    learned: AcceptanceStats
    id: int
    rows: list[Row]


def reached(
    sampled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    learned: Sequence[AcceptanceStats],
) -> list[Reached]:
    """The rows of the roots and of the accepted nodes."""
    roots = accumulate((1 + len(item.draft) for item in sampled), initial=0)
    found = []
    for item, path, root, its in zip(sampled, paths, roots, learned, strict=False):
        rows = [root, *(root + node for node in path.nodes)]
        tokens = [item.request.token_ids[-1], *path.tokens]
        each = [*map(Row, rows, tokens, path.tokens)]
        found.append(Reached(its, item.request.id, each))
    return found


class TokenRecycler:
    """Has a small share of each owner's part of the target's time."""

    def __init__(self, source: RecycleSource) -> None:
        self.source = source

    def harvest(self, reached: Sequence[Reached], answers: TargetTokens, seconds: float) -> None:
        """Learn from a step for which the target took so many seconds."""
        start, part = perf_counter(), seconds / max(len(reached), 1)
        wanted = list[tuple[Reached, Row]]()
        for one in reached:
            learned = one.learned
            learned.left = min(learned.left + SHARE * part, part)
            rows = self.wanted(one)
            wanted += [(one, row) for row in rows[:MOST_ROWS] if learned.left > 0]
        if not wanted or not answers.has_logits:
            return
        self.enter(wanted, answers)
        each = (perf_counter() - start) / len(wanted)
        for one, _ in wanted:
            one.learned.left = max(one.learned.left - each, -part)

    def wanted(self, one: Reached) -> list[Row]:
        """The rows whose successors are missing or old."""
        if not one.rows:
            return []
        tokens = [row.token for row in one.rows] + [one.rows[-1].after]
        return [one.rows[place] for place in self.source.follow(one.id, tokens)]

    def enter(self, wanted: Sequence[tuple[Reached, Row]], answers: TargetTokens) -> None:
        """Enter successors, which come from the device in one copy."""
        rows, after = [row.row for _, row in wanted], [row.after for _, row in wanted]
        k = min(NUM_SUCCESSORS, answers.logits.shape[1])
        said = answers.logprobs(rows, after, k)
        each = zip(wanted, said.ids.tolist(), said.top.exp().tolist(), strict=True)
        for (one, row), ids, p in each:
            self.source.enter(one.id, row.token, ids, p)
