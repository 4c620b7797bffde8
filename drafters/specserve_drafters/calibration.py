"""How often a source's guess is right, given that its parent was: learnt for each kind of guess.

Sources score their guesses themselves, and may be wrong and overconfident. What is learnt here
makes the scores of different sources comparable.
"""

from bisect import bisect
from math import exp

BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between buckets of scores
DEPTHS = 8  # guesses at this depth and deeper ones are of one kind
LEAST, MOST = 0.002, 0.998  # of a probability: more is never certain
UNSCORED = 0.5  # the score of a guess whose source gives none

PRIOR = 4.0  # guesses that a kind's own score counts for
MEMORY = 1 - 1 / 256  # what is left of a kind's counts after another guess of it
SHIFT_PRIOR = 1.0  # of a request's shift, in units of p (1 - p): four guesses of p = 1/2
SHIFT_MEMORY = 1 - 1 / 32  # what is left of a shift's guesses after another step
MAX_SHIFT = 4.0
WORTH, WORTH_RATE = 0.05, 1 / 64  # what agreement is worth at first, and how fast that changes


class CalibrationBin:
    """Decayed counts of the guesses of one source, bucket of score and depth."""

    __slots__ = ("factor", "hits", "scores", "tries")

    def __init__(self) -> None:
        self.tries = self.hits = self.scores = 0.0
        self.factor = 1.0  # from the odds of a score to those of the share that was right

    def count(self, score: float, is_right: bool) -> None:
        self.tries = tries = self.tries * MEMORY + 1
        self.hits = hits = self.hits * MEMORY + is_right
        self.scores = scores = self.scores * MEMORY + score
        # A Beta prior around the source's own score: without guesses nothing changes.
        score = scores / tries
        right = (hits + PRIOR * score) / (tries + PRIOR)
        right = LEAST if right < LEAST else MOST if right > MOST else right
        self.factor = right * (1 - score) / ((1 - right) * score)


# One source's word on a guess: who weighed it, the kind, the score, and what it is worth here. A
# plain tuple: hundreds are made in a step.
CalibratedScore = tuple["AcceptanceCalibrator", int, float, float]


class AcceptanceCalibrator:
    """Calibrates one source's scores in one request: as in all requests, and by its own shift."""

    __slots__ = ("bit", "factor", "kinds", "logit_shift", "source", "weight")

    def __init__(self, source: str, bit: int, kinds: list[CalibrationBin]) -> None:
        self.source, self.bit, self.kinds = source, bit, kinds
        self.logit_shift = self.weight = 0.0
        self.factor = 1.0  # of the odds: exp(shift)

    def weigh(self, score: float | None, depth: int) -> CalibratedScore:
        """A score of any value as a probability: NaN and None count as UNSCORED."""
        if score is None or score != score:
            score = UNSCORED
        score = LEAST if score < LEAST else MOST if score > MOST else score
        kind = bisect(BOUNDS, score) * DEPTHS + (depth if depth < DEPTHS else DEPTHS) - 1
        right = self.kinds[kind].factor * self.factor * score
        p = right / (right + 1 - score)
        return self, kind, score, LEAST if p < LEAST else MOST if p > MOST else p

    def learn(self, said: CalibratedScore, is_right: bool) -> None:
        """Count a guess whose parent was right."""
        _, kind, score, p = said
        self.kinds[kind].count(score, is_right)
        # A Newton step of a logistic regression with forgetting, whose only weight is the shift.
        # The kinds' share in p changes meanwhile; the step uses the error of both together.
        self.weight = weight = self.weight + p * (1 - p)
        shift = self.logit_shift + (is_right - p) / (weight + SHIFT_PRIOR)
        self.logit_shift = (
            -MAX_SHIFT if shift < -MAX_SHIFT else MAX_SHIFT if shift > MAX_SHIFT else shift
        )

    def fade(self) -> None:
        """Another step begins: a shift that nothing confirms goes back to what holds for all."""
        left = self.weight * SHIFT_MEMORY
        self.logit_shift *= SHIFT_MEMORY * (self.weight + SHIFT_PRIOR) / (left + SHIFT_PRIOR)
        self.weight = left

    def use(self) -> None:
        """Weigh by what was learnt, from here on."""
        self.factor = exp(self.logit_shift)


class Calibrators(dict[str, AcceptanceCalibrator]):
    """The calibrators of one request, by source; each is made when it is first asked for."""

    def __init__(self, calibration: "Calibration") -> None:
        super().__init__()
        self.calibration = calibration

    def __missing__(self, source: str) -> AcceptanceCalibrator:
        sources = self.calibration.sources
        if source not in sources:
            kinds = [CalibrationBin() for _ in range((len(BOUNDS) + 1) * DEPTHS)]
            sources[source] = 1 << len(sources), kinds
        bit, kinds = sources[source]
        calibrator = self[source] = AcceptanceCalibrator(source, bit, kinds)
        return calibrator


class Calibration:
    """The kinds of all sources, what their agreement is worth, and every request's calibrators."""

    def __init__(self) -> None:
        self.sources: dict[str, tuple[int, list[CalibrationBin]]] = {}  # a bit and the kinds
        self.worth: dict[int, float] = {}  # by the bits of the sources that agree
        self.requests: dict[int, Calibrators] = {}

    def calibrators(self, id: int) -> Calibrators:
        """The request's; they are kept until `forget`."""
        found = self.requests.get(id)
        if found is None:
            found = self.requests[id] = Calibrators(self)
        return found

    def combine(self, said: list[CalibratedScore]) -> float:
        """The probability of a guess that several sources share: as if they erred independently,
        but no more above the best of them than agreement has been worth.
        """
        bits, wrong, best = 0, 1.0, 0.0
        for calibrator, _, _, p in said:
            bits |= calibrator.bit
            wrong *= 1 - p
            best = p if p > best else best
        return min(1 - wrong, best + self.worth.get(bits, WORTH), MOST)

    def agreed(self, said: list[CalibratedScore], is_right: bool) -> None:
        """Count a guess of several sources whose parent was right."""
        bits, best = 0, 0.0
        for calibrator, _, _, p in said:
            bits |= calibrator.bit
            best = max(best, p)
        worth = self.worth.get(bits, WORTH)
        self.worth[bits] = max(0.0, worth + WORTH_RATE * (is_right - best - worth))

    def forget(self, id: int) -> None:
        self.requests.pop(id, None)

    def drop(self, source: str) -> None:
        """Forget what was learnt of a source: another one has its name."""
        if source in self.sources:
            kinds = self.sources[source][1]
            kinds[:] = [CalibrationBin() for _ in kinds]
        for calibrators in self.requests.values():
            calibrators.pop(source, None)

    def table(self) -> dict[str, list[dict[str, float]]]:
        """By source, the kinds of which there were guesses: score, share that was right, count."""
        return {
            source: [
                {"depth": i % DEPTHS + 1, "tries": k.tries, "score": k.scores / k.tries}
                | {"right": k.hits / k.tries}
                for i, k in enumerate(kinds)
                if k.tries
            ]
            for source, (_, kinds) in self.sources.items()
        }
