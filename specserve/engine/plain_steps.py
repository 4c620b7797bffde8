"""What steps of one request without draft tokens take: the base of an estimated gain."""

from collections import deque
from collections.abc import Sequence
from statistics import median

from specserve.exchange.speculation_state import PlainStep
from specserve.scheduling import ScheduledRequest

LATEST = 16  # steps whose median counts


class PlainSteps:
    """Whole steps, as measured, without the time of drafting. Those with about the same context are
    counted together: up to the next power of two.
    """

    def __init__(self) -> None:
        self.steps: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Count a step if it has one request's last token alone."""
        if len(scheduled) != 1 or not scheduled[0].is_root or scheduled[0].draft.tokens:
            return
        context = scheduled[0].end
        latest = self.steps.setdefault(context.bit_length(), deque(maxlen=LATEST))
        latest.append((context, seconds))

    def reset(self) -> None:
        self.steps = {}

    @property
    def state(self) -> list[PlainStep]:
        """By rising context."""
        each = [[*zip(*self.steps[size], strict=True)] for size in sorted(self.steps)]
        return [PlainStep(int(median(c)), median(s), len(s)) for c, s in each]
