"""Who has how many of the running requests, and who gives one of them up for a newcomer."""

from collections import Counter
from collections.abc import Sequence

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
