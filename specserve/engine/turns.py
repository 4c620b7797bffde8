"""Which requests guesses are made for in a step: those for which making them lately saved time.

Making guesses takes time of the host even where none is verified, which may be a third of a small
model's step. A request whose guesses do not save what they take is asked for ever more rarely.
"""

FREE = 0.02  # of a step's time: what making guesses may lose
FEW = 4  # steps that show nothing yet
RATE = 1 / 16  # of a step in what was lately saved
FIRST = 8  # steps from a turn to the next of a new request, where none has lately saved time
LAST = 64  # at most


class Turn:
    """What guesses have lately saved of a request's steps, as a share of the step's time."""

    __slots__ = ("num_steps", "saved", "wait")

    def __init__(self, wait: int = 1) -> None:
        self.wait = wait  # steps from a turn to the next
        self.begin()

    def begin(self) -> None:
        self.saved, self.num_steps = 0.0, 0

    def add(self, saved: float) -> None:
        self.num_steps += 1
        self.saved += max(1 / self.num_steps, RATE) * (saved - self.saved)

    @property
    def is_worth(self) -> bool:
        return self.num_steps < FEW or self.saved >= -FREE


class Turns:
    """The turns of all requests. Their steps are the same ones, so that most have no turn at all:
    a step in which one request is asked takes most of the time that asking all takes.
    """

    def __init__(self) -> None:
        self.num_steps = self.last = 0
        self.by_request: dict[int, Turn] = {}
        self.all = Turn()

    def next_step(self) -> None:
        self.num_steps += 1

    def is_due(self, id: int) -> bool:
        turn = self.by_request.get(id)
        if turn is None:
            turn = self.by_request[id] = Turn(1 if self.all.is_worth else FIRST)
        return self.num_steps % turn.wait == 0

    def is_rare(self, id: int) -> bool:
        return self.by_request[id].wait > 1

    def passed(self) -> int:
        """Steps since the one before in which this was asked."""
        passed, self.last = self.num_steps - self.last, self.num_steps
        return passed

    def add(self, id: int, saved: float, might_pay: bool = False) -> None:
        """Learn what a turn has saved, and whether it would have with a guess that was right but
        not verified: the next one then comes sooner.
        """
        turn = self.by_request[id]
        self.all.add(saved)
        if turn.wait == 1:
            turn.add(saved)
            turn.wait = 1 if turn.is_worth else 2
            return
        turn.wait = 1 if saved > 0 else turn.wait // 2 if might_pay else min(2 * turn.wait, LAST)
        if turn.wait == 1:
            turn.begin()

    def forget(self, id: int) -> None:
        self.by_request.pop(id, None)
