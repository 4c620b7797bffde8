"""The requests that wait, which of them is next, and who gives a place up for it."""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from specserve.scheduling.request import Request


class Places:
    """How many of the running requests each tenant and each call has."""

    def __init__(self, running: Sequence[Request]) -> None:
        self.running = running
        self.of_tenant = Counter(r.caller.tenant for r in running)
        self.of_call = Counter(r.caller.call for r in running)

    def victim(self, request: Request) -> Request | None:
        """Who is preempted for a request of a call that runs nothing: of the tenant with the most
        places, and its call with the most, the last.

        A tenant gives one up only to a tenant that has fewer even with it, and within a tenant
        only a call that keeps one does: so nobody loses a place to take it back, and the longest
        running request of a tenant never goes.
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
    """One tenant's requests of one priority: by call, and both in order of arrival."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.requests: dict[int, list[Request]] = {}  # by call; none is empty

    def add(self, request: Request) -> None:
        call = request.caller.call
        if call not in self.requests:
            insort(self.calls, call)
            self.requests[call] = []
        insort(self.requests[call], request, key=lambda r: r.id)

    def remove(self, request: Request) -> None:
        call = request.caller.call
        self.requests[call].remove(request)
        if not self.requests[call]:
            self.calls.remove(call)
            del self.requests[call]

    def next(self, places: Places) -> Request:
        """The first of the call with the fewest places, of equals the earlier one."""
        held = places.of_call
        # Calls that run something are few: one that runs nothing is soon met, if there is any.
        idle = next((call for call in self.calls if not held[call]), None)
        call = idle if idle is not None else min(self.calls, key=lambda c: (held[c], c))
        return self.requests[call][0]


class Waiter(NamedTuple):
    """A request that is set aside until another has published so many blocks."""

    num_blocks: int
    request: Request


class Queue:
    """Requests stand in a line, or are set aside while another computes what they need.

    Next is the smallest priority; in it the tenant with the fewest places; then the call with the
    fewest; then the earliest. What a look costs grows with the places, not with the queue.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # all, by id
        self.lines: dict[int, dict[int, Line]] = {}  # by priority and tenant; none is empty
        self.aside: dict[int, tuple[Request, list[Waiter]]] = {}  # by the id of who computes

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self.requests

    def add(self, request: Request) -> None:
        """A choice that follows another gets into the line by `line_up`, when it has its prompt."""
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

    def next(self, places: Places) -> Request | None:
        """Who is to be admitted before all others; None where nobody stands in a line."""
        if not self.lines:
            return None
        firsts = (line.next(places) for line in self.lines[min(self.lines)].values())
        held = places.of_tenant
        return min(firsts, key=lambda r: (held[r.caller.tenant], r.caller.call, r.id))

    def set_aside(self, request: Request, leader: Request, num_blocks: int) -> None:
        """Out of its line, until `resume` finds that the leader has published so many blocks."""
        self.leave_line(request)
        _, waiters = self.aside.setdefault(leader.id, (leader, []))
        insort(waiters, Waiter(num_blocks, request), key=lambda w: -w.num_blocks)

    def resume(self, running: Collection[Request]) -> None:
        """Back into line with those whose leader has got so far, or will not get there."""
        for leader, waiters in [*self.aside.values()]:
            is_lost = leader not in running or not leader.table.is_publishing
            num_blocks = leader.table.num_published
            while waiters and (is_lost or waiters[-1].num_blocks <= num_blocks):
                self.line_up(waiters.pop().request)
            if not waiters:
                del self.aside[leader.id]
