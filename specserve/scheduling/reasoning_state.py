"""A request's position in its reasoning, which is forced to end at a budget of tokens."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from specserve.exchange.sampling_params import ReasoningBudget

NEAR = 2  # tokens of a prompt after the marker that begins reasoning, usually a line break


class ReasoningState(msgspec.Struct, frozen=True):
    """A pure function of a text's tokens, see `after`.

    is_inside    the next token is reasoning, or ends it
    num_tokens   tokens of reasoning so far, without markers
    num_closing  tokens of the forced closing so far
    num_opening  tokens of the opening that the text ends with
    """

    is_inside: bool = False
    num_tokens: int = 0
    num_closing: int = 0
    num_opening: int = 0

    def after(self, token: int, budget: ReasoningBudget) -> "ReasoningState":
        """Return the state after one more token."""
        if self.is_inside and self.num_tokens >= budget.max_tokens:
            # A grammar may delay the closing, for example to the end of a character.
            number = self.num_closing + (token == budget.closing[self.num_closing])
            is_closed = number == len(budget.closing)
            opening = self.opening_with(token, budget.opening)
            number = 0 if is_closed else number
            return ReasoningState(not is_closed, self.num_tokens, number, opening)
        if self.is_inside:
            is_closed = token == budget.closing[0]
            return ReasoningState(not is_closed, self.num_tokens + (not is_closed))
        number = self.opening_with(token, budget.opening)
        is_inside = number == len(budget.opening)
        return ReasoningState(is_inside, self.num_tokens, 0, 0 if is_inside else number)

    def opening_with(self, token: int, opening: Sequence[int]) -> int:
        """Return how many tokens of the opening the text ends with after a token.

        The tokens of an opening differ from each other.
        """
        if token == opening[self.num_opening]:
            return self.num_opening + 1
        return int(token == opening[0])

    def forced(self, budget: ReasoningBudget) -> int | None:
        """Return the only token that may come next; None if there is none."""
        if self.is_inside and self.num_tokens >= budget.max_tokens:
            return budget.closing[self.num_closing]
        return None

    def forbidden(self, budget: ReasoningBudget) -> int | None:
        """Return the token that would begin reasoning again after the budget; None without one."""
        is_next = not self.is_inside and self.num_opening == len(budget.opening) - 1
        return budget.opening[-1] if is_next and self.num_tokens >= budget.max_tokens else None

    def mask(self, budget: ReasoningBudget, vocab_size: int) -> NDArray[np.int32] | None:
        """Return the mask of the next token, as `GrammarState.mask`; None if all are allowed."""
        forced, forbidden = self.forced(budget), self.forbidden(budget)
        if forced is None and forbidden is None:
            return None
        words = np.full(-(-vocab_size // 32), 0 if forbidden is None else -1, np.int32)
        token = forced if forbidden is None else forbidden
        assert token is not None, "one of the two is set"
        words.view(np.uint32)[token // 32] ^= np.uint32(1 << token % 32)
        return words


def state_after_prompt(prompt: Sequence[int], budget: ReasoningBudget) -> ReasoningState:
    """Return the state after a prompt: inside reasoning if the prompt ends with its opening."""
    tail = [*prompt[-len(budget.opening) - NEAR :]]
    state = ReasoningState()
    free = msgspec.structs.replace(budget, max_tokens=len(tail) + 1)
    for token in tail:
        state = state.after(token, free)
    return ReasoningState(state.is_inside)
