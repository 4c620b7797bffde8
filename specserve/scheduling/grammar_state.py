"""A request's position in its grammar: which tokens may come next, for each node of its tree."""

from collections.abc import Callable, Sequence
from time import thread_time
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from specserve.text.grammars.compiled import in_words

if TYPE_CHECKING:  # the import is slow, and most engines do not need it
    from llguidance import LLMatcher

    from specserve.text.grammars.compiled import Compiled

T = TypeVar("T")

# Ambiguous grammars may take long steps within llguidance's limits, while all other requests wait.
# A request ends once its slow looks, above QUICK each, took PATIENCE in all. Draft tokens must not
# change a text, so their looks have a separate limit; after it no draft tokens are checked.
QUICK, PATIENCE = 0.02, 0.2  # seconds of this thread's CPU time
TOO_SLOW = "finding the next tokens takes too long. Use a simpler grammar"


class GrammarState:
    """Follows a request's text with `extend`; other methods return what may come after a path of
    draft tokens.

    One matcher serves all nodes: it moves between paths by consuming tokens and by rolling back. A
    matcher that hits a limit cannot roll back, so a new one is made from the text, if necessary
    with a new automaton. So draft tokens or other requests do not change what the text itself
    allows.
    """

    def __init__(self, compiled: "Compiled", end_ids: Sequence[int], vocab_size: int) -> None:
        """`end_ids` end a complete text."""
        self.compiled = compiled
        self.matcher, self.number = compiled.copy()
        self.end_ids, self.num_words = end_ids, -(-vocab_size // 32)
        self.known: list[int] = []
        self.path: list[int] = []  # tokens after the known text that the matcher has consumed
        self.error = ""  # the matcher's error after the known text
        self.patience = self.patience_with_drafts = PATIENCE

    def fork(self) -> "GrammarState":
        """Return a new state at the same position, without draft tokens."""
        other = GrammarState(self.compiled, self.end_ids, 32 * self.num_words)
        other.extend(self.known)
        return other

    @property
    def why(self) -> str:
        """Return the matcher's error, as an addition to a message."""
        return f" ({self.error})" if self.error else ""

    def extend(self, tokens: Sequence[int]) -> None:
        start = thread_time()
        if not self.matcher.is_error():  # otherwise the next look starts with another matcher
            self.move(tokens)
        self.known += tokens
        self.path.clear()
        self.note_time(thread_time() - start, is_draft=False, is_broken=False)

    def go(self, path: Sequence[int]) -> bool:
        """Move the matcher to a path's end; return False if the grammar does not allow the path."""
        return self.look(path, lambda matcher: True) or False

    def look(self, path: Sequence[int], find: "Callable[[LLMatcher], T]") -> T | None:
        """Return the result of a function after a path.

        None if the path is not allowed, if even a new matcher hits a limit, or if checking draft
        tokens has taken too long.
        """
        if (self.patience_with_drafts if path else self.patience) <= 0:
            if not path:
                self.error = TOO_SLOW
            return None
        is_new, error = False, ""
        for _ in range(3):  # this matcher, a shared new one, and one with its own automaton
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
        """Move the matcher; return whether it has reached the path's end."""
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
        """Move a new matcher to the end of the known text; return whether its automaton is new."""
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
        """Return the tokens of the only text that may come next, as the tokenizer encodes it. An
        end id follows if only the end may come.
        """
        tokens = self.look(path, lambda matcher: matcher.compute_ff_tokens()) or []
        if self.look([*path, *tokens], lambda matcher: matcher.is_stopped()):
            tokens = [*tokens, *self.end_ids[:1]]
        return tokens

    def mask(self, path: Sequence[int]) -> NDArray[np.int32]:
        """Return a mask [ceil(V / 32)]: bit id % 32 of word id // 32 is set if the id may come
        next. No bit is set if the grammar does not allow the path, or the matcher hits a limit.
        """
        bits = self.look(path, lambda matcher: matcher.compute_bitmask())
        if bits is None:
            return np.zeros(self.num_words, np.int32)
        return np.frombuffer(bytearray(bits), np.int32)[: self.num_words]  # there may be more


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
