"""Token ids to text as they come, and the end that a stop string makes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are not yet a character
CONTEXT = 6  # tokens decoded along: some tokens' text depends on their left neighbours


class Piece(NamedTuple):
    """What some tokens added: text that can be shown, and where a stop string ended it all."""

    text: str
    num_tokens: int  # of those given, how many count: fewer than all if one completed a stop
    is_stopped: bool


class TextStream:
    """One request's text. Nothing of a stop string and no half character ever leaves it."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.longest = max(map(len, self.stop), default=0)
        self.token_ids = list(prompt[-CONTEXT:])
        if self.decode(self.token_ids).endswith(UNFINISHED):
            self.token_ids = []  # a prompt that ends inside a character is no help in reading on
        self.read = len(self.token_ids)  # tokens whose text has been taken
        self.held = ""  # text that may be the beginning of a stop string

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take a step's tokens, in order, up to the one that completes a stop string."""
        if not self.stop:
            self.token_ids.extend(token_ids)
            return Piece(self.take(), len(token_ids), False)
        shown = ""
        for n, token in enumerate(token_ids, 1):
            self.token_ids.append(token)
            self.held += self.take()
            if (at := self.find_stop()) is not None:
                text, self.held = shown + self.held[:at], ""
                return Piece(text, n, True)
            shown += self.release()
        return Piece(shown, len(token_ids), False)

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        self.held += self.take(is_last=True)
        return self.held[: self.find_stop()]

    def take(self, is_last: bool = False) -> str:
        """The text of the tokens that have not been read, once it ends with a whole character."""
        start = max(0, self.read - CONTEXT)
        before = self.decode(self.token_ids[start : self.read])
        after = self.decode(self.token_ids[start:])
        if len(after) <= len(before) or (after.endswith(UNFINISHED) and not is_last):
            return ""
        self.read = len(self.token_ids)
        return after[len(before) :]

    def decode(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
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
