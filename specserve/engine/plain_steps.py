"""What steps of one request without draft tokens take: the base of an estimated gain."""

from collections import deque
from statistics import median

from specserve.exchange.speculation_state import PlainStep
from specserve.scheduling.cost import Step

LATEST = 16  # steps whose median counts


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
