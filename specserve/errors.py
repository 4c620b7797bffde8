"""The exceptions that specserve raises for users; all are subclasses of SpecserveError.

ConfigError    the operator's mistake; raised only at start-up
RequestError   the client's mistake; becomes a 4xx, affects no other request
PromptTooLong  a RequestError: the prompt exceeds the context length
Overloaded     no capacity, or shutting down; becomes a 503 with Retry-After
Sleeping       an Overloaded: the engine sleeps until it is woken up
EngineDied     the engine process exited; ends running requests, then the server
EndsEngines    an EngineDied: every engine process that resumed this request exited
DamagedModel   the model's logits are not finite; becomes a 500

A broken invariant raises AssertionError or RuntimeError, which stops the engine.
"""

import re


class SpecserveError(Exception):
    """An error with a message for users: what is wrong, where, and how to correct it."""


class ConfigError(SpecserveError):
    pass


class RequestError(SpecserveError, ValueError):
    """An invalid request. `param` is the path of the wrong field, or None. The class is a
    ValueError, too, because vLLM raises ValueError for a wrong parameter.
    """

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt exceeds the context length. Clients recognize the code, or OpenAI's first sentence
    in the message, and compact the conversation.
    """

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
    """A request that repeatedly ended the engine process. Clients must not retry it."""

    code = "engine_ended"


class DamagedModel(SpecserveError):
    status, code = 500, "logits_not_finite"


class Overloaded(SpecserveError):
    """The server has no capacity. `retry_after` is in seconds; None: the server shuts down."""

    status = 503

    def __init__(self, message: str, retry_after: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = "server_is_ending" if retry_after is None else "server_is_overloaded"


class Sleeping(Overloaded):
    def __init__(self, message: str = "the engine sleeps. Wake it up, and retry"):
        super().__init__(message, retry_after=5)
        self.code = "server_is_sleeping"


WEIGHTS = "weights"  # value of `blamed` for damaged weights instead of a wrong parameter


def of_failure(message: str, blamed: str) -> SpecserveError:
    """The error of a request that cannot continue. `blamed` is a parameter, WEIGHTS or ""."""
    if blamed == WEIGHTS:
        return DamagedModel(message)
    return RequestError(message, blamed) if blamed else Overloaded(message)


TYPE_WORDS = {
    **{"array": "an array", "bool": "true or false", "float": "a number", "int": "an integer"},
    **{"null": "null", "object": "an object", "str": "a string"},
}


def in_json_words(reason: str) -> str:
    """Replace the type names in an error of msgspec, such as `float | null`."""

    def words(types: re.Match[str]) -> str:
        return " or ".join(TYPE_WORDS.get(name, f"`{name}`") for name in types[1].split(" | "))

    return re.sub(r"`([\w| ]+)`", words, reason)
