"""The time by which a request has to be answered: after it, the request ends with an error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import NamedTuple

from specserve.errors import RequestError
from specserve.server.refusal import DeadlineExceeded


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
