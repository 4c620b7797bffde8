"""Where a request's text stands in its grammar: what may come next, node by node of its tree."""

from collections.abc import Callable, Sequence
from time import thread_time
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from specserve.text.grammars.compiled import in_words

if TYPE_CHECKING:  # its import takes time, and most engines need none
    from llguidance import LLMatcher

    from specserve.text.grammars.compiled import Compiled

T = TypeVar("T")

# Ambiguous grammars may take long steps within llguidance's limits, while all other requests wait:
# one that was not quick for so many seconds in all ends its request. As guesses must not change a
# text, what looking at them takes is counted by itself: then no guesses are looked at any more.
QUICK, PATIENCE = 0.02, 0.2  # seconds of this thread
TOO_SLOW = "it takes too long to find what may come next"


class GrammarState:
    """Follows a request's text: `extend` by its new tokens; other methods look at what may come
    after a path of guesses.

    One matcher serves all nodes: it goes from path to path by consuming tokens and undoing them. A
    matcher that runs into a limit cannot be undone any more: then it is made anew from the text, by
    an automaton of its own in the end, as what guesses or others have made it run into must not
    change what the text itself is allowed.
    """

    def __init__(self, compiled: "Compiled", end_ids: Sequence[int], vocab_size: int) -> None:
        """`end_ids` end a complete text."""
        self.compiled = compiled
        self.matcher, self.number = compiled.copy()
        self.end_ids, self.num_words = end_ids, -(-vocab_size // 32)
        self.known: list[int] = []
        self.path: list[int] = []  # beyond the known text, as far as the matcher has gone
        self.error = ""  # what the matcher ran into after the known text
        self.patience = self.patience_with_drafts = PATIENCE

    def fork(self) -> "GrammarState":
        """Another one at the same place, after no guess."""
        other = GrammarState(self.compiled, self.end_ids, 32 * self.num_words)
        other.extend(self.known)
        return other

    @property
    def why(self) -> str:
        """What the matcher ran into, as an addition to a message."""
        return f" ({self.error})" if self.error else ""

    def extend(self, tokens: Sequence[int]) -> None:
        start = thread_time()
        if not self.matcher.is_error():  # else the next look begins with another one
            self.move(tokens)
        self.known += tokens
        self.path.clear()
        self.note_time(thread_time() - start, is_draft=False, is_broken=False)

    def go(self, path: Sequence[int]) -> bool:
        """Take the matcher to a path's end; false if the grammar does not allow the path."""
        return self.look(path, lambda matcher: True) or False

    def look(self, path: Sequence[int], find: "Callable[[LLMatcher], T]") -> T | None:
        """What a function finds after a path; None where the path is not allowed, or where even a
        new matcher runs into a limit, or where looking at guesses has taken too long.
        """
        if (self.patience_with_drafts if path else self.patience) <= 0:
            if not path:
                self.error = TOO_SLOW
            return None
        is_new, error = False, ""
        for _ in range(3):  # by this matcher, by one that others have made anew, by one of its own
            start = thread_time()
            if self.matcher.is_error():
                is_new = self.renew()
            found = find(self.matcher) if self.move(path) else None
            error = in_words(self.matcher.get_error()) if self.matcher.is_error() else ""
            self.note_time(thread_time() - start, is_draft=bool(path), is_broken=bool(error))
            if not error:
                return found
            if is_new:
                break
        if not path:
            self.error = error
        return None

    def note_time(self, seconds: float, is_draft: bool, is_broken: bool) -> None:
        if is_draft and (is_broken or seconds > QUICK):
            self.patience_with_drafts -= seconds
        elif seconds > QUICK and not is_broken:
            self.patience -= seconds

    def move(self, path: Sequence[int]) -> bool:
        """Whether the matcher has got to the path's end."""
        at = self.path
        if at != path:
            same = num_equal(at, path)
            if len(at) > same:
                self.matcher.rollback(len(at) - same)
                del at[same:]
            rest = [*path[same:]]
            at += rest[: self.matcher.try_consume_tokens(rest)]
        return len(at) == len(path)

    def renew(self) -> bool:
        """Take another matcher to the end of the known text; whether its automaton is new."""
        is_new = self.compiled.renew(self.number)
        self.matcher, self.number = self.compiled.copy()
        self.path = []
        self.matcher.try_consume_tokens(self.known)
        return is_new

    def allows(self, path: Sequence[int], token: int) -> bool:
        if token in self.end_ids:
            return self.look(path, lambda matcher: matcher.is_accepting()) or False
        return self.go([*path, token])

    def forced(self, path: Sequence[int]) -> list[int]:
        """The tokens of the only text that may come next, as the tokenizer would write it, and the
        end if that must come.
        """
        tokens = self.look(path, lambda matcher: matcher.compute_ff_tokens()) or []
        if self.look([*path, *tokens], lambda matcher: matcher.is_stopped()):
            tokens = [*tokens, *self.end_ids[:1]]
        return tokens

    def mask(self, path: Sequence[int]) -> NDArray[np.int32]:
        """[ceil(V / 32)]: bit id % 32 of word id // 32 is set where the id may come next. No bit is
        set where the grammar does not allow the path, or a limit is in the way.
        """
        bits = self.look(path, lambda matcher: matcher.compute_bitmask())
        if bits is None:
            return np.zeros(self.num_words, np.int32)
        return np.frombuffer(bytearray(bits), np.int32)[: self.num_words]  # there may be more


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
