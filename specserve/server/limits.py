"""Limits of time and tokens: the deadline of a request, and what an API key may use."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic, perf_counter
from typing import NamedTuple

from specserve.errors import RequestError
from specserve.server.refusal import DeadlineExceeded, RateLimited

MINUTE = 60.0
SOON = 1  # seconds after which to ask again for a place: nobody knows when one is free


class Deadline(NamedTuple):
    """Of a request that asks for one, or that the server gives one."""

    at: float  # seconds, perf_counter
    timeout_ms: float

    @classmethod
    def after(cls, arrived_at: float, asked: float | None, most: float | None) -> "Deadline":
        """The deadline that a request asks for, or the server's, one of which there is;
        RequestError beyond the server's. Both are milliseconds.
        """
        if asked is not None and most is not None and asked > most:
            raise RequestError(
                f"timeout_ms = {asked:g}: this server allows {most:g} at most: ask for that or "
                "less, or leave it out; its operator can raise server.timeout_ms",
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
            f"the answer was not complete after {self.timeout_ms:g} ms, the deadline of this "
            "request (timeout_ms, or server.timeout_ms)"
        )

    def call(self, end: Callable[[DeadlineExceeded], None]) -> asyncio.TimerHandle:
        """Have a function called with the error when the time has come."""
        left = max(0.0, self.seconds_left)
        return asyncio.get_running_loop().call_later(left, end, self.error)

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Cancel the block when the time has come, and raise the error."""
        try:
            async with asyncio.timeout(self.seconds_left) as timeout:
                yield
        except TimeoutError as e:
            if timeout.expired():
                raise self.error from e
            raise


class Account:
    """What one API key uses.

    The tokens are a bucket that holds a minute's and fills up evenly. Answers that run take theirs
    even if none is left; requests wait until there are enough for their prompts.
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
        self.level, self.filled_at = float(max_tokens or 0), clock()  # tokens left, and when

    def enter(self) -> None:
        """Take a place for a request, which has to be given back by `leave`."""
        if self.max_requests is not None and self.num_running >= self.max_requests:
            self.reject("key_requests")
            raise RateLimited(
                f"{self.num_running} requests of this API key run or wait, and "
                f"{self.max_requests} may (server.max_requests_per_key): ask when one has ended",
                "requests",
                SOON,
            )
        self.num_running += 1

    def leave(self) -> None:
        self.num_running -= 1

    def admit(self, num_tokens: int, field: str) -> None:
        """Take the tokens of a request's prompts; errors name `field`."""
        if self.max_tokens is None:
            return
        limit = "server.max_tokens_per_minute_per_key"
        if num_tokens > self.max_tokens:
            raise RequestError(
                f"{field}: {num_tokens} tokens, and an API key has {self.max_tokens} a minute "
                f"({limit}): send fewer at once",
                field,
            )
        self.fill()
        if self.level < num_tokens:
            self.reject("key_tokens")
            seconds = self.seconds_until(num_tokens)
            raise RateLimited(
                f"this API key has {self.num_left} of {self.max_tokens} tokens a minute left "
                f"({limit}), and the prompt has {num_tokens}: ask in {seconds} s",
                "tokens",
                seconds,
            )
        self.take(num_tokens)

    def take(self, num_tokens: int) -> None:
        """Take tokens of an answer that runs, whether there are any left or not."""
        self.fill()
        self.level -= num_tokens

    def fill(self) -> None:
        if self.max_tokens is not None:
            now = self.clock()
            more = (now - self.filled_at) * self.max_tokens / MINUTE
            self.level, self.filled_at = min(float(self.max_tokens), self.level + more), now

    def seconds_until(self, num_tokens: float) -> int:
        """Whole seconds until so many tokens are left."""
        assert self.max_tokens is not None, "there is no limit to wait for"
        return max(0, math.ceil((num_tokens - self.level) * MINUTE / self.max_tokens))

    @property
    def num_left(self) -> int:
        return max(0, math.floor(self.level))

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's, of the limits that there are."""
        told = dict[str, int | str]()
        if self.max_requests is not None:
            left = max(0, self.max_requests - self.num_running)
            told |= {"limit-requests": self.max_requests, "remaining-requests": left}
            told["reset-requests"] = f"{SOON if self.num_running else 0}s"
        if self.max_tokens is not None:
            self.fill()
            told |= {"limit-tokens": self.max_tokens, "remaining-tokens": self.num_left}
            told["reset-tokens"] = f"{self.seconds_until(self.max_tokens)}s"
        return {f"x-ratelimit-{name}": str(value) for name, value in told.items()}
