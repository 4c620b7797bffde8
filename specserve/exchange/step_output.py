"""What a step produced for one request, and sums over all steps."""

import msgspec


class SourceCounts(msgspec.Struct, frozen=True):
    """A source's guesses in one or more steps; one of several sources counts for each of them."""

    proposed: int
    verified: int
    accepted: int


class Tree(msgspec.Struct, frozen=True):
    """The verified guesses of a step: `tokens[k - 1]` is node k, below node `parents[k - 1]` < k.

    Node 0 is the root, the last token before the step.
    """

    tokens: list[int]
    parents: list[int]
    sources: list[int]  # of each guess: bit i is set where `Engine.known_sources[i]` made it
    accepted: list[int]  # nodes, from the root down


class StepDetails(msgspec.Struct, frozen=True):
    """Where the tokens of one step came from."""

    tokens: list[int]
    ends: list[int]  # characters of the choice's text, up to and with each token's
    sources: list[int]  # of each token, as in `Tree.sources`; 0 is the target alone
    tree: Tree  # of the guesses that the step verified


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the model says of a token and of the likeliest ones in its place, before any parameter
    changes its logits: natural logarithms of probabilities.
    """

    logprob: float
    rank: int  # 1 for the likeliest
    ids: list[int]  # those of the ranks 1, 2, ..., as many as were asked for
    top: list[float]  # and what it says of them


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced for one request, as plain data that is sent between processes."""

    id: int
    tokens: list[int]
    finish_reason: str | None  # "stop" | "length" where these tokens end it, "error" at a failure
    is_verified: bool  # the step had a root, so that it counts for the acceptance length
    num_drafted: int
    num_accepted: int
    admitted_at: float  # seconds, perf_counter: when it left the queue
    num_cached: int = 0  # tokens of the prompt that were found in the prefix cache
    is_fallback: bool = False  # drafted by n-grams, as the draft model had not caught up
    failure: str = ""  # why the request cannot continue; empty if it can
    blamed: str = ""  # the parameter that it is due to; empty: to none
    sources: dict[str, SourceCounts] = {}  # all in the engine's order, if any was asked
    tree: Tree | None = None  # only where the request asked for details and had guesses
    logprobs: list[TokenLogprobs] = []  # of `tokens`, where the request asked for them
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's next tokens, from its second on

    @property
    def is_of_prompt(self) -> bool:
        """Whether it only tells a part of the prompt's logprobs: its first token is yet to come."""
        return not self.tokens and self.finish_reason is None


class SourceStats(msgspec.Struct):
    """Sums over all steps for one source of guesses; one of several sources counts for each."""

    proposed: int = 0
    verified: int = 0
    accepted: list[int] = []  # by depth: of children of the root first
    seconds: float = 0.0  # wall time that it took
    saved_seconds: float = 0.0  # estimated: what its accepted guesses saved, less what it took
    errors: int = 0  # exceptions of a user's drafter


class Stats(msgspec.Struct):
    """Sums over all steps; seconds are wall time."""

    num_steps: int = 0
    num_rows: int = 0
    num_roots: int = 0  # rows of the last tokens of requests
    num_drafted: int = 0  # rows of guesses
    num_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's forward
    step_seconds: float = 0.0
    num_fallbacks: int = 0  # drafts that n-grams made, as the draft model had not caught up
    num_looked_up: int = 0  # prompt tokens looked up in the prefix cache
    num_cached: int = 0  # those that were found
    num_resets: int = 0  # of the prefix cache
    sources: dict[str, SourceStats] = {}  # of guesses, by name

    @property
    def drafter_errors(self) -> int:
        return sum(sums.errors for sums in self.sources.values())
