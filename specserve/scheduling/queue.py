"""Places and rows: which waiting request is next, which running one gives up its place, and how the
rows of a step are shared.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

from specserve.scheduling.request import Request


class Places:
    """How many of the running requests each tenant and each call has."""

    def __init__(self, running: Sequence[Request]) -> None:
        self.running = running
        self.of_tenant = Counter(r.caller.tenant for r in running)
        self.of_call = Counter(r.caller.call for r in running)

    def victim(self, request: Request) -> Request | None:
        """The request to preempt for one whose call has no place: the last of the largest call of
        the tenant with the most places. None if the call has a place, or no request can go.

        A tenant gives up a place only to a tenant that then has no more than it has itself, and
        between calls of one tenant no call gives up its last. So no place goes to and fro, and the
        longest running request of a tenant is never preempted.
        """
        caller = request.caller
        if self.of_call[caller.call] > 0:
            return None

        def can_give(other: Request) -> bool:
            if other.sampling.priority < request.sampling.priority:
                return False
            if other.caller.tenant == caller.tenant:
                return self.of_call[other.caller.call] > 1
            return self.of_tenant[other.caller.tenant] > self.of_tenant[caller.tenant] + 1

        def held(other: Request) -> tuple[int, int, tuple[int, int]]:
            tenant, call = other.caller.tenant, other.caller.call
            return self.of_tenant[tenant], self.of_call[call], other.rank

        return max(filter(can_give, self.running), key=held, default=None)


class Line:
    """One tenant's waiting requests of one priority, by call, in order of arrival."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.requests: dict[int, list[Request]] = {}  # by call; none is empty
        self.due: list[Request] = []  # with a target for the first token, the next one due first
        self.num_left = 0  # requests that have left the line

    def add(self, request: Request) -> None:
        call = request.caller.call
        if call not in self.requests:
            insort(self.calls, call)
            self.requests[call] = []
        insort(self.requests[call], request, key=lambda r: r.id)
        if request.ttft is not None:
            insort(self.due, request, key=lambda r: r.due_at)

    def remove(self, request: Request) -> None:
        self.num_left += 1
        if request in self.due:
            self.due.remove(request)
        call = request.caller.call
        self.requests[call].remove(request)
        if not self.requests[call]:
            self.calls.remove(call)
            del self.requests[call]

    def next(self, places: Places, now: float = 0.0) -> Request:
        """The first request of the call with the fewest places; of equal calls, of the earliest.

        Every other time it is the one that is nearest to missing its target instead, if its call
        has no place: so nobody waits for ever behind targets.
        """
        held = places.of_call
        while self.due and self.due[0].due_at < now:
            self.due.pop(0)
        nearest = next((r for r in self.due if not held[r.caller.call]), None)
        if nearest is not None and self.num_left % 2 == 0:
            return nearest
        # Few calls have a place: the first one without is soon found, if there is any.
        idle = next((call for call in self.calls if not held[call]), None)
        call = idle if idle is not None else min(self.calls, key=lambda c: (held[c], c))
        return self.requests[call][0]


class Waiter(NamedTuple):
    """A request that is set aside until its leader has published `num_blocks` blocks."""

    num_blocks: int
    request: Request


class Queue:
    """Waiting requests: in lines, or set aside while a running one computes blocks they need.

    The next request is of the smallest priority; in it of the tenant with the fewest places; then
    of the call with the fewest; then the earliest. Finding it takes time in proportion to the
    places, not to the queue.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # all, by id
        self.lines: dict[int, dict[int, Line]] = {}  # by priority and tenant; none is empty
        self.aside: dict[int, tuple[Request, list[Waiter]]] = {}  # by their leader's id

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self.requests

    def add(self, request: Request) -> None:
        """Queue a request; a follower gets into a line later, once its prompt is computed."""
        self.requests[request.id] = request
        if not request.is_following:
            self.line_up(request)

    def line_up(self, request: Request) -> None:
        lines = self.lines.setdefault(request.sampling.priority, {})
        lines.setdefault(request.caller.tenant, Line()).add(request)

    def leave_line(self, request: Request) -> None:
        priority, tenant = request.sampling.priority, request.caller.tenant
        lines = self.lines[priority]
        lines[tenant].remove(request)
        if not lines[tenant].calls:
            del lines[tenant]
        if not lines:
            del self.lines[priority]

    def remove(self, request: Request) -> None:
        del self.requests[request.id]
        for _, waiters in self.aside.values():
            for waiter in waiters:
                if waiter.request is request:
                    waiters.remove(waiter)
                    return
        if not request.is_following:
            self.leave_line(request)

    def next(self, places: Places, now: float = 0.0) -> Request | None:
        """The request to admit first; None if no request is in a line."""
        if not self.lines:
            return None
        firsts = (line.next(places, now) for line in self.lines[min(self.lines)].values())
        held = places.of_tenant
        return min(firsts, key=lambda r: (held[r.caller.tenant], r.caller.call, r.id))

    def set_aside(self, request: Request, leader: Request, num_blocks: int) -> None:
        """Take a request out of its line until the leader has published `num_blocks` blocks."""
        self.leave_line(request)
        _, waiters = self.aside.setdefault(leader.id, (leader, []))
        insort(waiters, Waiter(num_blocks, request), key=lambda w: -w.num_blocks)

    def resume(self, running: Collection[Request]) -> None:
        """Put requests back in line whose leader has published the blocks, or never will."""
        for leader, waiters in [*self.aside.values()]:
            is_lost = leader not in running or not leader.table.is_publishing
            num_blocks = leader.table.num_published
            while waiters and (is_lost or waiters[-1].num_blocks <= num_blocks):
                self.line_up(waiters.pop().request)
            if not waiters:
                del self.aside[leader.id]


def share(total: int, caps: Sequence[int], step: int) -> list[int]:
    """Split a total evenly under caps; the remainder goes one each, rotating by step."""
    got = [0] * len(caps)
    start = step % len(caps) if caps else 0
    below = [i for i in [*range(start, len(caps)), *range(start)] if caps[i] > 0]
    while total > 0 and below:
        each, extra = divmod(total, len(below))
        for place, i in enumerate(below):
            more = min(caps[i] - got[i], each + (place < extra))
            got[i] += more
            total -= more
        below = [i for i in below if got[i] < caps[i]]
    return got


def prefill_rows(
    computing: Sequence[Request], rows: int, step: int, slack: Mapping[int, float] | None = None
) -> dict[int, int]:
    """Each prompt's rows, by request id; `computing` is in order of rank.

    A smaller priority takes all rows that it can use. Within a priority, tenants share evenly.
    `slack` has the seconds that requests near to missing their targets have left.
    """
    given: dict[int, int] = {}
    for _, equals in groupby(computing, key=lambda r: r.sampling.priority):
        tenants: dict[int, list[Request]] = {}
        for request in equals:
            tenants.setdefault(request.caller.tenant, []).append(request)
        wanted = [sum(r.num_uncomputed for r in prompts) for prompts in tenants.values()]
        for prompts, some in zip(tenants.values(), share(rows, wanted, step), strict=True):
            given |= tenant_rows(prompts, some, step, slack or {})
            rows -= some
    return given


def tenant_rows(
    prompts: Sequence[Request], rows: int, step: int, slack: Mapping[int, float]
) -> dict[int, int]:
    """Split a tenant's rows: half go to its prompts by rank, so that the earliest takes at most
    twice as long as it would alone; half to the prompts that are nearest to missing their targets,
    then to the calls with the least left to compute, so that they need not wait for long prompts.
    """
    left = Counter[int]()
    for request in prompts:
        left[request.caller.call] += request.num_uncomputed

    def urgency(request: Request) -> tuple[float, int, tuple[int, int]]:
        return slack.get(request.id, inf), left[request.caller.call], request.rank

    first = sorted(prompts, key=urgency)
    half = (rows + step % 2) // 2  # a single row goes to each half in turn
    given = Counter[int]()
    fill(given, first, half)
    fill(given, prompts, rows - given.total())
    return given


def fill(given: Counter[int], prompts: Iterable[Request], rows: int) -> None:
    """Give each prompt in turn as many rows as it can use, until none is left."""
    for request in prompts:
        some = min(rows, request.num_uncomputed - given[request.id])
        given[request.id] += some
        rows -= some
