"""What each source of guesses proposed, what of that was verified and accepted, what it saved."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from specserve.exchange.messages import SourceCounts, SourceStats, Stats, VerifiedTree
from specserve_drafters import Draft


class Told(msgspec.Struct, frozen=True):
    """What a step's output tells of its guesses."""

    sources: dict[str, SourceCounts] = {}
    tree: VerifiedTree | None = None


class DraftSources(NamedTuple):
    """A draft, the sources of each of its guesses, and how many each source had proposed."""

    draft: Draft
    sources: Sequence[Sequence[str]]
    proposed: dict[str, int]


class Ledger:
    """Sums over all steps by source, in `stats`. A guess of several sources counts for each."""

    def __init__(self, names: Sequence[str], stats: Stats) -> None:
        """Adds to the sums that there are. A source that comes later has the next bit."""
        self.names, self.sums = names, stats.sources
        for name in names:
            self.sums.setdefault(name, SourceStats())
        self.bits = {name: 1 << i for i, name in enumerate(self.sums)}
        self.saved_by_guess = self.row_seconds = 0.0

    def took(self, name: str, seconds: float) -> None:
        self.sums[name].seconds += seconds
        self.sums[name].saved_seconds -= seconds

    def begin(self, saved_by_guess: float, row_seconds: float) -> None:
        """Begin a step, with the seconds that an accepted guess saves, and that each one took."""
        self.saved_by_guess, self.row_seconds = saved_by_guess, row_seconds

    def enter(self, guesses: DraftSources, accepted: Sequence[int], is_tree_asked: bool) -> Told:
        """Count a request's guesses of the step. One of several sources saves for all together."""
        draft, sources, proposed = guesses
        verified, right = dict.fromkeys(proposed, 0), dict.fromkeys(proposed, 0)
        for names in sources:
            for name in names:
                verified[name] += 1
                self.sums[name].saved_seconds -= self.row_seconds / len(names)
        for depth, node in enumerate(accepted):
            for name in (names := sources[node - 1]):
                right[name] += 1
                self.add_accepted(name, depth, self.saved_by_guess / len(names))
        for name, number in proposed.items():
            self.sums[name].proposed += number
            self.sums[name].verified += verified[name]
        each = proposed, verified, right
        counts = {name: SourceCounts(*(n.get(name, 0) for n in each)) for name in self.names}
        if not is_tree_asked or not draft.tokens:
            return Told(counts)
        bits = [sum(self.bits[name] for name in names) for names in sources]
        return Told(counts, VerifiedTree(draft.tokens, draft.parents, bits, [*accepted]))

    def add_accepted(self, name: str, depth: int, saved: float) -> None:
        sums = self.sums[name]
        sums.accepted += [0] * (depth + 1 - len(sums.accepted))
        sums.accepted[depth] += 1
        sums.saved_seconds += saved
