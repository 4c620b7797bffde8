"""Limits of time and tokens: deadlines of requests, and limits per API key."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic, perf_counter
from typing import NamedTuple

from specserve.errors import RequestError
from specserve.server.refusal import DeadlineExceeded, RateLimited

MINUTE = 60.0
SOON = 1  # seconds of Retry-After if a key runs too many requests; the real time is unknown


class Deadline(NamedTuple):
    """The deadline of a request."""

    at: float  # seconds, perf_counter
    timeout_ms: float

    @classmethod
    def after(cls, arrived_at: float, asked: float | None, most: float | None) -> "Deadline":
        """Return the deadline of the request (`asked`), else of the server (`most`).

        Both are in milliseconds, and one is set. RequestError if `asked` exceeds `most`.
        """
        if asked is not None and most is not None and asked > most:
            raise RequestError(
                f"timeout_ms = {asked:g} is more than the maximum of this server, {most:g} "
                "(server.timeout_ms). Reduce it, or omit it",
                "timeout_ms",
            )
        timeout_ms = most if asked is None else asked
        assert timeout_ms is not None, "there is no deadline"
        return cls(arrived_at + timeout_ms / 1e3, timeout_ms)

    @property
    def seconds_left(self) -> float:
        return self.at - perf_counter()

    @property
    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the response was not complete after {self.timeout_ms:g} ms, the deadline of the "
            "request (timeout_ms, or server.timeout_ms)"
        )

    def call(self, end: Callable[[DeadlineExceeded], None]) -> asyncio.TimerHandle:
        """Call `end` with the error at the deadline."""
        left = max(0.0, self.seconds_left)
        return asyncio.get_running_loop().call_later(left, end, self.error)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline, and raise the error."""
        try:
            async with asyncio.timeout(self.seconds_left) as timeout:
                yield
        except TimeoutError as e:
            if timeout.expired():
                raise self.error from e
            raise


class Account:
    """The use of one API key.

    A bucket has room for the tokens of a minute, and fills at a constant rate. Running responses
    take tokens even if none are left. New requests are refused until their prompts' tokens are
    available.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        reject: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.max_requests, self.max_tokens, self.reject = max_requests, max_tokens, reject
        self.clock = clock
        self.num_running = 0
        self.level, self.filled_at = float(max_tokens or 0), clock()  # tokens left, at a time

    def enter(self) -> None:
        """Count a running request, until `leave`. RateLimited if too many run."""
        if self.max_requests is not None and self.num_running >= self.max_requests:
            self.reject("key_requests")
            raise RateLimited(
                f"this API key has {self.num_running} running or waiting requests. At most "
                f"{self.max_requests} are allowed (server.max_requests_per_key), so retry later",
                "requests",
                SOON,
            )
        self.num_running += 1

    def leave(self) -> None:
        self.num_running -= 1

    def admit(self, num_tokens: int, field: str) -> None:
        """Take the tokens of a request's prompts. Errors name `field`."""
        if self.max_tokens is None:
            return
        limit = "server.max_tokens_per_minute_per_key"
        if num_tokens > self.max_tokens:
            raise RequestError(
                f"{field}: {num_tokens} tokens are more than the {self.max_tokens} per minute of "
                f"an API key ({limit}). Send fewer at once",
                field,
            )
        self.fill()
        if self.level < num_tokens:
            self.reject("key_tokens")
            seconds = self.seconds_until(num_tokens)
            raise RateLimited(
                f"this API key has {self.num_left} of {self.max_tokens} tokens per minute left "
                f"({limit}), and the prompt has {num_tokens}. Retry in {seconds} s",
                "tokens",
                seconds,
            )
        self.take(num_tokens)

    def take(self, num_tokens: int) -> None:
        """Take tokens of a running response, even if none are left."""
        self.fill()
        self.level -= num_tokens

    def fill(self) -> None:
        if self.max_tokens is not None:
            now = self.clock()
            more = (now - self.filled_at) * self.max_tokens / MINUTE
            self.level, self.filled_at = min(float(self.max_tokens), self.level + more), now

    def seconds_until(self, num_tokens: float) -> int:
        """Return the whole seconds until the bucket has `num_tokens`."""
        assert self.max_tokens is not None, "there is no limit to wait for"
        return max(0, math.ceil((num_tokens - self.level) * MINUTE / self.max_tokens))

    @property
    def num_left(self) -> int:
        return max(0, math.floor(self.level))

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit headers for the limits that are set."""
        values = dict[str, int | str]()
        if self.max_requests is not None:
            left = max(0, self.max_requests - self.num_running)
            values |= {"limit-requests": self.max_requests, "remaining-requests": left}
            values["reset-requests"] = f"{SOON if self.num_running else 0}s"
        if self.max_tokens is not None:
            self.fill()
            values |= {"limit-tokens": self.max_tokens, "remaining-tokens": self.num_left}
            values["reset-tokens"] = f"{self.seconds_until(self.max_tokens)}s"
        return {f"x-ratelimit-{name}": str(value) for name, value in values.items()}
