"""Continuous batching: who is admitted, who is preempted, and how a step's rows are spent."""

from collections import deque
from time import perf_counter

import msgspec

from specserve.memory import BlockPool
from specserve.scheduling.request import Request, Work


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may have."""

    max_running: int = 64
    max_batched_tokens: int = 512
    prefill_chunk: int = 128
    max_nodes: int = 16  # guesses of a request
    max_step_nodes: int = 32  # guesses of a step


class Scheduler:
    """`running` is in order of admission: the last one is the youngest, and the first victim."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits, self.pool = limits, pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preempted = 0
        self.turn = 0  # whose share of the guesses is rounded up first

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take out a request wherever it is; its blocks go back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.release()

    def plan(self) -> list[Work]:
        """Spend the step's rows: a root for every request that is due, then prompts, then guesses.

        Where prompts and guesses both want what the roots leave, each gets half: a long prompt
        stalls no stream, and no tree starves a prompt.
        """
        roots = self.plan_roots()
        self.admit()
        roots += [Work(r, r.num_computed, r.num_computed + 1) for r in self.newly_due(roots)]
        left = self.limits.max_batched_tokens - len(roots)
        wanted = min(self.limits.max_step_nodes, sum(map(self.room, roots)))
        chunks = self.plan_chunks(min(self.limits.prefill_chunk, left - min(left // 2, wanted)))
        left -= sum(w.end - w.start for w in chunks)
        self.plan_guesses(roots, min(left, self.limits.max_step_nodes))
        return roots + chunks

    def plan_roots(self) -> list[Work]:
        """A row for every running request that is due; the youngest make room for the oldest."""
        roots: list[Work] = []
        place = 0
        while place < len(self.running):  # it shrinks from the end
            request = self.running[place]
            if request.is_due and self.make_room(request):
                roots.append(Work(request, request.num_computed, request.num_computed + 1))
            place += 1
        return roots

    def newly_due(self, roots: list[Work]) -> list[Request]:
        """Admitted this very step with one token to compute."""
        planned = {work.request.id for work in roots}
        return [r for r in self.running if r.is_due and r.id not in planned]

    def make_room(self, request: Request) -> bool:
        """Get the root its slot; False where it is the youngest itself that had to go."""
        while not request.table.try_reserve(request.num_computed + 1):
            if self.drop_draft_blocks():
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def drop_draft_blocks(self) -> bool:
        """Free the draft KV of the youngest request that has some; it catches up later."""
        for request in reversed(self.running):
            if request.draft_table.blocks:
                request.draft_table.clear()
                return True
        return False

    def preempt(self, request: Request) -> None:
        """Take a request's blocks; it waits at the head of the queue and is computed again."""
        self.running.remove(request)
        request.release()
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def admit(self) -> None:
        """Let requests in, first come first served, each with blocks for all it knows.

        A block a running request stays free, so that the newcomer does not at once force one out.
        """
        while self.waiting and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            needed = request.table.missing(len(request.token_ids)) + len(self.running)
            drafted = sum(len(r.draft_table.blocks) for r in self.running)
            if self.pool.num_free + drafted < needed:
                return
            while self.pool.num_free < needed:
                self.drop_draft_blocks()
            reserved = request.table.try_reserve(len(request.token_ids))
            assert reserved, "admitted without blocks"
            request.admitted_at = request.admitted_at or perf_counter()
            self.running.append(self.waiting.popleft())

    def room(self, work: Work) -> int:
        """Guesses that a root may have: with the bonus token they are the tokens left."""
        return max(0, min(self.limits.max_nodes, work.request.num_left - 1))

    def plan_chunks(self, rows: int) -> list[Work]:
        """First come, first served; a request has causal rows or a tree in a step, never both."""
        chunks: list[Work] = []
        for request in self.running:
            if rows == 0:
                break
            start, known = request.num_computed, len(request.token_ids)
            if start < known - 1:
                end = min(start + rows, known)
                chunks.append(Work(request, start, end))
                rows -= end - start
        return chunks

    def plan_guesses(self, roots: list[Work], rows: int) -> None:
        """Share guess rows evenly; a tree whose blocks are not free is cut, never refused."""
        self.turn += 1
        limits = share(rows, [self.room(work) for work in roots], self.turn)
        for work, limit in zip(roots, limits, strict=True):
            slots = work.request.table.reserve_some(work.end + limit)
            work.draft_limit = slots - work.end


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
