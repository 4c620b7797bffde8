"""A model that guesses level by level, what its levels took in a step, and which of several guesses
first.
"""

from collections.abc import Sequence

from specserve.engine.executor import ModelExecutor
from specserve_drafters.model_source import ModelSource

KNOWN = 4  # steps that each is first in before they are compared
AGAIN = 64  # steps from one in which another than the best is first to the next
RATE = 1 / 16  # of a step in how fast steps lately were


class FirstTurns:
    """Which of several models guesses first: those that follow add only what is still worth its
    time. Their order decides how fast steps are, so that is what they are compared by.
    """

    def __init__(self) -> None:
        self.rates: dict[
            str, tuple[int, float]
        ] = {}  # steps, and tokens a second, by who was first
        self.num_steps = 0

    def choose(self, names: Sequence[str]) -> str:
        known = {name: self.rates.get(name, (0, 0.0)) for name in names}
        least = min(names, key=lambda name: known[name][0])
        if known[least][0] < KNOWN:
            return least
        self.num_steps += 1
        best = max(names, key=lambda name: known[name][1])
        return least if self.num_steps % AGAIN == 0 else best

    def add(self, name: str, rate: float) -> None:
        """Learn how many tokens a second a step with this one first has brought."""
        steps, mean = self.rates.get(name, (0, 0.0))
        steps += 1
        self.rates[name] = steps, mean + max(1 / steps, RATE) * (rate - mean)


class Grower:
    """The draft model or the target's head, as a source of planned guesses."""

    def __init__(self, source: ModelSource, model: ModelExecutor) -> None:
        self.source, self.model = source, model
        self.begin()

    @property
    def name(self) -> str:
        return self.source.name

    def begin(self) -> None:
        """Begin a step."""
        self.seconds = 0.0  # of its levels
        self.catching_up = 0.0  # seconds that are not charged to the step
        self.is_trial_alone = False  # its levels were run for no other request than a trial's
