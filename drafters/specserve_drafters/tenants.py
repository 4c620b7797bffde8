"""Statistics that the requests of one tenant scope share; other scopes do not see them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from specserve_drafters.base import (
    DEFAULT_SCOPE,
    DraftRequest,
    DraftSource,
    SourceRequest,
    TenantScope,
)
from specserve_drafters.candidates import Candidate
from specserve_drafters.trie import BaseTrie

if TYPE_CHECKING:  # see base.py
    from array import array

__all__ = ["DEFAULT_SCOPE", "PerTenant", "PerTenantSource", "TenantScope"]
MOST = 256  # most scopes without requests that are kept, the latest ones

T = TypeVar("T")


class PerTenant(Generic[T]):
    """One object for each tenant scope, shared by its requests."""

    def __init__(self, make: Callable[[], T], most: int = MOST) -> None:
        self.make, self.most = make, most
        self.live: dict[TenantScope, T] = {}
        self.num_requests: dict[TenantScope, int] = {}  # number of requests of live scopes
        # The scope that had requests last is at the end.
        self.idle: OrderedDict[TenantScope, T] = OrderedDict()
        self.requests: dict[int, tuple[TenantScope, T]] = {}

    def begin(self, id: int, scope: TenantScope) -> T:
        """Return the scope's object, kept at least until `forget` of its last request."""
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
        """Return the object of the scope of a request that has begun."""
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
        """Start again with new objects; requests continue."""
        scopes = {id: scope for id, (scope, _) in self.requests.items()}
        for each in (self.live, self.num_requests, self.idle, self.requests):
            each.clear()
        for id, scope in scopes.items():
            self.begin(id, scope)


class PerTenantSource(DraftSource):
    """A separate source for each tenant scope, used as one source."""

    is_estimating: ClassVar[bool] = True

    def __init__(self, make: Callable[[], DraftSource], name: str) -> None:
        self.name, self.sources = name, PerTenant(make)

    def begin(self, request: SourceRequest) -> None:
        self.sources.begin(request.id, request.scope)

    def serving(self, id: int) -> DraftSource:
        return self.sources.of(id)

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        return self.sources.of(id).expected_accepted(id, text)

    def candidates(self, items: Sequence[DraftRequest]) -> Sequence[Sequence[Candidate]]:
        return [found for i in items for found in self.sources.of(i.id).candidates([i])]

    def add_candidates(self, items: Sequence[DraftRequest], tries: Sequence[BaseTrie]) -> list[int]:
        sources = [self.sources.of(item.id) for item in items]
        if len({*sources}) == 1:
            return sources[0].add_candidates(items, tries)
        each = zip(sources, items, tries, strict=True)
        return [n for source, item, trie in each for n in source.add_candidates([item], [trie])]

    def forget(self, id: int) -> None:
        self.sources.of(id).forget(id)
        self.sources.forget(id)

    def reset(self) -> None:
        """Drop all that was learned from texts."""
        self.sources.reset()
