"""Token ids to text as they come, and the end that a stop string makes."""

from collections.abc import Sequence
from typing import NamedTuple

from specserve.models.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not yet a character
CONTEXT = 6  # tokens of the prompt decoded along: some tokens' text depends on their left neighbour
MAX_UNREAD = 16  # bytes that still make no character after so many tokens never will


class Piece(NamedTuple):
    """What some tokens added: text that can be shown, and where a stop string ended it all."""

    text: str
    num_tokens: int  # of those given, how many count: fewer than all if one completed a stop
    is_stopped: bool


class TextStream:
    """One request's text. Nothing of a stop string and no half character ever leaves it.

    Tokens are read one by one, however many come at once: what some bytes decode to may depend on
    how they are grouped, and text must not depend on how many guesses were right.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.longest = max(map(len, self.stop), default=0)
        # Tokens whose text has been taken, as a left neighbour; then those whose has not.
        self.context, self.unread = list(prompt[-CONTEXT:]), list[int]()
        self.before = self.tokenizer.decode(self.context)
        if self.before.endswith(UNFINISHED):  # a prompt that ends inside a character is no help
            self.context, self.before = [], ""
        self.held = ""  # text that may be the beginning of a stop string

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take a step's tokens, in order, up to the one that completes a stop string."""
        shown = ""
        for n, token in enumerate(token_ids, 1):
            self.unread.append(token)
            self.held += self.take(is_last=len(self.unread) > MAX_UNREAD)
            if (at := self.find_stop()) is not None:
                text, self.held = shown + self.held[:at], ""
                return Piece(text, n, True)
            shown += self.release()
        return Piece(shown, len(token_ids), False)

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        self.held += self.take(is_last=True)
        return self.held[: self.find_stop()]

    def take(self, is_last: bool) -> str:
        """The text of the tokens that have not been read, once it ends with a whole character."""
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
        """The held text but for its longest end that a stop string begins with."""
        for size in range(min(self.longest - 1, len(self.held)), 0, -1):
            if any(s.startswith(self.held[-size:]) for s in self.stop):
                break
        else:
            size = 0
        cut = len(self.held) - size
        text, self.held = self.held[:cut], self.held[cut:]
        return text
