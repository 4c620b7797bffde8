"""Everything specserve raises on purpose.

* SpecserveError
  - ConfigError        the operator's mistake; seen at start-up, never later
  - RequestError       the caller's mistake; becomes a 4xx, affects no other request
    · PromptTooLong
  - Overloaded         no capacity, or shutting down; becomes a 503 with Retry-After
  - EngineDied         the engine process ended; ends running answers, then the server
    · EndsEngines      one did each time that it went on with this request; ends that alone
  - DamagedModel       the model's logits are not finite; becomes a 500

A broken invariant is an `assert` or a plain RuntimeError: it must stop the engine.
"""


class SpecserveError(Exception):
    """An error with a message for users: what is wrong, where, and how to correct it."""


class ConfigError(SpecserveError):
    pass


class RequestError(SpecserveError, ValueError):
    """`param` is the path of the field that is wrong, if it is a field. A ValueError, too, as vLLM
    raises for a wrong parameter.
    """

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """Clients find it by its code, or by OpenAI's first sentence, and compact the conversation."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_model_len: int, is_at_least: bool = False) -> None:
        count = f"at least {num_tokens}" if is_at_least else num_tokens
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt "
            f"has {count} tokens, and the response needs at least 1. Shorten the prompt, or raise "
            "scheduler.max_model_len if the model allows more."
        )


class EngineDied(SpecserveError):
    status = 500


class EndsEngines(EngineDied):
    """Clients should not send it again: some libraries would, and end more engines."""

    code = "engine_ended"


class DamagedModel(SpecserveError):
    status, code = 500, "logits_not_finite"


class Overloaded(SpecserveError):
    """`retry_after` is in seconds; None if retrying at this process is useless: it is ending."""

    status = 503

    def __init__(self, message: str, retry_after: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = "server_is_ending" if retry_after is None else "server_is_overloaded"


WEIGHTS = "weights"  # of the model, in place of a parameter that is to blame


def of_failure(message: str, blamed: str) -> SpecserveError:
    """The error of a request that cannot continue, for a parameter that is to blame or for none."""
    if blamed == WEIGHTS:
        return DamagedModel(message)
    return RequestError(message, blamed) if blamed else Overloaded(message)
