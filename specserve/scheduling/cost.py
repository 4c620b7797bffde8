"""How long a model's steps take, by rows, context and requests: learnt from the steps themselves.

Rows cost in stairs: kernels and graphs work on tiles of them. Attention adds to that: a step reads
the KV of each request once, and each of its rows attends to all of it. Other load makes some steps
slower and none faster, so what a step costs is read off the fastest of the latest steps, and what
slows down all of them alike is kept apart.

Estimates are bounded by measurements. Only steps of equally many rows show what context and
requests add, and a stair's estimate goes through its own latest steps.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from threading import Lock
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np

from specserve.exchange.messages import PlainStep
from specserve.version import VERSION
from specserve_kernels.cpu.compiler import cpu_name, source_hash
from specserve_kernels.cpu.kept import keep, kept_file, read_kept
from specserve_kernels.threads import topology

# Steps of an edge that are remembered; their third best is the estimate, of fewer a better one: the
# first steps are often slow.
WINDOW, RANK = 16, 2
KNOWN = 3  # steps from which on an edge is known
RECENT = 5  # steps of which even the fastest is slowed down by other load
TOO_HIGH = 0.75  # of the estimate: KNOWN steps in a row below it show that all estimates are high
TILE = 16  # rows that a kernel takes as one, where rows are many
FIRST = 1e-3  # seconds of a step of one row, before there was any step
LEAST = 1e-7  # seconds of a step
RIDGE = 16  # rows whose work takes as long as reading the weights, until steps show it
HOPED = 0.8  # of the seconds of an edge's few steps: what it might come down to
HOPE = 2  # times the most rows that are known: more are not tried yet
BAND = 256  # tokens: steps with about as much context a row, up to the next power of two, are alike
LONG_AGO = 256  # steps: what was measured before says nothing of how busy the machine is
FIT_EVERY = 8  # steps from a fit of what context and requests add to the next, at least
# Of a fit: how much is given to what steps have not told apart. Until they have, attending of RIDGE
# rows takes as long as reading the KV.
PRIOR = 1e-3
LEAST_SHARE = 0.05  # of a step's time that its rows account for
CHANGED = 0.02  # of an edge's estimate: less does not recompute the stairs
STALE = 1024  # steps without one of an edge, after which its few steps are forgotten
LATEST = 16  # plain steps of about the same context whose median counts
WRONG = 3.0  # times more or less than kept costs say: if all first steps take that, they go


def edges(most: int) -> list[int]:
    """Numbers of rows, each the right edge of a stair: powers of two and halfway between; from 64
    on an eighth of a power of two apart, but no less than a tile: 1, 2, 3, 4, 6, 8, 12, ..., 48,
    64, 80, 96, ..., 256, 288, ...
    """
    found, size = [1], 2
    while found[-1] < most:
        width = max(size // 2, 1) if size < 4 * TILE else max(size // 8, TILE)
        found += range(size, 2 * size, width)
        size *= 2
    return found[: bisect_left(found, most) + 1]


class Sample(NamedTuple):
    """A measured step, as long as it would have taken without other load."""

    context: float  # tokens whose KV was read
    attended: float  # the same, summed over rows
    requests: int
    seconds: float

    def scaled(self, factor: float) -> "Sample":
        return self._replace(seconds=max(LEAST, self.seconds * factor))

    def added(self, by: Sequence[float]) -> float:
        """What context, rows that attend to it and requests added."""
        return by[0] * self.context + by[1] * self.attended + by[2] * self.requests

    def of_rows(self, by: Sequence[float]) -> float:
        """What its rows alone took."""
        return max(self.seconds - self.added(by), LEAST_SHARE * self.seconds)


class Cell:
    """The latest steps of a stair with about the same context a row, and as many requests."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=WINDOW)
        self.point: Sample | None = None  # the estimate, once it is known
        self.last = -LONG_AGO  # number of the step that it was last added to
        self.num_new = 0  # samples since the last one that came long after the one before it

    @property
    def is_trusted(self) -> bool:
        """Whether it was measured lately: a step that differs shows how busy the machine is."""
        return self.num_new >= KNOWN

    def add(self, sample: Sample, by: Sequence[float], number: int) -> bool:
        """Whether what is known has changed. Old samples go as soon as as many new ones are there
        as make it known.
        """
        self.num_new = self.num_new + 1 if number - self.last < LONG_AGO else 1
        self.last = number
        self.samples.append(sample)
        if self.num_new == KNOWN:
            self.samples = deque([*self.samples][-KNOWN:], WINDOW)
        if self.point is None and len(self.samples) < KNOWN:
            return False
        before, rank = self.point, len(self.samples) * RANK // WINDOW
        found = sorted(self.samples, key=lambda s: s.seconds - s.added(by))[rank]
        if before is not None:
            change = found.of_rows(by) - before.of_rows(by)
            if abs(change) <= CHANGED * before.of_rows(by):
                return False
        self.point = found
        return True

    def scale(self, factor: float) -> None:
        self.samples = deque((sample.scaled(factor) for sample in self.samples), WINDOW)
        if self.point is not None:
            self.point = self.point.scaled(factor)


CellKey = tuple[int, int]  # of a cell: what steps with about the same context and requests share


def key_of(rows: int, sample: Sample) -> CellKey:
    return (int(sample.attended / rows) // BAND).bit_length(), int(sample.requests).bit_length()


class RowBucket:
    """The latest steps of up to so many rows."""

    def __init__(self) -> None:
        self.cells: dict[CellKey, Cell] = {}
        self.latest: Cell | None = None  # of those that are known
        self.estimate = 0.0  # of the rows alone; 0 until it is known
        self.last = 0  # number of the step that `latest` was last added to
        self.kept = 0.0  # the estimate of an earlier start
        self.unproven = 0  # more steps that it takes to contradict it

    def point(self, key: CellKey) -> Sample | None:
        return self.cells[key].point if key in self.cells else None

    def add(self, key: CellKey, sample: Sample, by: Sequence[float], number: int) -> bool:
        """Whether what is known has changed, by the step of this number."""
        cell = self.cells.setdefault(key, Cell())
        has_changed = cell.add(sample, by, number)
        if cell.point is None:
            return self.latest is None  # a few steps may count, see `StepCosts.fill`
        has_changed |= cell is not self.latest
        self.latest, self.last = cell, number
        return has_changed

    def begin_with(self, key: CellKey, sample: Sample) -> None:
        """Take a step of an earlier start."""
        self.latest = self.cells[key] = cell = Cell()
        cell.samples.append(sample)
        cell.point = sample

    @property
    def points(self) -> list[Sample]:
        return [cell.point for cell in self.cells.values() if cell.point is not None]

    def settle(self, by: Sequence[float]) -> None:
        """Estimate it anew, from the steps that it has had lately."""
        point = None if self.latest is None else self.latest.point
        self.estimate = 0.0 if point is None else point.of_rows(by)

    def least(self, by: Sequence[float]) -> float:
        """The fastest of its steps; 0 if there was none."""
        each = (s.of_rows(by) for cell in self.cells.values() for s in cell.samples)
        return min(each, default=0.0)

    def forget_stale(self, number: int) -> None:
        """Forget few steps that were long before this one."""
        for key, cell in [*self.cells.items()]:
            if len(cell.samples) < WINDOW and number - cell.last >= STALE:
                del self.cells[key]
        known = [cell for cell in self.cells.values() if cell.point is not None]
        self.latest = max(known, key=lambda cell: cell.last, default=None)

    def contradicts(self, ratio: float) -> bool:
        """Whether this step, like all since the start, is far from what was kept."""
        if self.unproven == 0:
            return False
        is_far = not 1 / WRONG < ratio < WRONG
        self.unproven = self.unproven - 1 if is_far else 0
        return is_far and self.unproven == 0


def fitted(buckets: Iterable[RowBucket], before: Sequence[float]) -> list[float]:
    """What a token of context, a row's attending to it, and a request add: by least squares of
    relative errors, none below 0. Only steps of one stair are compared, so that what rows cost is
    none of it. `before` is what is kept of any that no stair shows.
    """
    sums = [[0.0] * 4 for _ in range(3)]
    for bucket in buckets:
        known = [(len(c.samples), c.point) for c in bucket.cells.values() if c.point is not None]
        if len(known) > 1:
            add_differences(sums, known)
    reading, attending, asking = (sums[i][i] for i in range(3))
    prior = PRIOR * (reading + attending / RIDGE**2)
    for i, more in enumerate((prior, prior * RIDGE**2, PRIOR * asking)):
        sums[i][i] += more
    shown = [i for i in range(3) if sums[i][i] > 0]
    found = [0.0 if i in shown else before[i] for i in range(3)]
    for i, value in solved(sums, shown).items():
        found[i] = value
    return found


def solved(sums: list[list[float]], kept: list[int]) -> dict[int, float]:
    """The solution of these equations; those that would be below 0 are left out."""
    while kept:
        left = np.array([[sums[i][k] for k in kept] for i in kept])
        found = np.linalg.solve(left, [sums[i][3] for i in kept])
        if found.min() >= 0:
            return dict(zip(kept, found.tolist(), strict=True))
        worst = kept[int(found.argmin())]
        kept = [i for i in kept if i != worst]
    return {}


def add_differences(sums: list[list[float]], known: Sequence[tuple[int, Sample]]) -> None:
    """Add a stair's part of the normal equations: each sample stands for so many steps."""
    each = [(number / point.seconds**2, point) for number, point in known]
    whole = sum(weight for weight, _ in each)
    usual = [sum(w * point[i] for w, point in each) / whole for i in range(4)]
    for weight, point in each:
        more = [point[i] - usual[i] for i in range(4)]
        for i in range(3):
            for k in range(4):
                sums[i][k] += weight * more[i] * more[k]


class Step(msgspec.Struct, frozen=True):
    """A step as it is known before its guesses are chosen, and how long it may take."""

    rows: int  # roots and rows of prompts
    context: int  # tokens whose KV is read
    requests: int
    num_roots: int
    prompt_rows: int = 0
    attended: int = 0  # tokens of context, summed over rows
    root_context: int = 0  # of all roots: each row of a draft attends to that of its root
    spent: float = 0.0  # seconds of drafting, expected until it is done
    allowed: float = float("inf")  # seconds until the tightest target is missed

    def attended_with(self, drafts: int) -> float:
        """As `attended`, with so many draft tokens."""
        return self.attended + drafts * self.root_context / max(self.num_roots, 1)

    def with_prompt(self, rows: int, context: int) -> "Step":
        """With so many rows of another prompt, each of which attends to so many tokens."""
        return msgspec.structs.replace(
            self,
            rows=self.rows + rows,
            context=self.context + context,
            requests=self.requests + 1,
            prompt_rows=self.prompt_rows + rows,
            attended=self.attended + rows * context,
        )

    @property
    def without_prompts(self) -> "Step":
        """Its roots alone."""
        if not self.prompt_rows:
            return self
        rows, context = self.rows - self.prompt_rows, self.root_context
        return msgspec.structs.replace(
            self, rows=rows, context=context, requests=rows, prompt_rows=0, attended=context
        )

    def allowed_with_draft(self, roots: float) -> float:
        """As `allowed`, where the roots alone take so long. A target that they miss binds no
        guesses: nothing but guesses can meet it.
        """
        return self.allowed if roots <= self.allowed else float("inf")


def prefill_value(prompts: float, tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """The tokens that prompts' rows are worth: as many as the streams would get in their seconds.

    Without it, time would be cheap in a step that prompts make long, and guesses would make it
    longer, for tokens that the next steps bring faster.
    """
    rates = (t / (s - prompts) for t, s in zip(tokens, seconds, strict=True) if s > prompts)
    return prompts * max(rates, default=0.0)


class KnownCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a `StepCosts` knows, to begin with it again."""

    buckets: dict[int, list[Sample]]  # right edge -> a step for each context and number of requests


class StepCosts:
    """Seconds of a model's steps. The estimate never falls with rows, context or requests."""

    def __init__(
        self, max_rows: int, seconds_per_token: float = 0.0, known: KnownCosts | None = None
    ) -> None:
        """`seconds_per_token` is what a token of context adds, until steps have shown it."""
        self.edges = edges(max_rows)
        self.places = [bisect_left(self.edges, rows) for rows in range(self.edges[-1] + 1)]
        self.seconds_per_token = seconds_per_token
        self.lock = Lock()  # engines that share a model's weights share this, too
        self.reset()
        if known is not None:
            self.begin_with(known)

    def reset(self) -> None:
        """Forget all steps."""
        self.buckets = {edge: RowBucket() for edge in self.edges}
        self.has_steps = False  # whether anything is known of the model's steps
        self.num_steps = 0
        # Seconds by token of context, by row and token of its context, and by request.
        self.added = [self.seconds_per_token, 0.0, 0.0]
        self.is_fitted = True  # whether they are as the steps that are known show
        self.fit_at = 0  # number of the step from which on they may be fitted again
        self.ratios: deque[float] = deque(maxlen=RECENT)  # of the latest steps to their estimates
        self.slowdown = 1.0  # by other load, at present
        self.fill()

    def seconds(
        self,
        rows: int,
        context: float,
        requests: int,
        is_hopeful: bool = False,
        attended: float | None = None,
    ) -> float:
        """Of a step with these rows, at present. `context` counts the tokens whose KV is read, and
        `attended` sums that over rows: of requests with rows and context alike, if it is left out.

        If hopeful, an edge that is not known costs the least that it can: so it gets tried.
        """
        if rows == 0:
            return 0.0
        if attended is None:
            attended = alike(rows, context, requests)
        by_edge = self.least_by_edge if is_hopeful else self.by_edge
        place = self.places[rows] if rows < len(self.places) else -1
        per_token, per_row, per_request = self.added
        added = per_token * context + per_row * attended + per_request * requests
        return (by_edge[place] + added) * self.slowdown

    def of(self, step: "Step", drafts: int = 0, is_hopeful: bool = False) -> float:
        """Seconds of a step with so many draft tokens, at present."""
        rows, attended = step.rows + drafts, step.attended_with(drafts)
        return self.seconds(rows, step.context, step.requests, is_hopeful, attended)

    def is_known(self, rows: int) -> bool:
        return self.buckets[self.edges[self.bucket(rows)]].estimate > 0

    def bucket(self, rows: int) -> int:
        """The place of the stair; rows beyond the last edge are taken to be there."""
        return self.places[rows] if rows < len(self.places) else len(self.edges) - 1

    def observe(
        self,
        rows: int,
        context: float,
        requests: int,
        seconds: float,
        attended: float | None = None,
    ) -> None:
        """Learn from a step that took so long."""
        if attended is None:
            attended = alike(rows, context, requests)
        sample = Sample(context, attended, requests, seconds)
        if not is_sound(sample):
            return
        with self.lock:
            if self.is_wrong(rows, sample):
                self.reset()
            self.has_steps = True
            self.num_steps += 1
            if self.num_steps % STALE == 0:
                self.forget_stale()
            self.learn(rows, sample)

    def learn(self, rows: int, sample: Sample) -> None:
        bucket, key = self.buckets[self.edges[self.bucket(rows)]], key_of(rows, sample)
        cell, before = bucket.cells.get(key), bucket.point(key)
        if cell is not None and cell.is_trusted:  # else it shows what context adds
            # Slower steps of fewer rows may have raised the estimate: that shows nothing of load.
            place = self.bucket(rows)
            expected = min(self.by_edge[place], bucket.estimate) + sample.added(self.added)
            self.compare(sample.seconds / expected)
        sample = sample._replace(seconds=sample.seconds / self.slowdown)
        has_changed = bucket.add(key, sample, self.added, self.num_steps)
        self.is_fitted &= not has_changed
        is_new = before is None and bucket.point(key) is not None
        if not self.is_fitted and (is_new or self.num_steps >= self.fit_at):
            self.fit()
            has_changed = True
        if has_changed:
            self.fill()

    def is_wrong(self, rows: int, sample: Sample) -> bool:
        """Whether a step shows that costs of an earlier start do not hold here."""
        bucket = self.buckets[self.edges[self.bucket(rows)]]
        kept = bucket.kept + sample.added(self.added)
        return bucket.contradicts(sample.seconds / kept) if bucket.kept else False

    def forget_stale(self) -> None:
        """Forget few steps, the last of them long ago. If these were slow by chance, plans have
        kept away from them since, and nothing else would show it.
        """
        for bucket in self.buckets.values():
            bucket.forget_stale(self.num_steps)
        self.fill()

    def compare(self, ratio: float) -> None:
        """Tell by a step's ratio to its estimate how busy the machine is.

        The slowdown is that of the fastest of the latest steps: it rises late and falls at once.
        It is never below 1: then the estimates are too high, those of other stairs as well.
        """
        self.ratios.append(ratio)
        self.slowdown = max(1.0, min(self.ratios)) if len(self.ratios) == RECENT else 1.0
        if ratio >= TOO_HIGH:
            return
        latest = [*self.ratios][-KNOWN:]
        if len(latest) == KNOWN and max(latest) < TOO_HIGH:
            self.scale(max(latest))
            self.ratios.clear()
            self.fill()

    def scale(self, factor: float) -> None:
        for bucket in self.buckets.values():
            for cell in bucket.cells.values():
                cell.scale(factor)
        self.added = [a * factor for a in self.added]

    def fit(self) -> None:
        """Fit what context and requests add. It is no more than any measured step leaves beside its
        rows.
        """
        self.fit_at, self.is_fitted = self.num_steps + FIT_EVERY, True
        buckets = self.buckets.values()
        found = fitted(buckets, self.added)
        points = [cell.point for bucket in buckets for cell in bucket.cells.values()]
        most = 1.0
        for point in points:
            if point is not None and (added := point.added(found)) > 0:
                most = min(most, (1 - LEAST_SHARE) * point.seconds / added)
        self.added = [a * most for a in found]

    def fill(self) -> None:
        """Estimate every edge: known, between its neighbors, or beyond the last by RIDGE. Below the
        first that is known a few steps count, too: roots alone are fewer rows than steps of
        prompts, which tell little of them.
        """
        found, last, has_known = dict[int, float](), dict[int, int](), False
        for edge, bucket in self.buckets.items():
            bucket.settle(self.added)
            if bucket.estimate:
                found[edge], last[edge], has_known = bucket.estimate, bucket.last, True
            elif not has_known and (least := bucket.least(self.added)):
                found[edge], last[edge] = least, self.num_steps
        lowest = {edge: self.buckets[edge].least(self.added) for edge in found}
        found = in_order(found, lowest, last)
        known = [*found]
        if not known:
            found, known = {1: FIRST}, [1]
        self.by_edge = [self.between(edge, known, found) for edge in self.edges]
        self.least_by_edge = [self.least(edge, known, found) for edge in self.edges]
        hoped = float("inf")
        for i in reversed(range(len(self.edges))):
            hoped = min(hoped, self.least_by_edge[i], self.by_edge[i])
            self.least_by_edge[i] = hoped

    def between(self, edge: int, known: Sequence[int], found: dict[int, float]) -> float:
        place = bisect_left(known, edge)
        if place == len(known):
            return found[known[-1]] * shape(edge) / shape(known[-1])
        above = known[place]
        if above == edge:
            return found[edge]
        if place == 0:
            return found[above] * shape(edge) / shape(above)
        below = known[place - 1]
        part = (edge - below) / (above - below)
        return found[below] + part * (found[above] - found[below])

    def least(self, edge: int, known: Sequence[int], found: dict[int, float]) -> float:
        """What an edge may cost at best, if it is not known: a row below all that are known no less
        than one of the next edge; between two that are known, nothing beside others of its tile,
        else half of what it is expected to; rows beyond the last edge half as much as those before
        it. The stairs are climbed one by one: far above what is known nothing is hoped for.
        """
        place = bisect_right(known, edge)
        seen = self.buckets[edge].least(self.added) * HOPED
        if place == 0:
            return max(seen, found[known[0]] * edge / known[0])
        below = known[place - 1]
        if edge == below:
            return found[below]
        if place < len(known):
            is_free = -(-edge // TILE) == -(-below // TILE)  # perhaps
            most = found[below] if is_free else self.between(edge, known, found)
            return max(seen, (found[below] + most) / 2)
        if edge > HOPE * below:
            return found[below] * shape(edge) / shape(below)
        before = known[place - 2] if place > 1 else 0
        slope = (found[below] - found.get(before, 0.0)) / (below - before) if before else 0.0
        return max(seen, found[below] + slope / 2 * (edge - below))

    def begin_with(self, known: KnownCosts) -> None:
        """Take the steps of an earlier start, until there are as few new ones; ignores absurd ones.
        All are forgotten if the first steps of any size contradict them.
        """
        for edge, samples in known.buckets.items():
            for sample in samples if edge in self.buckets else ():
                if is_sound(sample):
                    self.has_steps = True
                    self.buckets[edge].begin_with(key_of(edge, sample), sample)
        self.fit()
        self.fill()
        for bucket in self.buckets.values():
            if bucket.estimate:
                bucket.kept, bucket.unproven = bucket.estimate, KNOWN

    def known(self) -> KnownCosts:
        each = {edge: bucket.points for edge, bucket in self.buckets.items()}
        return KnownCosts({edge: points for edge, points in each.items() if points})

    def table(self) -> dict[int, float]:
        """Right edge -> seconds of the rows alone, on a machine that nothing else slows down."""
        return dict(zip(self.edges, self.by_edge, strict=True))


class PlainSteps:
    """Whole steps, as measured, without the time of drafting. Those with about the same context are
    counted together: up to the next power of two.
    """

    def __init__(self) -> None:
        self.steps: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, step: Step, rows: int, seconds: float) -> None:
        """Count a step of so many rows, draft tokens included, if its one row is a request's."""
        if rows != 1 or step.num_roots != 1:
            return
        latest = self.steps.setdefault(step.context.bit_length(), deque(maxlen=LATEST))
        latest.append((step.context, seconds))

    def reset(self) -> None:
        self.steps = {}

    @property
    def state(self) -> list[PlainStep]:
        """By rising context."""
        each = [[*zip(*self.steps[size], strict=True)] for size in sorted(self.steps)]
        return [PlainStep(int(median(c)), median(s), len(s)) for c, s in each]


def shape(rows: int) -> float:
    """How the time of a step grows with rows, until steps have shown it."""
    return 1 + rows / RIDGE


def alike(rows: int, context: float, requests: int) -> float:
    """Tokens of context summed over rows, of requests that have rows and context alike."""
    return rows * context / max(requests, 1)


def is_sound(sample: Sample) -> bool:
    """Whether a machine can have measured it; NaN is not sound."""
    return all(0 <= value < 1e15 for value in sample) and LEAST <= sample.seconds < 1e6


def in_order(
    found: dict[int, float], lowest: dict[int, float], last: dict[int, int]
) -> dict[int, float]:
    """Seconds by edge that never fall with rows, and are never below the edge's `lowest`.

    Other load makes no step faster. An estimate above that of more rows is too high, and one below
    that of fewer rows is too low: if two differ, the one that was measured last is right. Steps
    that were measured bound this: more rows cost as much as the fastest steps of fewer rows.
    """
    edges, right = list[int](), dict[int, float]()
    for edge in sorted(found, key=lambda edge: last[edge], reverse=True):
        place = bisect_left(edges, edge)
        least = right[edges[place - 1]] if place else 0.0
        most = right[edges[place]] if place < len(edges) else float("inf")
        right[edge] = min(max(found[edge], least), most)
        edges.insert(place, edge)
    bounded = accumulate((max(right[edge], lowest[edge]) for edge in edges), max)
    return dict(zip(edges, bounded, strict=True))


EVERY = 60.0  # seconds: while the engine runs, the file is written no more often
FORMAT = "3"  # of the file: change it with what its numbers mean


class KeptCosts:
    """The costs of a model's steps, and their file."""

    def __init__(self, costs: StepCosts, file: Path | None) -> None:
        """Begin with what the file holds."""
        self.costs, self.file, self.written_at = costs, file, float("-inf")
        known = read_costs(file)
        if known is not None:
            costs.begin_with(known)

    def keep(self) -> None:
        """Write the file, unless that was done a moment ago. Not in a step: it takes a moment."""
        if monotonic() - self.written_at > EVERY:
            self.write()

    def write(self) -> None:
        keep_costs(self.file, self.costs)
        self.written_at = monotonic()


def costs_file(model: str, device: str, threads: str) -> Path | None:
    """The file for a model's steps on this kind of machine. `model` has all of it that their time
    depends on, `device` the name of a GPU.
    """
    cpu = cpu_name().decode(errors="replace")
    build = VERSION, FORMAT, source_hash()
    return kept_file("costs", *build, model, device, threads, str(topology()), cpu)


def read_costs(file: Path | None) -> KnownCosts | None:
    """None, with one warning, if the file is there but not valid."""
    return read_kept(file, KnownCosts)


def keep_costs(file: Path | None, costs: StepCosts) -> None:
    """Replace the file, unless no step has been timed. It takes a moment: not in every step."""
    known = costs.known()
    if file is not None and known.buckets:
        keep(file, known)
