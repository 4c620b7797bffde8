"""A step as it is known before its guesses are chosen."""

from collections.abc import Sequence

import msgspec


class Step(msgspec.Struct, frozen=True):
    """The rest of what a step does, and how long it may take."""

    rows: int  # roots and rows of prompts
    context: int  # tokens whose KV is read
    requests: int
    num_roots: int
    prompt_rows: int = 0
    spent: float = 0.0  # seconds of drafting, expected until it is done
    allowed: float = float("inf")  # seconds until the tightest target is missed

    def allowed_with_guesses(self, roots: float) -> float:
        """As `allowed`, where the roots alone take so long. A target that they miss binds no
        guesses: nothing but guesses can meet it.
        """
        return self.allowed if roots <= self.allowed else float("inf")


def worth_of_prompts(prompts: float, tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """The tokens that prompts' rows are worth: as many as the streams would get in their seconds.

    Without it, time would be cheap in a step that prompts make long, and guesses would make it
    longer, for tokens that the next steps bring faster.
    """
    rates = (t / (s - prompts) for t, s in zip(tokens, seconds, strict=True) if s > prompts)
    return prompts * max(rates, default=0.0)
