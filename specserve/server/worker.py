"""Work on text, away from the event loop: a long prompt must not hold up anybody's stream."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, get_ident
from time import perf_counter
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    def __init__(self, num_threads: int = 2) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, lambda: do(*args, **kwargs))

    async def run_within(self, seconds: float, do: Callable[[], T]) -> T:
        """TimeoutError after so many seconds of running; a wait for a free thread is not one."""
        job = Job(do)
        future = asyncio.get_running_loop().run_in_executor(self.pool, job.run)
        while not future.done():
            await asyncio.wait((future,), timeout=seconds)
            if not future.done() and job.seconds() >= seconds:
                job.stop()
        return future.result()


class Job(Generic[T]):
    """A call that another thread may end, as long as it runs Python."""

    def __init__(self, do: Callable[[], T]) -> None:
        self.do = do
        self.lock = Lock()  # nobody may be stopped who has moved on to another job
        self.thread: int | None = None
        self.started_at: float | None = None

    def run(self) -> T:
        self.started_at = perf_counter()
        self.thread = get_ident()
        try:
            return self.do()
        finally:
            with self.lock:
                self.thread = None
            for _ in range(
                2
            ):  # the interpreter looks at loops: a stop is raised here at the latest
                pass

    def seconds(self) -> float:
        return 0.0 if self.started_at is None else perf_counter() - self.started_at

    def stop(self) -> None:
        """Raise TimeoutError inside the call."""
        with self.lock:
            if self.thread is not None:
                error = ctypes.py_object(TimeoutError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), error)
