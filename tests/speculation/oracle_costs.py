"""Estimates of step times in Python: the slow form of costs.cpp, which defines its results."""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from threading import Lock
from typing import NamedTuple

import msgspec
import numpy as np

from specserve.speculation.constants import (
    BAND,
    CHANGED,
    FINE,
    FIRST_SECONDS,
    FIT_EVERY,
    HOPE,
    HOPED,
    KNOWN,
    LEAST_SECONDS,
    LEAST_SHARE,
    LONG_AGO,
    PRIOR,
    RANK,
    RECENT,
    RIDGE,
    STALE,
    TILE,
    TOO_HIGH,
    WINDOW,
    WRONG,
)
from specserve.speculation.costs import KnownCosts, Step, StepCosts, alike, edges


class Sample(NamedTuple):
    """A measured step, with its time corrected for other load."""

    context: float  # tokens whose KV was read
    attended: float  # tokens of context, summed over rows
    requests: int
    seconds: float

    def scaled(self, factor: float) -> "Sample":
        return self._replace(seconds=max(LEAST_SECONDS, self.seconds * factor))

    def added(self, by: Sequence[float]) -> float:
        """Return the seconds that context, attention and requests added."""
        return by[0] * self.context + by[1] * self.attended + by[2] * self.requests

    def of_rows(self, by: Sequence[float]) -> float:
        """Return the seconds of the rows only."""
        return max(self.seconds - self.added(by), LEAST_SHARE * self.seconds)


class Cell:
    """The latest steps of a bucket with similar context per row and number of requests."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=WINDOW)
        self.point: Sample | None = None  # the estimate, once it is known
        self.last = -LONG_AGO  # number of the step that was last added
        self.num_new = 0  # samples since the last long gap between two of them

    @property
    def is_trusted(self) -> bool:
        """Return whether the cell was measured lately: then a different time shows how busy the
        machine is.
        """
        return self.num_new >= KNOWN

    def add(self, sample: Sample, by: Sequence[float], number: int) -> bool:
        """Add a step; return whether the estimate has changed. KNOWN new samples after a long gap
        replace the old ones.
        """
        self.num_new = self.num_new + 1 if number - self.last < LONG_AGO else 1
        self.last = number
        self.samples.append(sample)
        if self.num_new == KNOWN:
            self.samples = deque([*self.samples][-KNOWN:], WINDOW)
        if self.point is None and len(self.samples) < KNOWN:
            return False
        before, rank = self.point, len(self.samples) * RANK // WINDOW
        reading, attending, asking = by  # see `Sample.added`: a step needs this of all samples
        of_rows = [s - (reading * c + attending * a + asking * r) for c, a, r, s in self.samples]
        found = self.samples[sorted(range(len(of_rows)), key=of_rows.__getitem__)[rank]]
        if found is before:
            return False
        if before is not None:
            usual = before.of_rows(by)
            if abs(found.of_rows(by) - usual) <= CHANGED * usual:
                return False
        self.point = found
        return True

    def scale(self, factor: float) -> None:
        self.samples = deque((sample.scaled(factor) for sample in self.samples), WINDOW)
        if self.point is not None:
            self.point = self.point.scaled(factor)


CellKey = tuple[int, int]  # size class of context per row, and of the number of requests


def key_of(rows: int, sample: Sample) -> CellKey:
    return (int(sample.attended / rows) // BAND).bit_length(), int(sample.requests).bit_length()


class RowBucket:
    """The latest steps of one row bucket."""

    def __init__(self) -> None:
        self.cells: dict[CellKey, Cell] = {}
        self.latest: Cell | None = None  # the known cell with the latest step
        self.estimate = 0.0  # seconds of the rows only; 0 until it is known
        self.last = 0  # number of the step that was last added to `latest`
        self.kept = 0.0  # the estimate of an earlier start, or of start-up
        self.unproven = 0  # number of further steps that must contradict `kept`
        self.fastest: float | None = None  # the result of `least`; None after a change

    def point(self, key: CellKey) -> Sample | None:
        return self.cells[key].point if key in self.cells else None

    def add(self, key: CellKey, sample: Sample, by: Sequence[float], number: int) -> bool:
        """Add a step with its number; return whether the estimate has changed."""
        self.fastest = None
        cell = self.cells.setdefault(key, Cell())
        has_changed = cell.add(sample, by, number)
        if cell.point is None:
            return self.latest is None  # a few steps may count, see `StepCosts.fill`
        has_changed |= cell is not self.latest
        self.latest, self.last = cell, number
        return has_changed

    def begin_with(self, key: CellKey, sample: Sample) -> None:
        """Use a step of an earlier start."""
        self.fastest = None
        self.latest = self.cells[key] = cell = Cell()
        cell.samples.append(sample)
        cell.point = sample

    @property
    def points(self) -> list[Sample]:
        return [cell.point for cell in self.cells.values() if cell.point is not None]

    def settle(self, by: Sequence[float]) -> None:
        """Update the estimate from the latest known cell."""
        point = None if self.latest is None else self.latest.point
        self.estimate = 0.0 if point is None else point.of_rows(by)

    def least(self, by: Sequence[float]) -> float:
        """Return the seconds of its fastest step; 0 if there is none."""
        if self.fastest is None:
            each = (s.of_rows(by) for cell in self.cells.values() for s in cell.samples)
            self.fastest = min(each, default=0.0)
        return self.fastest

    def forget_stale(self, number: int) -> None:
        """Drop cells with few steps that are older than STALE steps."""
        self.fastest = None
        for key, cell in [*self.cells.items()]:
            if len(cell.samples) < WINDOW and number - cell.last >= STALE:
                del self.cells[key]
        known = [cell for cell in self.cells.values() if cell.point is not None]
        self.latest = max(known, key=lambda cell: cell.last, default=None)

    def contradicts(self, ratio: float) -> bool:
        """Return whether this step completes a series of first steps that contradict stored
        costs.
        """
        if self.unproven == 0:
            return False
        is_far = not 1 / WRONG < ratio < WRONG
        self.unproven = self.unproven - 1 if is_far else 0
        return is_far and self.unproven == 0


def without_prompts(step: Step) -> Step:
    """Return the step with its roots only."""
    if not step.prompt_rows:
        return step
    rows, context = step.rows - step.prompt_rows, step.root_context
    return msgspec.structs.replace(
        step, rows=rows, context=context, requests=rows, prompt_rows=0, attended=context
    )


def allowed_with_draft(step: Step, roots: float) -> float:
    """Return the allowed time with draft tokens, if the roots take `roots` seconds. A target that
    the roots miss does not limit drafts, because only drafts can meet it.
    """
    return step.allowed if roots <= step.allowed else float("inf")


def are_known(costs: StepCosts, step: Step, sizes: Iterable[int]) -> bool:
    """Return whether steps with so many draft tokens were all measured."""
    return all(costs.is_known(step.rows + size) for size in sizes)


def fitted(buckets: Iterable[RowBucket], before: Sequence[float]) -> list[float]:
    """Fit the seconds that a token of context, a row's attention to it, and a request add.

    Uses least squares of relative errors, with no value below 0. Only steps of one bucket are
    compared, so the cost of rows has no effect. Values that no bucket shows are taken from
    `before`.
    """
    sums, sizes = [[0.0] * 4 for _ in range(3)], [0.0] * 3
    for bucket in buckets:
        known = [(len(c.samples), c.point) for c in bucket.cells.values() if c.point is not None]
        if len(known) > 1:
            add_differences(sums, sizes, known)
    shown = [i for i in range(3) if sums[i][i] > 0]
    reading, attending, asking = sizes
    prior = PRIOR * (reading + attending / RIDGE**2)
    for i, more in enumerate((prior, prior * RIDGE**2, PRIOR * asking)):
        sums[i][i] += more
    found = [0.0 if i in shown else before[i] for i in range(3)]
    for i, value in solved(sums, shown).items():
        found[i] = value
    return found


def solved(sums: list[list[float]], kept: list[int]) -> dict[int, float]:
    """Solve the equations; leave out unknowns that would be below 0."""
    while kept:
        found = eliminated([[*(sums[i][k] for k in kept), sums[i][3]] for i in kept])
        if min(found) >= 0:
            return dict(zip(kept, found, strict=True))
        worst = kept[found.index(min(found))]
        kept = [i for i in kept if i != worst]
    return {}


def eliminated(rows: list[list[float]]) -> list[float]:
    """Solve equations by elimination with pivots. Context and attention are nearly the same in
    many steps, so another order of operations gives other digits.
    """
    n = len(rows)
    for i in range(n):
        best = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[best] = rows[best], rows[i]
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [
                *rows[k][:i],
                *(b - factor * a for a, b in zip(rows[i][i:], rows[k][i:], strict=True)),
            ]
    found = [0.0] * n
    for i in reversed(range(n)):
        rest = rows[i][n]
        for k in range(i + 1, n):
            rest -= rows[i][k] * found[k]
        found[i] = rest / rows[i][i]
    return found


def add_differences(
    sums: list[list[float]], sizes: list[float], known: Sequence[tuple[int, Sample]]
) -> None:
    """Add a bucket's part of the normal equations, and squares of the unknowns' sizes relative to
    the step's time. Each sample has a number of steps as weight.
    """
    each = [(number / (point.seconds * point.seconds), point) for number, point in known]
    whole = sum(weight for weight, _ in each)
    usual = [sum(w * point[i] for w, point in each) / whole for i in range(4)]
    for i in range(3):
        share = usual[i] / usual[3]
        sizes[i] += share * share
    for weight, point in each:
        more = [point[i] - usual[i] for i in range(4)]
        for i in range(3):
            for k in range(4):
                sums[i][k] += weight * more[i] * more[k]


class OracleCosts:
    """Estimates seconds of a model's steps; an estimate never falls with rows, context or
    requests.
    """

    def __init__(
        self, max_rows: int, seconds_per_token: float = 0.0, known: KnownCosts | None = None
    ) -> None:
        """`seconds_per_token` is the cost of a token of context until steps show it."""
        self.edges = edges(max_rows)
        self.places = [bisect_left(self.edges, rows) for rows in range(self.edges[-1] + 1)]
        self.coarse_rows = np.arange(min(FINE, self.edges[-1]) + 1, self.edges[-1] + 1)
        self.seconds_per_token = seconds_per_token
        self.lock = Lock()  # engines that share a model's weights also share this object
        self.reset()
        if known is not None:
            self.begin_with(known)

    def reset(self) -> None:
        """Drop all steps."""
        self.buckets = {edge: RowBucket() for edge in self.edges}
        self.has_steps = False  # True once a step was measured
        self.num_steps = 0
        # Seconds per token of context, per row and token of its context, and per request.
        self.added = [self.seconds_per_token, 0.0, 0.0]
        self.is_fitted = True  # `added` fits the known steps
        self.fit_at = 0  # number of the step after which the next fit may run
        # Measured to estimated seconds of the latest steps
        self.ratios: deque[float] = deque(maxlen=RECENT)
        self.slowdown = 1.0  # current slowdown by other load, at least 1
        self.fill()

    def seconds(
        self,
        rows: int,
        context: float,
        requests: int,
        is_hopeful: bool = False,
        attended: float | None = None,
    ) -> float:
        """Estimate the seconds of a step with these rows under the present load.

        rows      rows of the step
        context   tokens whose KV is read
        attended  the same, summed over rows; by default for requests with equal rows and context

        If hopeful, an edge that is not known gets its least possible cost, so that it is tried.
        """
        if rows == 0:
            return 0.0
        if attended is None:  # see `alike`
            attended = rows * context / (requests if requests > 1 else 1)
        by_rows = self.least_by_rows if is_hopeful else self.by_rows
        of_rows = by_rows[rows] if rows < len(by_rows) else by_rows[-1]
        per_token, per_row, per_request = self.added
        added = per_token * context + per_row * attended + per_request * requests
        return (of_rows + added) * self.slowdown

    def of(self, step: Step, drafts: int = 0, is_hopeful: bool = False) -> float:
        """Estimate the seconds of a step with so many draft tokens under the present load."""
        return self.of_each(step, (drafts,), is_hopeful)[0]

    def of_each(self, step: Step, sizes: Sequence[int], is_hopeful: bool = False) -> list[float]:
        """Do the same for several numbers of draft tokens; a planner compares dozens.

        Beside prompts, draft tokens add at least what they add without them: logits of most prompt
        rows are not read, so these rows take less time.
        """
        found = self.of_equal_rows(step, sizes, is_hopeful)
        if not (step.prompt_rows and step.num_roots and any(sizes)):
            return found
        [none] = self.of_equal_rows(step, (0,), is_hopeful)
        roots, *plain = self.of_equal_rows(without_prompts(step), (0, *sizes), is_hopeful)
        return [max(f, none + p - roots) for f, p in zip(found, plain, strict=True)]

    def of_equal_rows(self, step: Step, sizes: Sequence[int], is_hopeful: bool) -> list[float]:
        """Estimate them as if rows of prompts and of draft tokens took equally long."""
        rows, by_rows = step.rows, self.least_by_rows if is_hopeful else self.by_rows
        if rows == 0:
            return [0.0 if size == 0 else self.seconds(size, 0, 0, is_hopeful) for size in sizes]
        per_token, per_row, per_request = self.added
        added = per_token * step.context + per_row * step.attended + per_request * step.requests
        per_draft = per_row * step.root_context / max(step.num_roots, 1)
        last, slowdown = len(by_rows) - 1 - rows, self.slowdown
        return [
            (by_rows[rows + (n if n < last else last)] + added + n * per_draft) * slowdown
            for n in sizes
        ]

    def are_known(self, step: Step, sizes: Iterable[int]) -> bool:
        """Return whether steps with so many draft tokens were all measured."""
        return all(map(self.is_known, (step.rows + size for size in sizes)))

    @property
    def known_edges(self) -> list[bool]:
        """Return whether steps of each edge were measured."""
        return [bucket.estimate > 0 for bucket in self.buckets.values()]

    def is_known(self, rows: int) -> bool:
        return self.buckets[self.edges[self.bucket(rows)]].estimate > 0

    def is_stale(self, rows: int) -> bool:
        """Return whether fewer than KNOWN steps have shown a known cost lately."""
        bucket = self.buckets[self.edges[self.bucket(rows)]]
        if bucket.latest is None:
            return False
        return self.num_steps - bucket.last >= LONG_AGO or 0 < bucket.latest.num_new < KNOWN

    def bucket(self, rows: int) -> int:
        """Return the index of the row bucket; more rows than the last edge count as the last."""
        return self.places[rows] if rows < len(self.places) else len(self.edges) - 1

    def observe(
        self,
        rows: int,
        context: float,
        requests: int,
        seconds: float,
        attended: float | None = None,
    ) -> None:
        """Learn from a measured step."""
        if attended is None:
            attended = alike(rows, context, requests)
        sample = Sample(context, attended, requests, seconds)
        if not is_sound(sample):
            return
        with self.lock:
            sample = self.at_edge(rows, sample)
            if self.is_wrong(rows, sample):
                self.reset()
            self.has_steps = True
            self.num_steps += 1
            if self.num_steps % STALE == 0:
                self.forget_stale()
            self.learn(rows, sample)

    def at_edge(self, rows: int, sample: Sample) -> Sample:
        """Return a sample of many rows as one of its bucket's right edge."""
        if not FINE < rows < self.edges[-1]:
            return sample
        longer = shape(self.edges[self.places[rows]]) / shape(rows) - 1
        of_rows = max(sample.seconds - sample.added(self.added), 0.0)
        return sample._replace(seconds=sample.seconds + longer * of_rows)

    def learn(self, rows: int, sample: Sample) -> None:
        place, key = self.bucket(rows), key_of(rows, sample)
        bucket = self.buckets[self.edges[place]]
        cell = bucket.cells.get(key)
        before = None if cell is None else cell.point
        if cell is not None and cell.is_trusted:  # otherwise it shows the cost of context
            # Slower steps of fewer rows may have raised the estimate, which shows nothing about
            # load.
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
        """Return whether a step shows that stored costs are wrong on this machine."""
        bucket = self.buckets[self.edges[self.bucket(rows)]]
        if not bucket.kept or not bucket.unproven:
            return False
        return bucket.contradicts(sample.seconds / (bucket.kept + sample.added(self.added)))

    def forget_stale(self) -> None:
        """Drop edges with few, old steps. If these were slow by chance, plans have avoided the edge
        since, and no new step would correct it.
        """
        for bucket in self.buckets.values():
            bucket.forget_stale(self.num_steps)
        self.fill()

    def compare(self, ratio: float) -> None:
        """Update the slowdown from a step's measured to estimated seconds.

        The slowdown is the lowest ratio of the latest steps: it rises late and falls at once. It is
        never below 1: then all estimates are too high, and are scaled.
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
        self.change_added([a * factor for a in self.added])

    def fit(self) -> None:
        """Fit the cost of context and requests. It leaves each measured step at least LEAST_SHARE
        for rows.
        """
        self.fit_at, self.is_fitted = self.num_steps + FIT_EVERY, True
        buckets = self.buckets.values()
        found = fitted(buckets, self.added)
        points = [cell.point for bucket in buckets for cell in bucket.cells.values()]
        most = 1.0
        for point in points:
            if point is not None and (added := point.added(found)) > 0:
                most = min(most, (1 - LEAST_SHARE) * point.seconds / added)
        self.change_added([a * most for a in found])

    def change_added(self, added: list[float]) -> None:
        """Set the seconds of context and requests, on which all seconds of rows depend."""
        self.added = added
        for bucket in self.buckets.values():
            bucket.fastest = None

    def fill(self) -> None:
        """Estimate every edge: known, between neighbors, or beyond the last known one with RIDGE.
        Below the first known edge a few steps also count, because prompt steps show little about
        steps with only roots.
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
            found, known = {1: FIRST_SECONDS}, [1]
        self.by_edge = [self.between(edge, known, found) for edge in self.edges]
        self.least_by_edge = [self.least(edge, known, found) for edge in self.edges]
        hoped = float("inf")
        for i in reversed(range(len(self.edges))):
            hoped = min(hoped, self.least_by_edge[i], self.by_edge[i])
            self.least_by_edge[i] = hoped
        self.by_rows, self.least_by_rows = map(self.spread, (self.by_edge, self.least_by_edge))

    def spread(self, by_edge: Sequence[float]) -> "array[float]":
        """Return the seconds by number of rows: equal within a bucket up to FINE rows, and beyond
        on a line between two edges.
        """
        found = array("d", [by_edge[place] for place in self.places[: FINE + 1]])
        found.frombytes(np.interp(self.coarse_rows, self.edges, by_edge).tobytes())
        return found

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
        """Return the least possible cost of an edge that is not known.

        Below all known edges, a row costs no less than a row of the next known one. Between two
        known edges, rows of the same tile are free, and others cost half of the expected
        difference. Beyond the last known edge, rows cost half of the previous slope, up to HOPE
        times the known rows.
        """
        place = bisect_right(known, edge)
        seen = self.buckets[edge].least(self.added) * HOPED
        if place == 0:
            return max(seen, found[known[0]] * edge / known[0])
        below = known[place - 1]
        if edge == below:
            return found[below]
        if place < len(known):
            is_free = -(-edge // TILE) == -(-below // TILE)  # not certain
            most = found[below] if is_free else self.between(edge, known, found)
            return max(seen, (found[below] + most) / 2)
        if edge > HOPE * below:
            return found[below] * shape(edge) / shape(below)
        before = known[place - 2] if place > 1 else 0
        slope = (found[below] - found.get(before, 0.0)) / (below - before) if before else 0.0
        return max(seen, found[below] + slope / 2 * (edge - below))

    def begin_with(self, known: KnownCosts) -> None:
        """Use the steps of an earlier start until enough new ones exist. Invalid steps are ignored.
        If the first steps of any size contradict them, all are dropped.
        """
        for edge, samples in known.buckets.items():
            for sample in map(Sample._make, samples if edge in self.buckets else ()):
                if is_sound(sample):
                    self.has_steps = True
                    self.buckets[edge].begin_with(key_of(edge, sample), sample)
        self.fit()
        self.fill()
        self.doubt()

    def doubt(self) -> None:
        """From now on, first steps that contradict the present estimates drop them."""
        for bucket in self.buckets.values():
            if bucket.estimate:
                bucket.kept, bucket.unproven = bucket.estimate, KNOWN

    def known(self) -> KnownCosts:
        each = {edge: bucket.points for edge, bucket in self.buckets.items()}
        return KnownCosts({edge: points for edge, points in each.items() if points})

    def table(self) -> dict[int, float]:
        """Return right edge -> seconds of the rows only, without other load."""
        return dict(zip(self.edges, self.by_edge, strict=True))


def shape(rows: int) -> float:
    """Return the relative step time by rows that is assumed until steps show it."""
    return 1 + rows / RIDGE


def is_sound(sample: Sample) -> bool:
    """Return whether a sample is a plausible measurement; NaN is not."""
    context, attended, requests, seconds = sample
    is_sound = 0 <= context < 1e15 and 0 <= attended < 1e15 and 0 <= requests < 1e15
    return is_sound and LEAST_SECONDS <= seconds < 1e6


def in_order(
    found: dict[int, float], lowest: dict[int, float], last: dict[int, int]
) -> dict[int, float]:
    """Return seconds by edge that never fall with rows, and are never below the edge's `lowest`.

    Other load makes no step faster. An estimate above another of more rows is too high, or the
    other is too low; the latest measurement wins. Measured steps bound the result: more rows cost
    at least as much as the fastest steps of fewer rows.
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
