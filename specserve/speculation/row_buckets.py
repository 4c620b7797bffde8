"""The latest measured steps by row bucket, and what context and requests add to their time."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specserve.speculation.constants import (
    BAND,
    CHANGED,
    KNOWN,
    LEAST_SECONDS,
    LEAST_SHARE,
    LONG_AGO,
    PRIOR,
    RANK,
    RIDGE,
    STALE,
    WINDOW,
    WRONG,
)


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
        left = np.array([[sums[i][k] for k in kept] for i in kept])
        found = np.linalg.solve(left, [sums[i][3] for i in kept])
        if found.min() >= 0:
            return dict(zip(kept, found.tolist(), strict=True))
        worst = kept[int(found.argmin())]
        kept = [i for i in kept if i != worst]
    return {}


def add_differences(
    sums: list[list[float]], sizes: list[float], known: Sequence[tuple[int, Sample]]
) -> None:
    """Add a bucket's part of the normal equations, and squares of the unknowns' sizes relative to
    the step's time. Each sample has a number of steps as weight.
    """
    each = [(number / point.seconds**2, point) for number, point in known]
    whole = sum(weight for weight, _ in each)
    usual = [sum(w * point[i] for w, point in each) / whole for i in range(4)]
    for i in range(3):
        sizes[i] += (usual[i] / usual[3]) ** 2
    for weight, point in each:
        more = [point[i] - usual[i] for i in range(4)]
        for i in range(3):
            for k in range(4):
                sums[i][k] += weight * more[i] * more[k]
