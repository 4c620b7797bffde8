"""What is learnt from the requests of one owner, and is of no effect on those of another."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from specserve_drafters.base import DraftRequest, DraftSource
from specserve_drafters.candidates import Candidate

if TYPE_CHECKING:  # see base.py
    from array import array

TenantScope = tuple[
    int, str, str
]  # a tenant, a salt of its requests, and the digest of their adapter
DEFAULT_SCOPE = 0, "", ""  # of requests without a key, a salt and an adapter
MOST = 256  # owners without requests that are kept, those that had some last

T = TypeVar("T")


class PerTenant(Generic[T]):
    """One object for each owner, which its requests share."""

    def __init__(self, make: Callable[[], T], most: int = MOST) -> None:
        self.make, self.most = make, most
        self.live: dict[TenantScope, T] = {}
        self.num_requests: dict[TenantScope, int] = {}  # of the live ones
        self.idle: OrderedDict[TenantScope, T] = (
            OrderedDict()
        )  # the one that had requests last at the end
        self.requests: dict[int, tuple[TenantScope, T]] = {}

    def begin(self, id: int, scope: TenantScope) -> T:
        """The owner's object, which it keeps until `forget` of its last request at least."""
        self.forget(id)
        if scope not in self.live:
            kept = self.idle.pop(scope, None)
            self.live[scope] = self.make() if kept is None else kept
            self.num_requests[scope] = 0
        found = self.live[scope]
        self.num_requests[scope] += 1
        self.requests[id] = scope, found
        return found

    def of(self, id: int) -> T:
        """That of the owner of a request that has begun."""
        return self.requests[id][1]

    @property
    def every(self) -> list[T]:
        return [*self.live.values(), *self.idle.values()]

    def find(self, scope: TenantScope) -> T | None:
        return self.live.get(scope, self.idle.get(scope))

    def forget(self, id: int) -> None:
        scope, _ = self.requests.pop(id, (None, None))
        if scope is None:
            return
        self.num_requests[scope] -= 1
        if self.num_requests[scope] == 0:
            del self.num_requests[scope]
            self.idle[scope] = self.live.pop(scope)
            if len(self.idle) > self.most:
                self.idle.popitem(last=False)

    def reset(self) -> None:
        """Begin again with new objects; requests go on."""
        scopes = {id: scope for id, (scope, _) in self.requests.items()}
        for each in (self.live, self.num_requests, self.idle, self.requests):
            each.clear()
        for id, scope in scopes.items():
            self.begin(id, scope)


class PerTenantSource:
    """A source of its own for each owner, as one source."""

    def __init__(self, make: Callable[[], DraftSource], name: str) -> None:
        self.name, self.sources = name, PerTenant(make)

    @property
    def requests(self) -> dict[int, tuple[TenantScope, DraftSource]]:
        return self.sources.requests

    def begin(self, id: int, scope: TenantScope) -> None:
        """Guess for a request; until `forget`."""
        self.sources.begin(id, scope)

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        return self.sources.of(id).expected_accepted(id, text)

    def candidates(self, items: Sequence[DraftRequest]) -> list[list[Candidate]]:
        return [found for i in items for found in self.sources.of(i.id).candidates([i])]

    def forget(self, id: int) -> None:
        self.sources.of(id).forget(id)
        self.sources.forget(id)

    def reset(self) -> None:
        """Forget what texts have shown."""
        self.sources.reset()
