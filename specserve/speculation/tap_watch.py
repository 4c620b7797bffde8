"""Whether a draft head reads what it was trained on: wrong taps show in nothing but bad guesses."""

import logging
from collections.abc import Iterable, Sequence

TOKENS = 200
LEAST = 0.2  # of its likeliest tokens that are right: the share of heads that fit is 0.4 to 0.8

log = logging.getLogger("specserve")


class TapWatch:
    """Compares a head's likeliest next token with the target's, for the first tokens."""

    def __init__(self, words: str) -> None:
        """`words` say what the head reads."""
        self.words = words
        self.expected: dict[int, int] = {}  # by request
        self.num_tokens = self.num_right = 0

    @property
    def is_over(self) -> bool:
        return self.num_tokens >= TOKENS

    def expect(self, ids: Iterable[int], tokens: Iterable[int]) -> None:
        """Of the step to come."""
        self.expected = dict(zip(ids, tokens, strict=True))

    def see(self, id: int, token: int) -> None:
        """The target's token; what was expected is compared with it."""
        if id in self.expected:
            self.compare([self.expected.pop(id)], [token])

    def compare(self, expected: Iterable[int], tokens: Iterable[int]) -> None:
        """Count tokens that the target has said; after the last a warning, if there is need."""
        for one, token in zip(expected, tokens, strict=True):
            if self.is_over:
                return
            self.num_tokens += 1
            self.num_right += one == token
            if self.is_over and self.num_right < LEAST * TOKENS:
                self.warn()

    def warn(self) -> None:
        log.warning(
            "the draft head's likeliest next token was right for %d of %d tokens, where heads that "
            "fit are right for 80 to 160. It reads %s: check that it was trained for this target "
            "and on these layers (an EAGLE-3 head's are eagle_aux_hidden_state_layer_ids in its "
            "config.json), and on such texts",
            *(self.num_right, TOKENS, self.words),
        )


def tap_words(taps: Sequence[int], num_layers: int) -> str:
    """What of a target with so many layers is read."""
    if [*taps] == [num_layers]:
        return "what comes out of the target's last layer"
    return f"what comes into the target's layers {', '.join(map(str, taps))}"
