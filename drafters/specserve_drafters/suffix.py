"""Earlier outputs as a source: proposes the tokens that followed the last tokens before.

As in SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), draft tokens are the tokens that
followed the longest match, weighted by frequency. Here, hashes of n-grams find the places, so each
token of an output is entered once per length. Only outputs are stored, with the last tokens of
their prompts. These find the start of a response when a prompt is repeated.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from operator import mul
from typing import ClassVar

import numpy as np

from specserve_drafters.base import DraftRequest, DraftSource, SourceRequest, TenantScope
from specserve_drafters.candidates import ROOT, Candidate
from specserve_drafters.lookup import MAX_LENGTH, SURE, MatchAccuracy, chain, zeros

NAME = "suffix"  # of the source
LENGTHS = 2, 4, 8, 16  # lengths of indexed n-grams, in tokens
MIX = [0x9E3779B1 * (2 * j + 1) % (1 << 27) | 1 for j in range(LENGTHS[-1])]  # sums fit 63 bits
SMALL, LARGE = 1 << 10, 1 << 17  # tokens of a scope's first part, and most tokens of a part
MOST_BYTES = 64 << 20  # most bytes of all scopes together
MAX_MATCHES, MAX_VISITS = 16, 64  # most matches per length, and most visited places
END = -1  # marks the end of an output


class SuffixPart:
    """Outputs one after the other, and the places of their n-grams, newest first.

    A place is the position of the token after an n-gram; 0 is none.
    """

    def __init__(self, size: int) -> None:
        """Create a part for `size` tokens, a power of 2."""
        self.tokens, self.size = array("i", [END]), size
        self.newest = [zeros(size) for _ in LENGTHS]  # newest place by hash
        self.before = [zeros(size) for _ in LENGTHS]  # earlier place by place

    @property
    def room(self) -> int:
        return self.size - len(self.tokens) - 1

    @property
    def num_bytes(self) -> int:
        return 4 * self.size * (2 * len(LENGTHS) + 1)

    def add(self, text: "array[int]", num_context: int = 0) -> None:
        """Enter a text that fits: an output after `num_context` tokens of its prompt."""
        begin = len(self.tokens)
        self.tokens.extend(text)
        self.tokens.append(END)
        tokens = np.frombuffer(text, np.int32).astype(np.int64)
        hashes = np.zeros(len(text), np.int64)  # hash of the n-gram before each token
        for n, mix in enumerate(MIX[: len(text)], 1):
            hashes[n:] += tokens[:-n] * mix
            if n in LENGTHS:
                k, first = LENGTHS.index(n), max(n, num_context)
                places, sums = np.arange(begin + first, begin + len(text)), hashes[first:]
                chain(self.newest[k], self.before[k], places, (sums ^ sums >> 17) & self.size - 1)

    def matches(self, end: "array[int]", k: int, mixed: int) -> Iterator[int]:
        """Yield the places after the last LENGTHS[k] tokens of `end`, whose sum of hashes is
        `mixed`.
        """
        tail, before = end[-LENGTHS[k] :], self.before[k]
        place, visits = self.newest[k][(mixed ^ mixed >> 17) & self.size - 1], 0
        while place and visits < MAX_VISITS:
            visits += 1
            if self.tokens[place - len(tail) : place] == tail:
                yield place
            place = before[place]


SuffixPlace = tuple[SuffixPart, int]


class OutputIndex:
    """The latest outputs of one tenant scope, in two parts.

    Once the newer part is full, the older one is dropped. Repeated outputs have been entered again,
    so only outputs that were not used lately are lost.
    """

    def __init__(self) -> None:
        self.parts = [SuffixPart(SMALL)]  # the newer one first

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def add(self, text: "array[int]", num_context: int = 0) -> None:
        """Enter a text as `SuffixPart.add`; only the end of a long text is kept."""
        cut = max(0, len(text) - LARGE // 2)
        text, num_context = text[cut:], max(0, num_context - cut)
        if self.parts[0].room < len(text):
            size = min(LARGE, 2 * self.parts[0].size)
            while size < len(text) + 2:
                size *= 2
            self.parts = [SuffixPart(size), self.parts[0]]
        self.parts[0].add(text, num_context)

    def matches(self, text: "array[int]", most: int) -> tuple[int, list[SuffixPlace]]:
        """Return the length of the longest n-grams that match the text's end, and at most `most`
        of their places.
        """
        end, length, found = text[-LENGTHS[-1] :], 0, list[SuffixPlace]()
        backwards, others = end[::-1], iter(found)
        mixed = done = 0
        for k, n in enumerate(LENGTHS):
            if n > len(end):
                break
            mixed += sum(map(mul, backwards[done:n], MIX[done:n]))
            places, done = self.places(end, k, mixed), n
            first = next(places, None)
            if first is None:
                break
            length, found, others = n, [first], places
        return length, [*found, *islice(others, most - 1)]

    def places(self, end: "array[int]", k: int, mixed: int) -> Iterator[SuffixPlace]:
        return ((part, at) for part in self.parts for at in part.matches(end, k, mixed))

    def candidates(self, text: "array[int]", limit: int) -> Sequence[Candidate]:
        """Return what may follow the text, most likely first."""
        length, places = self.matches(text, MAX_MATCHES)
        return best(places, length, limit)


class FollowedOutput:
    """A request, and the match of its text's end, updated with each token."""

    __slots__ = ("is_learnt", "length", "match", "num_prompt", "scope", "size", "text")

    def __init__(
        self, text: "array[int]", num_prompt: int, scope: TenantScope, is_learnt: bool
    ) -> None:
        self.text, self.num_prompt, self.scope, self.is_learnt = text, num_prompt, scope, is_learnt
        self.size, self.length = len(text), 0
        self.match: SuffixPlace | None = None


class SuffixSource(DraftSource):
    """Proposes the tokens that followed the same tokens in earlier outputs of the same tenant
    scope. Tenants share the memory.
    """

    name = NAME
    is_estimating: ClassVar[bool] = True
    make_index: ClassVar[type[OutputIndex]] = OutputIndex

    def __init__(self) -> None:
        self.requests: dict[int, FollowedOutput] = {}
        self.scopes: OrderedDict[TenantScope, OutputIndex] = OrderedDict()  # the last used last
        # A scope does not see the statistics of other scopes.
        self.accuracy: dict[TenantScope, MatchAccuracy] = {}

    def begin(self, request: SourceRequest) -> None:
        """Propose for a request until `forget`, which enters its output if it `is_learnt`."""
        r = request
        self.requests[r.id] = FollowedOutput(r.known, r.num_prompt, r.scope, r.is_learnt)

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        """Return the expected number of accepted draft tokens, by the scope's texts so far."""
        followed = self.requests[id]
        scope = self.scopes.get(followed.scope)
        if scope is None:
            followed.size = len(text)
            return 0.0
        accuracy = self.accuracy[followed.scope]
        self.follow(followed, text, scope, accuracy)
        return accuracy.expected[followed.length] if followed.match is not None else 0.0

    def follow(
        self,
        followed: FollowedOutput,
        text: "array[int]",
        scope: OutputIndex,
        accuracy: MatchAccuracy,
    ) -> None:
        """Compare new tokens of the text with the tokens after the match."""
        while followed.size < len(text) and followed.match is not None:
            part, place = followed.match
            is_right = part.tokens[place] == text[followed.size]
            accuracy.add(followed.length, is_right)
            followed.length = min(followed.length + 1, MAX_LENGTH)
            followed.size += 1
            goes_on = is_right and part.tokens[place + 1] != END
            followed.match = (part, place + 1) if goes_on else None
        if followed.match is None:
            followed.length, places = scope.matches(text, 1)
            followed.match = places[0] if places else None
        followed.size = len(text)

    def candidates(self, items: Sequence[DraftRequest]) -> list[Sequence[Candidate]]:
        return [self.look_up(item.id, item.known, item.limit) for item in items]

    def look_up(self, id: int, text: "array[int]", limit: int) -> Sequence[Candidate]:
        scope = self.scopes.get(self.requests[id].scope)
        return [] if scope is None else scope.candidates(text, limit)

    def forget(self, id: int) -> None:
        followed = self.requests.pop(id, None)
        if followed is not None and followed.is_learnt:
            num_context = min(followed.num_prompt, LENGTHS[-1])
            text = followed.text[followed.num_prompt - num_context :]
            self.learn(text, followed.scope, num_context)

    def learn(self, text: "array[int]", scope: TenantScope, num_context: int = 0) -> None:
        """Enter an output after `num_context` tokens of its prompt, so that a repeated prompt finds
        its start. If all scopes together are too large, the least recently used are dropped.
        """
        if len(text) - num_context <= LENGTHS[0]:
            return
        if scope not in self.scopes:
            self.scopes[scope], self.accuracy[scope] = self.make_index(), MatchAccuracy()
        self.scopes.move_to_end(scope)
        self.scopes[scope].add(text, num_context)
        while self.num_bytes > MOST_BYTES and len(self.scopes) > 1:
            self.drop()

    def drop(self) -> None:
        """Drop the least recently used scope of the tenant with the most memory."""
        held = Counter[Hashable]()
        for (tenant, *_), scope in self.scopes.items():
            held[tenant] += scope.num_bytes
        [(most, _)] = held.most_common(1)
        dropped = next(scope for scope in self.scopes if scope[0] == most)
        del self.scopes[dropped], self.accuracy[dropped]

    @property
    def num_bytes(self) -> int:
        return sum(scope.num_bytes for scope in self.scopes.values())

    def reset(self) -> None:
        """Drop all earlier outputs."""
        self.scopes.clear()
        self.accuracy.clear()
        for followed in self.requests.values():
            followed.match, followed.length = None, 0


def best(places: Sequence[SuffixPlace], length: int, limit: int) -> list[Candidate]:
    """Return the most likely continuations of the places, in order of probability. It depends on
    the share of places that continue equally, and on the length of the match, which grows with each
    token.
    """
    draft_tokens: list[Candidate] = []
    heap: list[tuple[float, int, int, int, list[SuffixPlace], float, int]] = []

    def branch(places: Sequence[SuffixPlace], parent: int, value: float, depth: int) -> None:
        """Add the tokens that may follow a draft token; the newest places come first."""
        groups: dict[int, list[SuffixPlace]] = {}
        for part, place in places:
            if (token := part.tokens[place]) != END:
                groups.setdefault(token, []).append((part, place + 1))
        sure = SURE[min(length, MAX_LENGTH) + depth]
        for rank, (token, its) in enumerate(groups.items()):
            p = (len(its) + 0.5) / (len(places) + 1) * sure
            heappush(heap, (-value * p, parent, rank, token, its, p, depth))

    branch(places, ROOT, 1.0, 0)
    while heap and len(draft_tokens) < limit:
        value, parent, _, token, its, p, depth = heappop(heap)
        draft_tokens.append(Candidate(token, parent, p, NAME))
        branch(its, len(draft_tokens), -value, depth + 1)
    return draft_tokens
