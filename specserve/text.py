"""Streaming detokenization, and the search for stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from specserve.models.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not yet a character
CONTEXT = 6  # prompt tokens decoded along: some tokens' text depends on their left neighbor
MAX_UNREAD = 16  # tokens whose bytes make no character by then never will


class Piece(NamedTuple):
    """What some tokens added: text that can be sent, and whether a stop string was completed."""

    text: str
    num_tokens: int  # of those given, up to the one that completed a stop string
    is_stopped: bool
    ends: list[int]  # characters of the text, up to and with each of those tokens'


class TextStream:
    """One request's text; returns no part of a stop string, and no incomplete character.

    Tokens are decoded one by one, however many come at once: the text of bytes may depend on how
    they are grouped, and it must not depend on how many guesses were accepted.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.longest = max(map(len, self.stop), default=0)
        # Tokens whose text has been taken, kept as left context; then those whose has not.
        self.context, self.unread = list(prompt[-CONTEXT:]), list[int]()
        self.before = self.tokenizer.decode(self.context)
        if self.before.endswith(UNFINISHED):  # inside a character: no usable context
            self.context, self.before = [], ""
        self.held = ""  # text that may be the beginning of a stop string

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take a step's tokens, in order, up to the one that completes a stop string."""
        shown, ends = "", list[int]()
        for n, token in enumerate(token_ids, 1):
            self.unread.append(token)
            self.held += self.take(is_last=len(self.unread) > MAX_UNREAD)
            if (at := self.find_stop()) is not None:
                text, self.held = shown + self.held[:at], ""
                return Piece(text, n, True, [*ends, len(text)])
            shown += self.release()
            ends.append(len(shown))
        return Piece(shown, len(token_ids), False, ends)

    def finish(self) -> str:
        """The text that was held back, for after the last token."""
        self.held += self.take(is_last=True)
        return self.held[: self.find_stop()]

    def take(self, is_last: bool) -> str:
        """The text of unread tokens, once it ends with a complete character."""
        after = self.tokenizer.decode(self.context + self.unread)
        if len(after) <= len(self.before) or (after.endswith(UNFINISHED) and not is_last):
            return ""
        text = after[len(self.before) :]
        self.context, self.unread = self.unread, []
        self.before = self.tokenizer.decode(self.context)
        return text

    def find_stop(self) -> int | None:
        """Where the first stop string in the held text begins."""
        found = [at for s in self.stop if (at := self.held.find(s)) >= 0]
        return min(found, default=None)

    def release(self) -> str:
        """The held text without its longest suffix that begins a stop string."""
        for size in range(min(self.longest - 1, len(self.held)), 0, -1):
            if any(s.startswith(self.held[-size:]) for s in self.stop):
                break
        else:
            size = 0
        cut = len(self.held) - size
        text, self.held = self.held[:cut], self.held[cut:]
        return text
