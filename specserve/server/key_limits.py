"""Limits of each API key: its requests at once, and its tokens in a minute."""

import math
from collections import defaultdict
from collections.abc import Callable
from time import monotonic

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.config import ServerConfig
from specserve.errors import RequestError
from specserve.server.live_completion import at_end, set_account, tenant_of
from specserve.server.refusal import RateLimited, error_response

MINUTE = 60.0
SOON = 1  # seconds after which to ask again for a place: nobody knows when one is free
ROUTES = frozenset(["/v1/chat/completions", "/v1/completions", "/v1/responses"])


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


class KeyLimits:
    """Gives each request that generates a place of its key, for as long as it lasts, and tells the
    limits in the headers of answers.
    """

    def __init__(self, app: ASGIApp, limits: ServerConfig, reject: Callable[[str], None]) -> None:
        self.app = app
        most = limits.max_requests_per_key, limits.max_tokens_per_minute_per_key
        self.accounts = defaultdict[int, Account](lambda: Account(*most, reject))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ROUTES or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        account = self.accounts[tenant_of(scope)]

        async def send_told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers)
            await send(message)

        try:
            account.enter()
        except RateLimited as e:
            await error_response(e)(scope, receive, send_told)
            return
        with at_end(scope, account.leave):
            set_account(scope, account)
            await self.app(scope, receive, send_told)
