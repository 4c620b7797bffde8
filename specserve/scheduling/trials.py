"""Trying again what was not worth its time.

Making guesses takes time of the host even where none is verified, which may be a third of a small
model's step. They are made for those requests for which that lately saved time; for others as a
trial, as often as a small share of all steps' time allows.
"""

from collections.abc import Hashable, Sequence

FREE = 0.02  # of a step's time: what making guesses may lose
RATE = 1 / 16  # of a step in what was lately saved
TRIALS = 0.01  # of all steps' time: what trials may lose
FADE = 0.99  # of the loss that is expected of a trial, after each step
AT_FIRST = 3.0  # steps' time: what they may lose before, and what the first ones may


class Trials:
    """When each of several things is tried again: ever more rarely, as long as it fails."""

    def __init__(self, first: int = 16, last: int = 512) -> None:
        self.first, self.last = first, last
        self.waits: dict[Hashable, tuple[int, int]] = {}  # steps from a trial to the next, and left

    def is_due(self, key: Hashable, steps: int = 1) -> bool:
        """Count steps in which it would be left out; whether it is tried in the last instead."""
        wait, left = self.waits.get(key, (self.first, self.first))
        if left > steps:
            self.waits[key] = wait, left - steps
            return False
        self.waits[key] = (longer := min(2 * wait, self.last)), longer
        return True

    def worked(self, key: Hashable) -> None:
        """It is worth its time: when it no longer is, it is tried again soon."""
        self.waits.pop(key, None)


class Turn:
    """What guesses have lately saved of a request's steps, as a share of the step's time."""

    __slots__ = ("num_steps", "saved")

    def __init__(self, saved: float = 0.0, num_steps: int = 0) -> None:
        self.saved, self.num_steps = saved, num_steps

    def add(self, saved: float) -> None:
        self.num_steps = self.num_steps + 1 if self.pays else 1  # a trial shows what holds from now
        self.saved += max(1 / self.num_steps, RATE) * (saved - self.saved)

    @property
    def pays(self) -> bool:
        return self.num_steps > 0 and self.saved >= -FREE


class Turns:
    """The turns of all requests. Trials are made for all that do not pay in the same step: one in
    which one request is asked takes most of the time that asking all takes.
    """

    def __init__(self) -> None:
        self.num_steps = self.last = 0
        self.by_request: dict[int, Turn] = {}
        self.all = Turn()
        self.left = AT_FIRST  # steps' time that trials may lose
        self.loss = 0.0  # of a trial, lately
        self.is_warm = False  # the first turns of all take far more time than later ones

    def next_step(self) -> None:
        self.num_steps += 1
        self.left = min(self.left + TRIALS, AT_FIRST)
        self.loss *= FADE

    @property
    def is_trial(self) -> bool:
        """Whether those that do not pay are tried in this step."""
        return self.left >= min(self.loss, AT_FIRST)

    def is_due(self, id: int) -> bool:
        return self.is_trial or self.of(id).pays

    def of(self, id: int) -> Turn:
        """A new request begins with what others have shown."""
        turn = self.by_request.get(id)
        if turn is None:
            turn = self.by_request[id] = Turn(self.all.saved, min(self.all.num_steps, 1))
        return turn

    def passed(self) -> int:
        """Steps since the one before in which this was asked."""
        passed, self.last = self.num_steps - self.last, self.num_steps
        return passed

    def add(
        self, saved: Sequence[tuple[Turn, float]], num_roots: int = 1, more: float = 0.0
    ) -> None:
        """Learn what turns have saved in a step of so many roots, each as a share of its request's
        part of the step's time, and how many parts more the step has lost.
        """
        if not self.is_warm:
            self.is_warm = True
            return
        tried = [share for turn, share in saved if not turn.pays]
        lost = more - sum(tried)
        for turn, share in saved:
            did_pay = turn.pays
            self.all.add(share)
            turn.add(share)
            if did_pay and not turn.pays:  # for some steps it only seemed to: a trial, too
                lost -= turn.saved * min(turn.num_steps, 1 / RATE)
        if tried:
            self.loss += (max(lost / num_roots, 0.0) - self.loss) / 2
        self.left -= min(lost / num_roots, AT_FIRST)

    def forget(self, id: int) -> None:
        self.by_request.pop(id, None)
