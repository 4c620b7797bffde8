"""Fair queues: several owners share a few places, and long jobs of one do not delay others."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from time import perf_counter
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_IDLE = 1024  # owners without a job whose used seconds are stored

# The API key of a request or, without keys, its connection. None: each job is its own owner.
owner: ContextVar[Hashable | None] = ContextVar("owner", default=None)
SHARE = 8  # an API key may use 1 / SHARE of a limit even if other keys use all of it


def current_tenant() -> int | None:
    """The index of the request's API key; None without keys."""
    found = owner.get()
    return found if isinstance(found, int) else None


def has_room(asked: int, own: int, held: int, most: int) -> bool:
    """Whether a request may use `asked` more. Its API key uses `own`, all keys together use `held`.
    A key below its share may exceed the limit `most`, but all keys stay within twice `most`.
    """
    if held + asked <= most:
        return True
    is_small = own + asked <= most // SHARE and held + asked <= 2 * most
    return current_tenant() is not None and is_small


class QueuedJob(Generic[T]):
    """One job, from `FairQueue.add` to `FairQueue.end`."""

    def __init__(self, owner: Hashable, item: T, is_large: bool, number: int) -> None:
        self.owner, self.item, self.is_large, self.number = owner, item, is_large, number
        self.began: float | None = None  # the time at which it got a place


class Waiting(Generic[T]):
    """One owner's waiting jobs: small and large ones alternate, each kind in order of arrival."""

    def __init__(self) -> None:
        self.kinds = deque[QueuedJob[T]](), deque[QueuedJob[T]]()  # small, large
        self.last = True  # whether the last job that left is large

    def first(self, allows_large: bool) -> QueuedJob[T] | None:
        small, large = self.kinds
        if large and allows_large and not (small and self.last):
            return large[0]
        return small[0] if small else None

    def __len__(self) -> int:
        return sum(map(len, self.kinds))


class FairQueue(Generic[T]):
    """A queue that serves the owner with the fewest places first, then the owner that has used the
    fewest seconds, then the earliest job.

    If there are several places, one stays free of large jobs, and no owner gets all of them. A new
    owner starts with the seconds of the owner that has used the fewest.
    """

    def __init__(self, num_places: int, clock: Callable[[], float] = perf_counter) -> None:
        self.num_places, self.most, self.clock = num_places, max(1, num_places - 1), clock
        self.waiting: dict[Hashable, Waiting[T]] = {}  # by owner; never empty
        self.held = Counter[Hashable]()  # places, by owner
        self.num_large = 0  # large jobs with a place
        self.spent: dict[Hashable, float] = {}  # seconds used, by owner
        self.floor = 0.0  # minimum of the seconds used by owners with a job
        self.num_jobs = 0

    def add(self, owner: Hashable | None, item: T, is_large: bool = False) -> QueuedJob[T]:
        self.num_jobs += 1
        job = QueuedJob(object() if owner is None else owner, item, is_large, self.num_jobs)
        self.spent[job.owner] = max(self.spent.get(job.owner, 0.0), self.floor)
        self.waiting.setdefault(job.owner, Waiting()).kinds[is_large].append(job)
        return job

    def take(self) -> QueuedJob[T] | None:
        """Give a place to the next job and return it; None if no job may run."""
        if self.held.total() >= self.num_places:
            return None
        allows_large = self.num_large < self.most
        open_to = (w for o, w in self.waiting.items() if self.held[o] < self.most)
        firsts = [job for w in open_to if (job := w.first(allows_large)) is not None]
        if not firsts:
            return None
        job = min(firsts, key=lambda j: (self.held[j.owner], self.spent[j.owner], j.number))
        self.remove(job)
        self.held[job.owner] += 1
        self.num_large += job.is_large
        job.began = self.clock()
        return job

    def remove(self, job: QueuedJob[T]) -> None:
        """Remove a waiting job."""
        waiting = self.waiting[job.owner]
        waiting.kinds[job.is_large].remove(job)
        waiting.last = job.is_large
        if not waiting:
            del self.waiting[job.owner]

    def end(self, job: QueuedJob[T]) -> None:
        """End a running or waiting job, and charge its seconds to its owner."""
        if job.began is None:
            self.remove(job)
        else:
            self.spent[job.owner] += self.clock() - job.began
            self.held -= Counter({job.owner: 1})  # drops zeros
            self.num_large -= job.is_large
        self.forget_idle()

    def forget_idle(self) -> None:
        """Drop owners without a job if there are many."""
        active = self.waiting.keys() | self.held.keys()
        self.floor = max(self.floor, min((self.spent[o] for o in active), default=0.0))
        if len(self.spent) > MAX_IDLE + len(active):
            self.spent = {o: self.spent[o] for o in active}


class FairTurns:
    """A fair queue for tasks of an event loop."""

    def __init__(self, num_places: int) -> None:
        self.queue = FairQueue[asyncio.Future[None]](num_places)

    @asynccontextmanager
    async def turn(self, is_large: bool = False) -> AsyncIterator[None]:
        """Wait for a place and hold it during the block. The context's `owner` is charged."""
        future = asyncio.get_running_loop().create_future()
        job = self.queue.add(owner.get(), future, is_large)
        self.begin()
        try:
            await future
            yield
        finally:
            self.queue.end(job)
            self.begin()

    def begin(self) -> None:
        while (job := self.queue.take()) is not None:
            if not job.item.done():  # else its task was cancelled and ends the job
                job.item.set_result(None)


class FairThreads:
    """Threads that run jobs in the order of a fair queue."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.queue = FairQueue[tuple[Future[object], Callable[[], object]]](num_threads)
        self.lock = Lock()

    def submit(
        self, owner: Hashable | None, do: Callable[[], T], is_large: bool = False
    ) -> "Future[T]":
        future: Future[T] = Future()
        with self.lock:
            self.queue.add(owner, (future, do), is_large)  # type: ignore[arg-type]
        self.begin()
        return future

    def begin(self) -> None:
        with self.lock, suppress(RuntimeError):  # raised after the threads are shut down
            while (job := self.queue.take()) is not None:
                self.threads.submit(self.run, job)

    def run(self, job: QueuedJob[tuple[Future[object], Callable[[], object]]]) -> None:
        future, do = job.item
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(do())
        except BaseException as e:
            future.set_exception(e)
        finally:
            with self.lock:
                self.queue.end(job)
            self.begin()

    def close(self) -> None:
        """Cancel waiting jobs. Does not wait for running jobs."""
        with self.lock:
            waiting = [job for w in self.queue.waiting.values() for kind in w.kinds for job in kind]
        for job in waiting:
            job.item[0].cancel()
        self.threads.shutdown(wait=False, cancel_futures=True)
