"""A source of guesses as the engine asks it: checked, timed, and left out where it is too slow.
What a user's drafter raises costs guesses, and never any text.
"""

import logging
import sys
from array import array
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from specserve.exchange.step_output import Stats
from specserve_drafters import Draft, DraftItem
from specserve_drafters.candidates import Candidate, checked, of_draft

RATE = 1 / 16  # of a step in what a source has lately taken and saved
FREE = 0.02  # of a step's time, which a source may take whatever it saves
FIRST = 8  # steps that show nothing yet

log = logging.getLogger("specserve")


class Source(Protocol):
    """Proposes candidates. What it says is checked before; it may raise anything."""

    name: str

    def candidates(self, items: Sequence[DraftItem]) -> list[list[Candidate]]: ...


@runtime_checkable
class Foreseen(Protocol):
    """A source that knows beforehand how many of its guesses are likely to be right."""

    def promise(self, id: int, text: "array[int]") -> float: ...

    def reset(self) -> None: ...


class UserSource:
    """A user's drafter as one of several sources."""

    def __init__(self, name: str, drafter: object, vocab_size: int) -> None:
        self.name, self.drafter, self.vocab_size = name, drafter, vocab_size

    def candidates(self, items: Sequence[DraftItem]) -> list[list[Candidate]]:
        """With its own scores, if it has the method for them."""
        items = [item.copy() for item in items]
        scored = getattr(self.drafter, "candidates", None)  # optional in a drafter
        if scored is not None:
            return [
                checked(found, self.name, self.vocab_size)
                for _, found in zip(items, scored(items), strict=True)
            ]
        drafts: Sequence[Draft] = self.drafter.propose(items)  # type: ignore[attr-defined]
        return [
            of_draft(Draft.cut(draft, item.limit, self.vocab_size), self.name)
            for draft, item in zip(drafts, items, strict=True)
        ]

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        """Tell it of the whole draft, which has other sources' guesses as well."""
        tell(self.drafter, "observe", id, draft.copy(), [*accepted])

    def forget(self, id: int) -> None:
        tell(self.drafter, "forget", id)


class Pace:
    """The seconds of a step that a source has lately taken, and those that it has saved."""

    def __init__(self) -> None:
        self.taken = self.saved = 0.0
        self.num_steps = 0

    def add(self, taken: float, saved: float) -> None:
        self.num_steps += 1
        self.taken += RATE * (taken - self.taken)
        self.saved += RATE * (saved - self.saved)

    def is_late(self, step_seconds: float) -> bool:
        return self.num_steps > FIRST and self.taken > max(self.saved, FREE * step_seconds)


def tell(drafter: object, what: str, *args: object) -> None:
    """Call a method of a drafter, if it has it; it may raise anything."""
    method = getattr(drafter, what, None)  # optional in a drafter
    if method is not None:
        method(*args)


class UserCode:
    """Counts and logs what drafters raise."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def tell(self, drafter: object, what: str, *args: object) -> None:
        """Call a method of a drafter, if it has it."""
        try:
            tell(drafter, what, *args)
        except BaseException:  # the rest of the commit has to be done
            self.failed(what)

    def failed(self, where: str) -> None:
        """Count the exception that is being handled, and log it, the first with its traceback."""
        self.stats.drafter_errors += 1
        count = self.stats.drafter_errors
        if count & (count - 1) == 0:  # 1, 2, 4, ...: failures in every step must not fill the log
            message = "the drafter failed in %s (%s), %d times so far; the text does not change"
            log.error(message, where, sys.exception(), count, exc_info=count == 1)
