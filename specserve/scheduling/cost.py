"""How long a model's steps take, by rows, context and requests: learnt from the steps themselves.

Rows cost in stairs: kernels and graphs work on tiles of them. Other load makes some steps slower
and none faster, so what a step costs is read off the fastest of the latest steps, and what slows
down all of them alike is kept apart.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from threading import Lock

import msgspec

# Steps of an edge that are remembered; their third best is the estimate, of fewer a better one: the
# first steps are often slow.
WINDOW, RANK = 16, 2
KNOWN = 3  # steps from which on an edge is known
RECENT = 5  # steps of which even the fastest is slowed down by other load
TOO_HIGH = 0.75  # of the estimate: KNOWN steps in a row below it show that all estimates are high
TILE = 16  # rows that a kernel takes as one, where rows are many
FIRST = 1e-3  # seconds of a step of one row, before there was any step
RIDGE = 16  # rows whose work takes as long as reading the weights, until steps show it
HOPED = 0.8  # of the seconds of an edge's few steps: what it might come down to
HOPE = 2  # times the most rows that are known: more are not tried yet
RATE, QUANTILE = 0.005, RANK / WINDOW  # of the fit of what context and requests add
LEAST_SHARE = 0.05  # of a step's time that its rows account for
CHANGED = 0.02  # of an edge's estimate: less does not recompute the stairs
STALE = 1024  # steps without one of an edge, after which its few steps are forgotten
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


class Stair:
    """The latest steps of up to so many rows, without what context and requests added."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=WINDOW)
        self.estimate = 0.0  # 0 until it is known
        self.last = 0  # number of the step that it was last added to
        self.kept = 0.0  # the estimate of an earlier start
        self.unproven = 0  # more steps that it takes to contradict it

    def add(self, seconds: float) -> bool:
        """Whether what is known has changed."""
        self.seconds.append(seconds)
        if len(self.seconds) < KNOWN:
            return True
        found = sorted(self.seconds)[len(self.seconds) * RANK // WINDOW]
        if abs(found - self.estimate) <= CHANGED * self.estimate:
            return False
        self.estimate = found
        return True

    def contradicts(self, ratio: float) -> bool:
        """Whether this step, like all since the start, is far from what was kept."""
        if self.unproven == 0:
            return False
        is_far = not 1 / WRONG < ratio < WRONG
        self.unproven = self.unproven - 1 if is_far else 0
        return is_far and self.unproven == 0

    def scale(self, factor: float) -> None:
        self.seconds = deque((s * factor for s in self.seconds), WINDOW)
        self.estimate *= factor


class Step(msgspec.Struct, frozen=True):
    """A step as it is known before its guesses are chosen, and how long it may take."""

    rows: int  # roots and rows of prompts
    context: int  # tokens whose KV is read
    requests: int
    num_roots: int
    prompt_rows: int = 0
    spent: float = 0.0  # seconds of drafting, expected until it is done
    allowed: float = float("inf")  # seconds until the tightest target is missed

    def allowed_with_guesses(self, roots: float) -> float:
        """As `allowed`, where the roots alone take so long. A target that they miss binds no
        guesses: nothing but guesses can meet it.
        """
        return self.allowed if roots <= self.allowed else float("inf")


def worth_of_prompts(prompts: float, tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """The tokens that prompts' rows are worth: as many as the streams would get in their seconds.

    Without it, time would be cheap in a step that prompts make long, and guesses would make it
    longer, for tokens that the next steps bring faster.
    """
    rates = (t / (s - prompts) for t, s in zip(tokens, seconds, strict=True) if s > prompts)
    return prompts * max(rates, default=0.0)


class KnownCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a `StepCosts` knows, to begin with it again."""

    stairs: dict[int, float]  # right edge -> seconds
    added: tuple[float, float]


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
        self.stairs = {edge: Stair() for edge in self.edges}
        self.has_steps = False  # whether anything is known of the model's steps
        self.num_steps = 0
        self.added = [self.seconds_per_token, 0.0]  # seconds by token of context, and by request
        self.sizes = [0.0, 0.0]  # usual ones of context and requests
        self.ratios: deque[float] = deque(maxlen=RECENT)  # of the latest steps to their estimates
        self.slowdown = 1.0  # by other load, at present
        self.fill()

    def seconds(self, rows: int, context: int, requests: int, is_hopeful: bool = False) -> float:
        """Of a step with these rows, at present. `context` counts the tokens whose KV is read.

        If hopeful, an edge that is not known costs the least that it can: so it gets tried.
        """
        if rows == 0:
            return 0.0
        per_token, per_request = self.added
        by_edge = self.least_by_edge if is_hopeful else self.by_edge
        place = self.places[rows] if rows < len(self.places) else -1
        return (by_edge[place] + per_token * context + per_request * requests) * self.slowdown

    def is_known(self, rows: int) -> bool:
        return self.stairs[self.edges[self.stair(rows)]].estimate > 0

    def stair(self, rows: int) -> int:
        """The place of the stair; rows beyond the last edge are taken to be there."""
        return self.places[rows] if rows < len(self.places) else len(self.edges) - 1

    def observe(self, rows: int, context: int, requests: int, seconds: float) -> None:
        """Learn from a step that took so long."""
        with self.lock:
            if self.is_wrong(rows, context, requests, seconds):
                self.reset()
            self.has_steps = True
            self.num_steps += 1
            if self.num_steps % STALE == 0:
                self.forget_stale()
            stair = self.stairs[self.edges[self.stair(rows)]]
            if stair.estimate:
                self.compare(seconds * self.slowdown / self.seconds(rows, context, requests))
            quiet = seconds / self.slowdown
            if stair.estimate:
                is_slow = seconds > self.seconds(rows, context, requests)
                self.fit(is_slow, context, requests, quiet)
            added = self.added[0] * context + self.added[1] * requests
            stair.last = self.num_steps
            if stair.add(max(quiet - added, LEAST_SHARE * quiet)):
                self.fill()

    def is_wrong(self, rows: int, context: int, requests: int, seconds: float) -> bool:
        """Whether a step shows that costs of an earlier start do not hold here."""
        stair = self.stairs[self.edges[self.stair(rows)]]
        kept = stair.kept + self.added[0] * context + self.added[1] * requests
        return stair.contradicts(seconds / kept) if kept else False

    def forget_stale(self) -> None:
        """Forget edges of few steps, the last of them long ago. If these were slow by chance, plans
        have kept away from them since, and nothing else would show it.
        """
        for edge, stair in self.stairs.items():
            is_few = 0 < len(stair.seconds) < WINDOW
            if is_few and self.num_steps - stair.last >= STALE:
                self.stairs[edge] = Stair()
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
            for stair in self.stairs.values():
                stair.scale(max(latest))
            self.added = [a * max(latest) for a in self.added]
            self.ratios.clear()
            self.fill()

    def fit(self, is_slow: bool, context: int, requests: int, seconds: float) -> None:
        """Move what context and requests add, towards the quantile that the stairs are, too."""
        step = seconds * RATE * (QUANTILE if is_slow else QUANTILE - 1)
        for i, size in enumerate((context, requests)):
            usual = self.sizes[i] or size  # else the first steps would move it by far too much
            self.sizes[i] = usual + (size - usual) / 64
            if size:
                more = step * size / (self.sizes[i] ** 2 + size)
                self.added[i] = max(0.0, self.added[i] + more)

    def fill(self) -> None:
        """Estimate every edge: known, between its neighbors, or beyond the last by RIDGE. Below the
        first that is known a few steps count, too: roots alone are fewer rows than steps of
        prompts, which tell little of them.

        As other load makes nothing faster, an estimate above that of more rows is too high.
        """
        found, has_known = dict[int, float](), False
        for edge, stair in self.stairs.items():
            if stair.estimate:
                found[edge], has_known = stair.estimate, True
            elif stair.seconds and not has_known:
                found[edge] = min(stair.seconds)
        known, least = [*found], float("inf")
        for edge in reversed(known):
            least = found[edge] = min(least, found[edge])
        if not known:
            found, known = {1: FIRST}, [1]
        self.by_edge = [self.between(edge, known, found) for edge in self.edges]
        self.least_by_edge = [self.least(edge, known, found) for edge in self.edges]
        least = float("inf")
        for i in reversed(range(len(self.edges))):
            least = min(least, self.least_by_edge[i], self.by_edge[i])
            self.least_by_edge[i] = least

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
        seen = min(self.stairs[edge].seconds, default=0.0) * HOPED
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
        """Take the estimates of an earlier start, as of a few steps each; ignores absurd ones. All
        are forgotten if the first steps of any size contradict them.
        """
        for edge, seconds in known.stairs.items():
            if edge in self.stairs and 0 < seconds < 1e6:
                self.has_steps = True
                for _ in range(KNOWN):
                    self.stairs[edge].add(seconds)
                self.stairs[edge].kept, self.stairs[edge].unproven = seconds, KNOWN
        if all(0 <= seconds < 1 for seconds in known.added):
            self.added = [*known.added]
        self.fill()

    def known(self) -> KnownCosts:
        stairs = {edge: s.estimate for edge, s in self.stairs.items() if s.estimate}
        return KnownCosts(stairs, (self.added[0], self.added[1]))

    def table(self) -> dict[int, float]:
        """Right edge -> seconds of the rows alone, on a machine that nothing else slows down."""
        return dict(zip(self.edges, self.by_edge, strict=True))


def shape(rows: int) -> float:
    """How the time of a step grows with rows, until steps have shown it."""
    return 1 + rows / RIDGE
