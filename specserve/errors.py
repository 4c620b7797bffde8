"""Everything specserve raises on purpose.

* SpecserveError
  - ConfigError        the operator's mistake; seen at start-up, never later
  - RequestError       the caller's mistake; becomes a 4xx, costs nobody else anything
    · PromptTooLong
  - Overloaded         nobody's mistake; becomes a 503 with Retry-After

A broken invariant of ours is an `assert` or a plain RuntimeError: it must stop the engine.
"""


class SpecserveError(Exception):
    """A message for a person: what is wrong, where, and what to do about it."""


class ConfigError(SpecserveError):
    pass


class RequestError(SpecserveError):
    status = 400


class PromptTooLong(RequestError):
    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens and at most {limit} fit: shorten it, or raise "
            "scheduler.max_model_len if the model allows more"
        )


class Overloaded(SpecserveError):
    status = 503
