"""Work on text, away from the event loop: a long prompt must not hold up anybody's stream."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """Threads for parsing and tokenizing, which let others run while they are outside Python."""

    def __init__(self, num_threads: int = 2) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, lambda: do(*args, **kwargs))
