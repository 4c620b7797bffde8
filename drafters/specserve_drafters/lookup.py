"""Prompt lookup with an index that grows with the text: finds earlier places of the last tokens.

It proposes as `NgramDrafter` does, with a faster search, and gives each draft token a score. So a
match of a single token is useful as well. `native.py` is the same in C++, bit by bit.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from specserve_drafters.base import DraftRequest, DraftSource
from specserve_drafters.candidates import MAX_NODES, Candidate
from specserve_drafters.ngram import continuation

if TYPE_CHECKING:  # see base.py
    import numpy as np

LENGTHS = range(1, 5)  # lengths of indexed n-grams, in tokens
MAX_TOKENS = 1 << 16  # most tokens of a request that are indexed, the latest: 2 MB
AT_ONCE = 1 << 13  # most tokens added per step: a long prompt is indexed over several steps
# Least size of the tables: an output longer than its prompt lengthens the chains
LEAST_SIZE = 1 << 12
FEW = 64  # number of tokens up to which adding them one by one is faster
MAX_MATCHES, MAX_VISITS = 16, 64  # most matches per lookup, and most visited places
ENOUGH = 4  # number of matches that are enough to estimate their agreement
MAX_LENGTH = 16  # most tokens of a match: longer ones are equally certain

MIX = (
    0x1B873593,
    0x165667B1,
    0x0CC9E2D5,
    0x185EBCA7,
)  # odd hash factors below 2 ** 29: sums fit 63 bits

# Rough probability of a draft token by the length of its match; calibration shifts it.
SURE = [1 - 0.75 * 0.82 ** min(length, MAX_LENGTH) for length in range(MAX_LENGTH + MAX_NODES + 1)]
# Initial probability that a match of that length continues.
LIKELY = [1 - 0.9 * 0.85**length for length in range(MAX_LENGTH + 1)]
PRIOR = 4.0  # number of tokens that the initial value counts for
MEMORY = 1 - 1 / 256  # factor on the counts of a length per counted token
SUM_EVERY = 64  # tokens between updates of the expected lengths


class NgramIndex:
    """The places of a text's n-grams, newest first: a chain of places for each hash.

    A place is the end of an n-gram, at the token that follows it. The index does not store the
    text: the text itself distinguishes n-grams of the same hash.
    """

    def __init__(self, num_tokens: int) -> None:
        """Create an index for a text that starts with `num_tokens` tokens."""
        size = min(MAX_TOKENS, max(LEAST_SIZE, 1 << num_tokens.bit_length()))
        self.newest = [zeros(size) for _ in LENGTHS]  # newest place by hash; 0 for none
        self.before = [zeros(size) for _ in LENGTHS]  # earlier place by place & mask; a ring
        self.mask, self.slots = size - 1, size - 1
        self.next = LENGTHS.start  # the first place that is not indexed
        self.latest: tuple[int, list[int]] = 0, []  # a place, and the result of slots_of

    def grow(self, text: "array[int]") -> None:
        """Index new tokens of the text, the oldest first, at most AT_ONCE.

        The last token is left out until another token follows it.
        """
        while len(text) > self.mask and self.mask + 1 < MAX_TOKENS:
            for before in self.before:
                before.extend(zeros(len(before)))
            self.mask = 2 * self.mask + 1
        self.next = max(self.next, len(text) - MAX_TOKENS)
        end = min(len(text), self.next + AT_ONCE)
        if end - self.next <= FEW:
            self.add_each(text, end)
        else:
            self.add_all(text, end)

    def add_each(self, text: "array[int]", end: int) -> None:
        mask = self.mask
        for place in range(self.next, end):
            tables = zip(self.slots_of(text, place), self.newest, self.before, strict=False)
            for slot, newest, before in tables:
                before[place & mask] = newest[slot]
                newest[slot] = place
        self.next = max(self.next, end)

    def slots_of(self, text: "array[int]", place: int) -> list[int]:
        """Return the slots of the n-grams that end before the place, by length, for all lengths
        that fit.
        """
        if place != self.latest[0]:
            mixed, slots, mask = 0, [], self.slots
            for token, mix in zip(
                text[max(place - LENGTHS[-1], 0) : place][::-1], MIX, strict=False
            ):
                mixed += token * mix
                slots.append((mixed ^ mixed >> 17) & mask)
            self.latest = place, slots
        return self.latest[1]

    def add_all(self, text: "array[int]", end: int) -> None:
        import numpy as np

        first, back = self.next, LENGTHS[-1]
        begin = max(0, first - back)
        tokens = np.frombuffer(text[begin:end], dtype=np.int32).astype(np.int64)
        for n, newest, before in zip(LENGTHS, self.newest, self.before, strict=True):
            places = np.arange(max(first, n), end)
            hashes = np.zeros(len(places), np.int64)
            for j in range(n):
                hashes += tokens[places - begin - 1 - j] * MIX[j]
            chain(newest, before, places, (hashes ^ hashes >> 17) & self.slots)
        self.next = max(first, end)

    def matches(self, text: "array[int]") -> Iterator[tuple[int, int]]:
        """Yield the ends of earlier copies of the last tokens, with their least length: the longest
        n-grams first, then the newest.
        """
        end, mask, seen = len(text), self.mask, set[int]()
        slots = self.slots_of(text, end)
        for n in reversed(LENGTHS):
            if n >= end:
                continue
            newest, before = self.newest[n - 1], self.before[n - 1]
            tail, visits = text[end - n :], 0
            place = newest[slots[n - 1]]
            # The chain after a place that has left the ring is arbitrary, so visits are bounded.
            while place and visits < MAX_VISITS:
                visits += 1
                if place not in seen and text[place - n : place] == tail:
                    seen.add(place)
                    yield place, n
                place = before[place & mask]


def zeros(n: int) -> "array[int]":
    return array("i", bytes(4 * n))


def chain(
    newest: "array[int]", before: "array[int]", places: "np.ndarray", slots: "np.ndarray"
) -> None:
    """Put rising places in front of the chains of their slots."""
    import numpy as np

    if not len(places):
        return
    heads, links = np.frombuffer(newest, np.int32), np.frombuffer(before, np.int32)
    order = np.argsort(slots, kind="stable")
    slots, places = slots[order], places[order]
    is_last = np.append(slots[1:] != slots[:-1], True)
    earlier = heads[slots]
    earlier[1:][~is_last[:-1]] = places[:-1][~is_last[:-1]]
    links[places & len(before) - 1] = earlier
    heads[slots[is_last]] = places[is_last]


class MatchAccuracy:
    """How often the token after a match equals the text's next token, by the match's length, in all
    texts.

    It needs no verified draft token: every token of a text shows whether a match was right.
    """

    def __init__(self) -> None:
        self.right = [PRIOR * p for p in LIKELY]
        self.tries = [PRIOR] * (MAX_LENGTH + 1)
        # Number of right tokens in a row after such a match
        self.expected = [0.0] * (MAX_LENGTH + 1)
        self.until_sum = 0
        self.sum()

    def add(self, length: int, is_right: bool) -> None:
        self.tries[length] = self.tries[length] * MEMORY + 1
        self.right[length] = self.right[length] * MEMORY + is_right
        self.until_sum -= 1
        if self.until_sum <= 0:
            self.sum()

    def sum(self) -> None:
        p = [right / tries for right, tries in zip(self.right, self.tries, strict=True)]
        expected = min(p[-1] / (1 - p[-1]), MAX_LENGTH) if p[-1] < 1 else MAX_LENGTH
        for length in reversed(range(MAX_LENGTH + 1)):
            self.expected[length] = expected = p[length] * (1 + expected)
        self.until_sum = SUM_EVERY


class FollowedText:
    """A text's index, and the longest latest match of its end, updated with each token."""

    __slots__ = ("index", "length", "place", "size")

    def __init__(self, num_tokens: int) -> None:
        self.index = NgramIndex(num_tokens)
        self.size = num_tokens  # length of the text at the last call
        self.place = self.length = 0  # the token that follows the match; 0 for no match

    def follow(self, text: "array[int]", accuracy: MatchAccuracy) -> None:
        """Compare new tokens of the text with the tokens after the match."""
        size, place, length = self.size, self.place, self.length
        self.size = len(text)
        while place and size < len(text):
            is_right = text[place] == text[size]
            accuracy.add(length, is_right)
            length = min(length + 1, MAX_LENGTH)
            size, place = size + 1, place + 1 if is_right else 0
        self.index.grow(text)
        if not place:
            place, _ = next(self.index.matches(text), (0, 0))
            length = match_length(text, place) if place else 0
        self.place, self.length = place, length


class NgramSource(DraftSource):
    """Proposes at most two continuations: the longest latest match's, and the next one that
    differs.
    """

    name = "ngram"
    is_estimating: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all texts and statistics."""
        self.texts: dict[int, FollowedText] = {}
        self.accuracy = MatchAccuracy()

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        """Return the expected number of accepted draft tokens, by the text so far. This is far
        faster than proposing them.
        """
        followed = self.texts.get(id)
        if followed is None:
            followed = self.texts[id] = FollowedText(len(text))
        followed.follow(text, self.accuracy)
        return self.accuracy.expected[followed.length] if followed.place else 0.0

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        return [self.look_up(item.id, item.known, item.limit) for item in items]

    def look_up(self, id: int, text: "array[int]", limit: int) -> list[Candidate]:
        followed = self.texts.get(id)
        if followed is None:
            followed = self.texts[id] = FollowedText(len(text))
        index = followed.index
        index.grow(text)
        found: list[tuple[int, int]] = []
        best: list[int] = []
        other: list[int] = []
        at = 0  # start of the other continuation
        for match in islice(index.matches(text), MAX_MATCHES if limit else 0):
            found.append(match)
            if not other:
                follows = continuation(text, match[0], limit)
                best = best or follows
                if follows != best:
                    other, at = follows, match[0]
            elif len(found) >= ENOUGH:
                break
        if not found:
            return []
        p = scores(text, found, found[0][0], limit)
        draft_tokens = [Candidate(token, k, p[k], self.name) for k, token in enumerate(best)]
        if other:
            fork(draft_tokens, other, scores(text, found, at, limit), self.name)
        return draft_tokens

    def forget(self, id: int) -> None:
        self.texts.pop(id, None)


def scores(
    text: "array[int]", found: Sequence[tuple[int, int]], place: int, limit: int
) -> list[float]:
    """Return the probabilities of the tokens after a match, by the match's length, which grows with
    each right token. The first also depends on how many of the matches of that n-gram continue with
    it.
    """
    length, longest = match_length(text, place), found[0][1]
    alike = [text[other] == text[place] for other, n in found if n == longest]
    share = (sum(alike) + 0.5) / (len(alike) + 1)
    return [share * SURE[length], *SURE[length + 1 : length + limit]]


def fork(draft_tokens: list[Candidate], other: list[int], scores: list[float], source: str) -> None:
    """Add the part of another continuation that differs, at most a quarter of the limit."""
    at = next(j for j, token in enumerate(other) if token != draft_tokens[j].token)
    parent, p = at, scores[at]
    if at > 0:  # both follow the same tokens, so they share the probability
        p *= (1 - (draft_tokens[at].p or 0.0)) / 2
    end = at + len(other) // 4
    for token, score in zip(other[at:end], [p, *scores[at + 1 :]], strict=False):
        draft_tokens.append(Candidate(token, parent, score, source))
        parent = len(draft_tokens)


def match_length(text: "array[int]", place: int) -> int:
    """Return how many tokens before the place equal the text's last tokens, at most MAX_LENGTH."""
    back = 1
    while back <= min(place, MAX_LENGTH) and text[place - back] == text[-back]:
        back += 1
    return back - 1
