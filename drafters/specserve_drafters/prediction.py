"""A source that proposes a text that the caller expects, for example a file to be edited."""

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

from specserve_drafters.base import DraftRequest, DraftSource, SourceRequest
from specserve_drafters.candidates import Candidate
from specserve_drafters.lookup import MAX_LENGTH, SURE, MatchAccuracy
from specserve_drafters.tenants import PerTenant

NEAR = 64  # tokens from the point of divergence within which any match counts
SURE_LENGTH = 4  # least tokens of a match at other places
MOST_PLACES = 16  # most places of a token that are checked after a difference
MOST_MISSES = 2  # most misses of an expected token: one if the output has extra tokens before it


class Alignment:
    """The position of an output in the expected text, found again after each difference.

    at          index of the next expected token, if the output continues as expected
    length      tokens before it that equal the output's last tokens, at most MAX_LENGTH
    """

    __slots__ = ("at", "came", "end", "expected", "length", "missed", "parted", "places")

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected, self.end = expected, array("i")  # `end`: the output's last tokens
        self.came = bytearray(len(expected))  # 1 for each that came when it was next
        self.missed = bytearray(len(expected))  # how often another token came instead of it
        self.at = 0
        self.parted = 0  # index at which the texts last agreed on several tokens
        self.length = SURE_LENGTH  # at the start the match counts as certain
        self.places: dict[int, list[int]] = {}  # by token, computed after the first difference

    @property
    def num_came(self) -> int:
        """Return the number of expected tokens that came when they were next."""
        return sum(self.came)

    def follow(self, token: int) -> bool:
        """Add a token of the output; return whether it is the expected one."""
        self.end.append(token)
        if len(self.end) > 2 * MAX_LENGTH:
            del self.end[:MAX_LENGTH]
        is_right = self.at < len(self.expected) and self.expected[self.at] == token
        if is_right:
            self.came[self.at] = 1
            self.length = min(self.length + 1, MAX_LENGTH)
        else:
            self.length = 0
            if self.at < len(self.expected):
                self.missed[self.at] = min(self.missed[self.at] + 1, MOST_MISSES)
        # A different token replaces one expected token, unless a match shows otherwise
        self.at += 1
        if self.length >= SURE_LENGTH:
            self.parted = self.at
        else:
            self.find(token)
        return is_right

    def follow_all(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.follow(token)

    def find(self, token: int) -> None:
        """Move to the place with the most tokens before it that equal the output's end; more than
        SURE_LENGTH do not count.

        Among equal places, one whose next token is still to come is best: otherwise a repetitive
        text would return to the same difference forever. The nearest place comes next.
        """
        if not self.places:
            self.places = defaultdict(list)
            for place, each in enumerate(self.expected):
                self.places[each].append(place)
        places = self.places.get(token, [])
        middle = bisect_left(places, self.parted)
        best = self.length, False, -abs(self.at - self.parted)
        for place in places[max(0, middle - MOST_PLACES // 2) : middle + MOST_PLACES // 2]:
            length, far = self.length_at(place), abs(place + 1 - self.parted)
            after = place + 1  # its token is still to come, if known, or it has come
            is_to_come = after < len(self.expected) and not self.came[after]
            is_to_come = is_to_come and self.missed[after] < MOST_MISSES
            rank = min(length, SURE_LENGTH), is_to_come, -far
            if rank > best and (far <= NEAR or length >= SURE_LENGTH):
                best, self.at, self.length = rank, place + 1, length

    def length_at(self, place: int) -> int:
        """Return how many tokens up to a place equal the output's end."""
        length = 0
        while length < min(len(self.end), place + 1, MAX_LENGTH):
            if self.end[-1 - length] != self.expected[place - length]:
                break
            length += 1
        return length


class FollowedAlignment:
    """A request's alignment, and how much of its text was processed."""

    __slots__ = ("accuracy", "alignment", "size")

    def __init__(self, expected: Sequence[int], num_prompt: int, accuracy: MatchAccuracy) -> None:
        self.alignment, self.size, self.accuracy = Alignment(expected), num_prompt, accuracy


class PredictionSource(DraftSource):
    """Proposes the caller's expected text."""

    name = "prediction"
    is_estimating: ClassVar[bool] = True
    needs_prediction: ClassVar[bool] = True

    def __init__(self) -> None:
        self.requests: dict[int, FollowedAlignment] = {}
        self.accuracy = PerTenant(MatchAccuracy)  # scopes do not see the statistics of other scopes

    def begin(self, request: SourceRequest) -> None:
        accuracy = self.accuracy.begin(request.id, request.scope)
        followed = FollowedAlignment(request.prediction, request.num_prompt, accuracy)
        self.requests[request.id] = followed

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        """Return the expected number of accepted draft tokens, by the texts so far."""
        alignment = self.follow(id, text)
        left = len(alignment.expected) - alignment.at
        return min(float(max(left, 0)), self.requests[id].accuracy.expected[alignment.length])

    def follow(self, id: int, text: "array[int]") -> Alignment:
        followed = self.requests[id]
        alignment = followed.alignment
        for token in text[followed.size :]:
            length = alignment.length
            followed.accuracy.add(length, alignment.follow(token))
        followed.size = len(text)
        return alignment

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        return [self.of(item) for item in items]

    def of(self, item: DraftRequest) -> list[Candidate]:
        alignment = self.follow(item.id, item.known)
        draft_tokens = alignment.expected[alignment.at : alignment.at + item.limit]
        sure = SURE[alignment.length :]
        rows = zip(draft_tokens, sure, strict=False)
        return [Candidate(token, k, p, self.name) for k, (token, p) in enumerate(rows)]

    def forget(self, id: int) -> None:
        self.requests.pop(id, None)
        self.accuracy.forget(id)

    def reset(self) -> None:
        """Drop all that was learned from texts."""
        self.accuracy.reset()
        for id, followed in self.requests.items():
            followed.accuracy = self.accuracy.of(id)
