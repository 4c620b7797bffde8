"""Streaming detokenization, and the search for stop strings."""

from bisect import bisect_left
from collections.abc import Collection, Sequence, Set
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
        self.tokenizer, self.min_tokens, self.skips_special = tokenizer, min_tokens, skips_special
        self.held = HeldText(stop, {s for s in stop if tokenizer.has_special(s)}, keeps_stop)
        # Tokens whose text has been taken, kept as left context; then those whose has not.
        self.context, self.unread = list(prompt[-CONTEXT:]), list[int]()
        self.before = self.decode(self.context)
        if self.before.endswith(UNFINISHED):  # inside a character: no usable context
            self.context, self.before = [], ""
        self.num_tokens = 0
        self.num_taken = 0  # characters of all tokens so far, the unread ones left out

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take a step's tokens, in order, up to the one that completes a stop string."""
        shown, ends, starts = "", list[int](), list[int]()
        for n, token in enumerate(token_ids, 1):
            starts.append(self.num_taken)
            self.num_tokens += 1
            text = self.read(token)
            if not self.held.stop:
                shown += text
                ends.append(len(shown))
                continue
            self.hold(text, self.left_out(token))
            if (stop := self.held.find_stop()) is not None:
                text = shown + self.held.until(stop)
                return Piece(text, n, stop, [*ends, len(text)], starts)
            shown += self.held.release()
            ends.append(len(shown))
        return Piece(shown, len(token_ids), None, ends, starts)

    def finish(self, end: int | None = None) -> tuple[str, str | None]:
        """The text that was held back, for after the last token, and a stop string that ends it.
        `end` is an end token that adds no text, but may complete a stop string.
        """
        self.hold(self.take(is_last=True))
        if end is not None and end in self.tokenizer.special_ids:
            self.num_tokens += 1
            self.hold("", self.tokenizer.id_to_token(end) or "")
        stop = self.held.find_stop()
        return self.held.until(stop), stop

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
        self.stop, self.special, self.keeps_stop = tuple(stop), special, keeps_stop
        self.plain = [s for s in self.stop if s not in special]
        self.text = ""
        self.shown = list[int]()  # places in the text of characters that are not hidden
        self.early = 0  # [0, early) of the first `min_tokens` tokens | rest

    def add(self, text: str, hidden: str, is_early: bool) -> None:
        self.shown += range(len(self.text), len(self.text) + len(text))
        self.text += text + (hidden if self.special else "")
        if is_early:
            self.early = len(self.text)

    def find_stop(self) -> str | None:
        """The stop string that begins first in the text; the shortest, if several do."""
        found = [(at, len(s), s) for s in self.stop if (at := self.place(s)) >= 0]
        return min(found)[2] if found else None

    def place(self, stop: str) -> int:
        """Where a stop string begins that ends after the first `min_tokens` tokens; -1: nowhere."""
        if stop in self.special:
            return self.text.find(stop, max(0, self.early - len(stop) + 1))
        early = bisect_left(self.shown, self.early)
        at = self.visible().find(stop, max(0, early - len(stop) + 1))
        return at if at < 0 else self.shown[at]

    def visible(self) -> str:
        if len(self.shown) == len(self.text):
            return self.text
        return "".join(self.text[at] for at in self.shown)

    def until(self, stop: str | None) -> str:
        """The visible text up to a stop string in it; None is all."""
        if stop is None:
            return self.visible()
        before = self.visible()[: bisect_left(self.shown, self.place(stop))]
        return before + stop if self.keeps_stop else before

    def release(self) -> str:
        """The visible text without the longest suffix that begins a stop string."""
        places = [*self.shown, len(self.text)]
        cut = places[begin_of_stop(self.visible(), self.plain)]
        cut = min(cut, begin_of_stop(self.text, self.special))
        num_shown = bisect_left(self.shown, cut)
        text = self.visible()[:num_shown]
        self.shown = [at - cut for at in self.shown[num_shown:]]
        self.text, self.early = self.text[cut:], max(0, self.early - cut)
        return text


def begin_of_stop(text: str, stop: Collection[str]) -> int:
    """Where the longest suffix of the text begins that begins a stop string."""
    longest = max(map(len, stop), default=1)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(s.startswith(text[-size:]) for s in stop):
            return len(text) - size
    return len(text)
