"""A source of guesses as the engine asks it: checked, timed, and left out where it is too slow.
What a user's drafter raises costs guesses, and never any text.
"""

import logging
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from specserve.exchange.messages import Stats
from specserve.scheduling import ScheduledRequest
from specserve_drafters import Draft, DraftItem
from specserve_drafters.candidates import MOST, Candidate, checked, of_draft

RATE = 1 / 16  # of a step in what a source has lately taken and saved
FREE = 0.02  # of a step's time, which a source may take whatever it saves
FIRST = 8  # steps that show nothing yet

log = logging.getLogger("specserve")


def draft_item(item: ScheduledRequest, limit: int) -> DraftItem:
    """A request as sources and drafters are asked about it."""
    r = item.request
    return DraftItem(r.id, r.token_ids, limit, r.sampling.temperature, r.sampling.seed)


class Source(Protocol):
    """Proposes candidates. What it says is checked before; it may raise anything."""

    name: str

    def candidates(self, items: Sequence[DraftItem]) -> list[list[Candidate]]: ...


@runtime_checkable
class Foreseen(Protocol):
    """A source that knows beforehand how many of its guesses are likely to be right."""

    name: str

    def promise(self, id: int, text: "array[int]") -> float: ...

    def reset(self) -> None: ...


class UserSource:
    """A user's drafter as one of several sources."""

    def __init__(self, name: str, drafter: Any, vocab_size: int) -> None:
        self.name, self.drafter, self.vocab_size = name, drafter, vocab_size
        self.has_told = False  # of candidates that are not valid

    def candidates(self, items: Sequence[DraftItem]) -> list[list[Candidate]]:
        """With its own scores, if it has the method for them."""
        items = [item.copy() for item in items]
        scored = getattr(self.drafter, "candidates", None)  # optional in a drafter
        if scored is not None:
            return [self.valid(found) for _, found in zip(items, scored(items), strict=True)]
        drafts: Sequence[Draft] = self.drafter.propose(items)
        return [
            of_draft(Draft.cut(draft, item.limit, self.vocab_size), self.name)
            for draft, item in zip(drafts, items, strict=True)
        ]

    def valid(self, found: Iterable[object]) -> list[Candidate]:
        """Those before the first that is not valid; a warning names the first such one."""
        given = [*islice(found, MOST)]
        valid = checked(given, self.name, self.vocab_size)
        if len(valid) < len(given) and not self.has_told:
            self.has_told = True
            log.warning(
                "drafter %s: candidate %d of a list, %.200r, is dropped, and so are those after "
                "it: each has to be a Candidate whose token is in [0, %d) and whose parent is ROOT "
                "or the number of an earlier one, counted from 1; later ones are not told",
                *(self.name, len(valid) + 1, given[len(valid)], self.vocab_size),
            )
        return valid

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
    """Counts and logs what drafters raise, by the source's name."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats

    def tell(self, source: Source, what: str, *args: object) -> None:
        """Call a method of a source, if it has it."""
        try:
            tell(source, what, *args)
        except BaseException:  # the rest of the commit has to be done
            self.failed(source.name)

    def failed(self, name: str) -> None:
        """Count the exception that is being handled, and log it, the first with its traceback."""
        sums = self.stats.sources[name]
        sums.errors += 1
        count = sums.errors
        if count & (count - 1) == 0:  # 1, 2, 4, ...: failures in every step must not fill the log
            message = "drafter %s failed (%s), %d times so far; the text does not change"
            log.error(message, name, sys.exception(), count, exc_info=count == 1)
