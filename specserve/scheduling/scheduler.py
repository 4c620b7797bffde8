"""Continuous batching: who is admitted, who is preempted, and how a step's rows are spent."""

from bisect import insort
from collections import Counter
from time import perf_counter

import msgspec

from specserve.memory import BlockPool
from specserve.scheduling.request import Request, ScheduledRequest


class StepBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may have."""

    max_running: int = 64
    max_batched_tokens: int = 512
    prefill_chunk: int = 128
    max_nodes: int = 16  # guesses of a request
    max_step_nodes: int = 32  # guesses of a step


class Scheduler:
    """`waiting` and `running` are in order of rank. Who runs and ranks last is the first victim."""

    def __init__(self, budget: StepBudget, pool: BlockPool) -> None:
        self.budget, self.pool = budget, pool
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preempted = 0
        self.turn = 0  # whose share of the guesses is rounded up first

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take out a request wherever it is; its blocks go back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.leave()
        request.release()

    def plan(self) -> list[ScheduledRequest]:
        """Spend the step's rows: a root for every request that is due, then prompts, then guesses.

        Where prompts and guesses both want what the roots leave, each gets half: a long prompt
        stalls no stream, and no tree starves a prompt.
        """
        self.admit()
        roots = self.plan_roots()
        left = self.budget.max_batched_tokens - len(roots)
        wanted = min(self.budget.max_step_nodes, sum(map(self.room, roots)))
        chunks = self.plan_chunks(min(self.budget.prefill_chunk, left - min(left // 2, wanted)))
        left -= sum(w.end - w.start for w in chunks)
        self.plan_guesses(roots, min(left, self.budget.max_step_nodes))
        if self.running and not roots and not chunks:  # prompts alone, each with a part of the pool
            self.preempt(self.running[-1])
            return self.plan()
        return roots + chunks

    @property
    def spare(self) -> int:
        """Blocks that nobody has been promised: those who run get what they know computed."""
        promised = sum(r.table.missing(len(r.token_ids)) for r in self.running)
        return self.pool.num_available - promised

    @property
    def computing(self) -> list[Request]:
        return [r for r in self.running if r.is_computing]

    def admit(self) -> None:
        """Let requests in by rank, each with blocks for all it knows, promised if not yet taken.

        A block a running request stays over, so that the newcomer does not at once force one out.
        """
        computing = self.computing
        for request in self.waiting[: self.budget.max_running]:  # a step's time is everybody's
            if request.is_behind or any(r.is_ahead_of(request) for r in computing):
                continue  # somebody is about to compute what it would compute as well
            if not self.make_place(request):
                return
            request.begin()
            if request.admitted_at == 0.0:
                request.num_cached = request.num_computed
                request.admitted_at = perf_counter()
            self.waiting.remove(request)
            insort(self.running, request, key=rank)
            if request.is_computing:
                computing.append(request)

    def make_place(self, request: Request) -> bool:
        """Whether a request can be let in now, others having made room for it if they must."""
        most = self.budget.max_running
        found = [] if request.table.blocks else request.table.find(request.token_ids)
        needed = request.table.missing(len(request.token_ids)) - len(found)

        def is_short() -> bool:
            idle = sum(self.pool.counts[block] == 0 for block in found)
            return needed + idle + len(self.running) > self.spare

        if (len(self.running) >= most or is_short()) and not self.can_make_place(
            request, needed, found
        ):
            return False
        while len(self.running) >= most or is_short():
            if len(self.running) >= most or not self.reclaim(request):
                self.preempt(self.running[-1])
        return True

    def can_make_place(self, request: Request, needed: int, found: list[int]) -> bool:
        """Whether it would do if all of a lower priority, and who can do without, gave back."""
        victims = [r for r in self.running if r.sampling.priority > request.sampling.priority]
        kept = self.running[: len(self.running) - len(victims)]
        if len(kept) >= self.budget.max_running:
            return False
        tables = [r.draft_table for r in self.running]
        tables += [r.table for r in (*self.waiting, *victims) if r is not request]
        holders = Counter(block for table in tables for block in table.blocks)
        usable = sum(count == self.pool.counts[block] for block, count in holders.items())
        usable += self.pool.num_available
        usable -= sum(self.pool.counts[block] == holders[block] for block in found)
        promised = sum(r.table.missing(len(r.token_ids)) for r in kept)
        return needed + len(kept) + promised <= usable

    def reclaim(self, keeper: Request) -> bool:
        """Get somebody's blocks back at no cost but time: the draft KV of the last who runs and has
        some, who catches up later; else what the last who waits was brought along.
        """
        for request in reversed(self.running):
            if request.draft_table.blocks:
                request.draft_table.clear()
                return True
        for request in reversed(self.waiting):
            if request.table.blocks and request is not keeper:
                request.release()
                return True
        return False

    def make_room(self, request: Request) -> bool:
        """Get the root its slot; False where it is the last itself that had to go."""
        while not request.table.try_reserve(request.num_computed + 1):
            if self.reclaim(request):
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take a request's blocks; it waits for its turn, and finds or computes all again."""
        self.running.remove(request)
        request.release()
        self.add(request)
        self.num_preempted += 1

    def plan_roots(self) -> list[ScheduledRequest]:
        """A row for every running request that is due; the last make room for the first."""
        roots: list[ScheduledRequest] = []
        place = 0
        while place < len(self.running):  # it shrinks from the end
            request = self.running[place]
            if request.is_due and self.make_room(request):
                roots.append(
                    ScheduledRequest(request, request.num_computed, request.num_computed + 1)
                )
            place += 1
        return roots

    def room(self, work: ScheduledRequest) -> int:
        """Guesses that a root may have: with the bonus token they are the tokens left."""
        return max(0, min(self.budget.max_nodes, work.request.num_left - 1))

    def plan_chunks(self, rows: int) -> list[ScheduledRequest]:
        """First by rank; a request has causal rows or a tree in a step, never both."""
        chunks: list[ScheduledRequest] = []
        for request in self.computing:
            if rows == 0:
                break
            start, table = request.num_computed, request.table
            end = min(start + rows, len(request.token_ids))
            while table.missing(end) > self.pool.num_available and self.reclaim(request):
                pass
            end = table.reserve_some(end, self.pool.num_available)
            if end > start:
                chunks.append(ScheduledRequest(request, start, end))
            rows -= end - start
        return chunks

    def plan_guesses(self, roots: list[ScheduledRequest], rows: int) -> None:
        """Share guess rows evenly; a tree whose blocks are not there is cut, never refused."""
        self.turn += 1
        limits = share(rows, [self.room(work) for work in roots], self.turn)
        spare = self.spare
        for work, limit in zip(roots, limits, strict=True):
            table = work.request.table
            had = len(table.blocks)
            work.draft_limit = table.reserve_some(work.end + limit, spare) - work.end
            spare -= len(table.blocks) - had


def rank(request: Request) -> tuple[int, int]:
    return request.rank


def share(total: int, caps: list[int], turn: int) -> list[int]:
    """Split a total evenly under caps; what does not divide goes one each, in rotating order."""
    got = [0] * len(caps)
    start = turn % len(caps) if caps else 0
    hungry = [i for i in [*range(start, len(caps)), *range(start)] if caps[i] > 0]
    while total > 0 and hungry:
        each, extra = divmod(total, len(hungry))
        for place, i in enumerate(hungry):
            more = min(caps[i] - got[i], each + (place < extra))
            got[i] += more
            total -= more
        hungry = [i for i in hungry if got[i] < caps[i]]
    return got
