"""Estimates the seconds of a model's steps from measured steps, by rows, context and requests.

Step time rises in buckets of rows, because kernels and graphs work on tiles. Attention adds to it:
a step reads the KV of each request once, and each of its rows attends to all of it. Other load
makes some steps slower and none faster. So the estimate follows the fastest of the latest steps,
and a slowdown of all of them is kept separately.

Measurements bound the estimates. Only steps with equally many rows show the cost of context and
requests, and a bucket's estimate matches its own latest steps.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from threading import Lock

import msgspec
import numpy as np

from specserve.speculation.constants import (
    FEW,
    FINE,
    FIRST_SECONDS,
    FIT_EVERY,
    HOPE,
    HOPED,
    KNOWN,
    LEAST_SECONDS,
    LEAST_SHARE,
    LONG_AGO,
    RECENT,
    RIDGE,
    STALE,
    TILE,
    TOO_HIGH,
)
from specserve.speculation.row_buckets import RowBucket, Sample, fitted, key_of
from specserve.speculation.steps import Step
from specserve_kernels.cpu import drafting


def edges(most: int) -> list[int]:
    """Return the right edges of row buckets: 1, 2, 3, 4, 6, 8, 12, ..., 48, 64, 80, 96, ..., 256,
    288, ... They are powers of two and halfway points. The distance from 64 on is an eighth of a
    power of two, but at least a tile.
    """
    found, size = [1], 2
    while found[-1] < most:
        width = max(size // 2, 1) if size < FINE else max(size // 8, TILE)
        found += range(size, 2 * size, width)
        size *= 2
    return found[: bisect_left(found, most) + 1]


class KnownCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured steps of a `StepCosts`, stored for the next start."""

    buckets: dict[int, list[Sample]]  # right edge -> a step for each context and number of requests


class StepCosts:
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
        roots, *plain = self.of_equal_rows(step.without_prompts, (0, *sizes), is_hopeful)
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
        self.columns: drafting.CostColumns | None = None  # only plans of the target need them

    @property
    def native(self) -> drafting.CostColumns:
        """Return the estimates for code in C++, until the next change."""
        found = self.columns
        if found is None:
            with self.lock:  # no step of another engine may change them meanwhile
                found = self.columns = columns_of(self)
        found.per_token, found.per_row, found.per_request = self.added
        found.slowdown = self.slowdown
        return found

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
            for sample in samples if edge in self.buckets else ():
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


def columns_of(costs: StepCosts) -> drafting.CostColumns:
    """Return the estimates by column, for code in C++."""
    known = array("b", costs.known_edges)
    by_rows, least_by_rows = array("d", costs.by_rows), array("d", costs.least_by_rows)
    edges, few = array("q", costs.edges), array("q", FEW)
    columns = by_rows, least_by_rows, edges, known, few
    sizes = len(by_rows) - 1, len(edges), len(few), FINE
    found = drafting.CostColumns(*(column.buffer_info()[0] for column in columns), *sizes)
    found.columns = columns  # they live as long
    return found


def shape(rows: int) -> float:
    """Return the relative step time by rows that is assumed until steps show it."""
    return 1 + rows / RIDGE


def alike(rows: int, context: float, requests: int) -> float:
    """Return the context summed over rows, if all requests have equal rows and context."""
    return rows * context / max(requests, 1)


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
