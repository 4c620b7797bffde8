"""What a step produced for one request, and sums over all steps."""

import msgspec


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


class Stats(msgspec.Struct):
    """Sums over all steps; seconds are wall time."""

    num_steps: int = 0
    num_rows: int = 0
    num_drafted: int = 0  # rows of guesses
    num_accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's forward
    step_seconds: float = 0.0
    drafter_errors: int = 0
    num_fallbacks: int = 0  # drafts that n-grams made, as the draft model had not caught up
    num_looked_up: int = 0  # prompt tokens looked up in the prefix cache
    num_cached: int = 0  # those that were found
    num_resets: int = 0  # of the prefix cache
