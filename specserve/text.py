"""Streaming detokenization, and the search for stop strings."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from specserve.models.tokenizer import UNFINISHED, Tokenizer

CONTEXT = 6  # prompt tokens decoded along: some tokens' text depends on their left neighbor
MAX_UNREAD = 16  # tokens whose bytes make no character by then never will


class Piece(NamedTuple):
    """What some tokens added: text that can be sent, and the stop string that was completed."""

    text: str
    num_tokens: int  # of those given, up to the one that completed a stop string
    stop: str | None
    ends: list[int]  # characters of the text, up to and with each of those tokens'
    starts: list[int]  # characters of all tokens before each of those, held back or not


class StopStrings(NamedTuple):
    """Stop strings, arranged so that a token costs little however many there are."""

    known: frozenset[str]
    ordered: list[str]  # alphabetically
    lengths: list[int]  # that occur, the smallest first

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0

    def begins_one(self, text: str) -> bool:
        """Whether a stop string begins with the text."""
        place = bisect_left(self.ordered, text)
        return place < len(self.ordered) and self.ordered[place].startswith(text)


@lru_cache(maxsize=16)
def stop_strings(stop: tuple[str, ...]) -> StopStrings:
    """One arrangement for all choices of a request."""
    known = frozenset(stop)
    return StopStrings(known, sorted(known), sorted({*map(len, known)}))


class TextStream:
    """One request's text; returns no part of a stop string, and no incomplete character.

    Tokens are decoded one by one, however many come at once: the text of bytes may depend on how
    they are grouped, and it must not depend on how many guesses were accepted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        skips_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """A stop string counts if it ends in the text of a token after the first `min_tokens`."""
        self.tokenizer, self.min_tokens = tokenizer, min_tokens
        self.stop = stop_strings(tuple(stop))
        self.keeps_stop, self.skips_special = keeps_stop, skips_special
        # Tokens whose text has been taken, kept as left context; then those whose has not.
        self.context, self.unread = list(prompt[-CONTEXT:]), list[int]()
        self.before = self.decode(self.context)
        if self.before.endswith(UNFINISHED):  # inside a character: no usable context
            self.context, self.before = [], ""
        self.num_tokens = 0
        self.num_taken = 0  # characters of all tokens so far, the unread ones left out
        # May be the beginning of a stop string: [0, early) of the first `min_tokens` tokens | rest
        self.held, self.early = "", 0
        self.num_searched = 0  # characters of it; no stop string ends in them

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take a step's tokens, in order, up to the one that completes a stop string."""
        shown, ends, starts = "", list[int](), list[int]()
        for n, token in enumerate(token_ids, 1):
            starts.append(self.num_taken)
            self.num_tokens += 1
            text = self.read(token)
            if not self.stop.known:
                shown += text
                ends.append(len(shown))
                continue
            self.hold(text)
            if (found := self.find_stop()) is not None:
                text, self.held = shown + self.until(found), ""
                return Piece(text, n, found[1], [*ends, len(text)], starts)
            shown += self.release()
            ends.append(len(shown))
        return Piece(shown, len(token_ids), None, ends, starts)

    def finish(self) -> tuple[str, str | None]:
        """The text that was held back, for after the last token, and a stop string that ends it."""
        self.hold(self.take(is_last=True))
        found = self.find_stop()
        return self.until(found), found and found[1]

    def hold(self, text: str) -> None:
        """Add text of the latest token."""
        self.num_searched = len(self.held)
        self.held += text
        if self.num_tokens <= self.min_tokens:
            self.early = len(self.held)

    def read(self, token: int) -> str:
        """The text of unread tokens and this one, once it ends with a complete character."""
        if not self.unread and (text := self.tokenizer.whole_text(token)):
            self.num_taken += len(text)
            self.context, self.before = [token], text
            return text
        self.unread.append(token)
        return self.take(is_last=len(self.unread) > MAX_UNREAD)

    def take(self, is_last: bool) -> str:
        """The text of unread tokens, once it ends with a complete character."""
        after = self.decode(self.context + self.unread)
        if len(after) <= len(self.before) or (after.endswith(UNFINISHED) and not is_last):
            return ""
        text = after[len(self.before) :]
        self.num_taken += len(text)
        self.context, self.unread = self.unread, []
        self.before = self.decode(self.context)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, self.skips_special)

    def find_stop(self) -> tuple[int, str] | None:
        """The stop string that begins first in the held text, and where; the shortest, if several
        do. It ends in the latest token's text, and after the first `min_tokens` tokens.
        """
        first = max(self.num_searched, self.early) + 1
        found = [
            (start, text)
            for end in range(first, len(self.held) + 1)
            for length in self.stop.lengths
            if (start := end - length) >= 0 and (text := self.held[start:end]) in self.stop.known
        ]
        return min(found, default=None)

    def until(self, found: tuple[int, str] | None) -> str:
        """The held text up to a stop string in it; None is all."""
        if found is None:
            return self.held
        start, stop = found
        return self.held[: start + (len(stop) if self.keeps_stop else 0)]

    def release(self) -> str:
        """The held text without its longest suffix that begins a stop string."""
        for size in range(min(self.stop.longest - 1, len(self.held)), 0, -1):
            if self.stop.begins_one(self.held[-size:]):
                break
        else:
            size = 0
        cut = len(self.held) - size
        self.early = max(0, self.early - cut)
        text, self.held = self.held[:cut], self.held[cut:]
        return text
