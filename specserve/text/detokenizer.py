"""Streaming detokenization, and the search for stop strings."""

from bisect import bisect_left
from collections.abc import Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from specserve.text.tokenizer import UNFINISHED, Tokenizer

CONTEXT = 6  # prompt tokens decoded along: some tokens' text depends on their left neighbor
MAX_UNREAD = 16  # tokens whose bytes make no character by then never will


class StreamedText(NamedTuple):
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

    def find(self, text: str, searched: int) -> tuple[int, str] | None:
        """The stop string that begins first, and where; the shortest, if several do. It ends after
        the first `searched` characters.
        """
        found = [
            (start, part)
            for end in range(searched + 1, len(text) + 1)
            for length in self.lengths
            if (start := end - length) >= 0 and (part := text[start:end]) in self.known
        ]
        return min(found, default=None)

    def begin(self, text: str) -> int:
        """Where the longest suffix of the text begins that begins a stop string."""
        longest = self.lengths[-1] if self.lengths else 1
        for size in range(min(longest - 1, len(text)), 0, -1):
            place = bisect_left(self.ordered, text[-size:])
            if place < len(self.ordered) and self.ordered[place].startswith(text[-size:]):
                return len(text) - size
        return len(text)


@lru_cache(maxsize=16)
def stop_strings(stop: frozenset[str]) -> StopStrings:
    """One arrangement for all choices of a request."""
    return StopStrings(stop, sorted(stop), sorted({*map(len, stop)}))


class TextStream:
    """One request's text; returns no part of a stop string, and no incomplete character.

    Tokens are decoded one by one, however many come at once: the text of bytes may depend on how
    they are grouped, and it must not depend on how many draft tokens were accepted.
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
        self.tokenizer, self.min_tokens, self.skips_special = tokenizer, min_tokens, skips_special
        self.held = HeldText(stop, {s for s in stop if tokenizer.has_special(s)}, keeps_stop)
        # Tokens whose text has been taken, kept as left context; then those whose has not.
        self.context, self.unread = list(prompt[-CONTEXT:]), list[int]()
        self.before = self.decode(self.context)
        if self.before.endswith(UNFINISHED):  # inside a character: no usable context
            self.context, self.before = [], ""
        self.num_tokens = 0
        self.num_taken = 0  # characters of all tokens so far, the unread ones left out

    def push(self, token_ids: Sequence[int]) -> StreamedText:
        """Take a step's tokens, in order, up to the one that completes a stop string."""
        shown, ends, starts = "", list[int](), list[int]()
        for n, token in enumerate(token_ids, 1):
            starts.append(self.num_taken)
            self.num_tokens += 1
            text = self.read(token)
            if not self.held.has_stop:
                shown += text
                ends.append(len(shown))
                continue
            self.hold(text, self.left_out(token))
            if (found := self.held.find_stop()) is not None:
                text = shown + self.held.until(found)
                return StreamedText(text, n, found[1], [*ends, len(text)], starts)
            shown += self.held.release()
            ends.append(len(shown))
        return StreamedText(shown, len(token_ids), None, ends, starts)

    def finish(self, end: int | None = None) -> tuple[str, str | None]:
        """The text that was held back, for after the last token, and a stop string that ends it.
        `end` is an end token that adds no text, but may complete a stop string.
        """
        self.hold(self.take(is_last=True))
        found = self.held.find_stop()
        if found is None and end is not None and end in self.tokenizer.special_ids:
            self.num_tokens += 1
            self.hold("", self.tokenizer.id_to_token(end) or "")
            found = self.held.find_stop()
        return self.held.until(found), found and found[1]

    def hold(self, text: str, hidden: str = "") -> None:
        """Add text of the latest token, shown or hidden."""
        self.held.add(text, hidden, is_early=self.num_tokens <= self.min_tokens)

    def left_out(self, token: int) -> str:
        """A special token as a stop string has it, if the text does not."""
        if not self.skips_special or token not in self.tokenizer.skipped_ids:
            return ""
        return self.tokenizer.id_to_token(token) or ""

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


class HeldText:
    """Text that may be the beginning of a stop string.

    Special tokens that the output leaves out are hidden parts of it. Only stop strings that contain
    a special token see these parts.
    """

    def __init__(self, stop: Sequence[str], special: Set[str], keeps_stop: bool = False) -> None:
        self.has_stop, self.keeps_stop = bool(stop), keeps_stop
        self.plain = stop_strings(frozenset(stop) - special)
        self.special = stop_strings(frozenset(special))
        self.text = ""
        self.shown = list[int]()  # places in the text of characters that are not hidden
        self.searched = 0  # no stop string ends in [0, searched), the first `min_tokens` tokens

    def add(self, text: str, hidden: str, is_early: bool) -> None:
        """Add text of one token; no stop string ends in it if it is early."""
        before = len(self.text)
        self.shown += range(before, before + len(text))
        self.text += text + (hidden if self.special.known else "")
        self.searched = len(self.text) if is_early else before

    def find_stop(self) -> tuple[int, str] | None:
        """The stop string that begins first, of those that end in the latest token's text; the
        shortest, if several do. Before it: where it begins in the held text.
        """
        plain = self.plain.find(self.visible(), bisect_left(self.shown, self.searched))
        special = self.special.find(self.text, self.searched)
        each = [] if plain is None else [(self.shown[plain[0]], plain[1])]
        return min([*each, *([] if special is None else [special])], default=None)

    def visible(self) -> str:
        if len(self.shown) == len(self.text):
            return self.text
        return "".join(self.text[at] for at in self.shown)

    def until(self, found: tuple[int, str] | None) -> str:
        """The visible text up to a stop string in it; None is all."""
        if found is None:
            return self.visible()
        place, stop = found
        before = self.visible()[: bisect_left(self.shown, place)]
        return before + stop if self.keeps_stop else before

    def release(self) -> str:
        """The visible text without the longest suffix that begins a stop string."""
        places = [*self.shown, len(self.text)]
        cut = min(places[self.plain.begin(self.visible())], self.special.begin(self.text))
        num_shown = bisect_left(self.shown, cut)
        text = self.visible()[:num_shown]
        self.shown = [at - cut for at in self.shown[num_shown:]]
        self.text = self.text[cut:]
        return text
