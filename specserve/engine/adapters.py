"""Adapters in the target's slots: files are read during steps, and slots change between steps."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import torch

from specserve.errors import ConfigError
from specserve.exchange.messages import AdapterRef
from specserve.logs import escaped
from specserve.models.adapters import PackedAdapter
from specserve.models.decoder import LayerAdapters
from specserve.scheduling import Request

log = logging.getLogger("specserve")

AHEAD = 3  # most adapters read without a free slot; each takes memory

GONE = (
    "model: this adapter's files are missing or have changed since it was loaded. The server's "
    "operator must load it again; the log has details"
)
LONGEST = 1000  # most characters of an error, which may quote a file


class Slots(Protocol):
    """`AdapterSlots` defines both."""

    @property
    def layers(self) -> Sequence[LayerAdapters]: ...

    def put(self, slot: int, adapter: PackedAdapter | None) -> None: ...


class Resident:
    """An adapter in a slot, and the requests that use it."""

    def __init__(self, slot: int) -> None:
        self.slot, self.users = slot, set[int]()


class Adapters:
    """Requests wait here until their adapter is in a slot. The slot stays in use until they end.

    An adapter takes a free slot, or the slot of the least recently used adapter without requests.
    If all have requests, the adapter with the fewest gets no new ones until it has left, so that no
    tenant starves.
    """

    def __init__(self, slots: Slots, num_slots: int, read: Callable[[Path], PackedAdapter]) -> None:
        """`read` raises ConfigError with the error in an adapter's files."""
        self.slots, self.num_slots, self.read = slots, num_slots, read
        self.free = [*reversed(range(num_slots))]
        self.residents: OrderedDict[str, Resident] = OrderedDict()  # by digest, the last used last
        self.forgotten = set[str]()  # no request will name these; their last request frees them
        # Requests with one prompt, by the first's id
        self.waiting: OrderedDict[int, list[Request]] = OrderedDict()
        # Usual priority: a niced thread would delay steps while it holds the GIL without a CPU.
        self.thread = ThreadPoolExecutor(1, "adapters", use_one_core)
        self.coming: dict[str, Future[PackedAdapter]] = {}  # by digest
        self.loading: list[tuple[str, Future[PackedAdapter]]] = []  # loads without requests

    def ask(self, choices: list[Request]) -> None:
        """Queue the requests of one prompt until their adapter is in a slot."""
        self.waiting[choices[0].id] = choices

    def ready(self) -> Iterator[tuple[list[Request], str]]:
        """Yield requests whose adapter is in a slot now, or requests that fail with an error
        message.
        """
        leaving = set[str]()  # residents that get no new requests
        absent = set[str]()  # adapters without a slot
        for place, id, choices in self.in_turn():
            ref = choices[0].adapter
            assert ref is not None, "only requests with an adapter wait"
            if ref.digest in leaving or ref.digest in absent:
                continue
            try:
                resident = self.find(ref, leaving, AHEAD if place == 0 else AHEAD - 1)
            except Exception as e:  # for example too little memory: only these requests fail
                log.error("Adapter cannot be read again: %s", words_of(e))
                del self.waiting[id]
                yield choices, GONE
                continue
            if resident is None:
                absent.add(ref.digest)
                continue
            del self.waiting[id]
            self.use(ref.digest, resident, choices)
            yield choices, ""

    def in_turn(self) -> list[tuple[int, int, list[Request]]]:
        """Return waiting requests as (place in the tenant's line, id, requests): the first of each
        tenant, then the second of each.
        """
        lengths, found = Counter[int](), []
        for id, choices in self.waiting.items():
            tenant = choices[0].caller.tenant
            found.append((lengths[tenant], id, choices))
            lengths[tenant] += 1
        return sorted(found, key=lambda each: each[0])

    def find(self, ref: AdapterRef, leaving: set[str], ahead: int = AHEAD) -> Resident | None:
        """Return the adapter in its slot, or None while it is absent. ConfigError if its files have
        changed. At most `ahead` adapters are read at once.
        """
        if (resident := self.residents.get(ref.digest)) is not None:
            return resident
        if ref.digest not in self.coming:
            if len(self.coming) < ahead:
                self.coming[ref.digest] = self.thread.submit(self.read, Path(ref.folder))
            return None
        if not self.coming[ref.digest].done() or not self.has_room(leaving):
            return None
        adapter = self.coming.pop(ref.digest).result()
        if adapter.digest != ref.digest:
            raise ConfigError(
                f"{ref.folder}: the adapter's weights have changed since it was loaded. Load it "
                "again with load_inplace"
            )
        return self.put(adapter)

    def has_room(self, leaving: set[str]) -> bool:
        """Return whether a slot is free or can be freed; if not, mark one more resident as
        leaving.
        """
        if self.free or any(not resident.users for resident in self.residents.values()):
            return True
        staying = [digest for digest in self.residents if digest not in leaving]
        if staying:
            leaving.add(min(staying, key=lambda digest: len(self.residents[digest].users)))
        return False

    def put(self, adapter: PackedAdapter) -> Resident:
        """Put an adapter into a slot, between two steps; requires `has_room`."""
        if not self.free:
            self.drop(next(d for d, resident in self.residents.items() if not resident.users))
        # It was also loaded by name
        if (future := self.coming.pop(adapter.digest, None)) is not None:
            future.cancel()
        resident = Resident(self.free.pop())
        self.slots.put(resident.slot, adapter)
        self.residents[adapter.digest] = resident
        return resident

    def use(self, digest: str, resident: Resident, choices: list[Request]) -> None:
        self.residents.move_to_end(digest)
        for request in choices:
            request.slot = resident.slot
            resident.users.add(request.id)

    def load(self, folder: str) -> None:
        """Read an adapter for later requests."""
        self.loading.append((folder, self.thread.submit(self.read, Path(folder))))

    def loaded(self) -> Iterator[tuple[str, AdapterRef | str]]:
        """Yield folders that were read, each with the adapter's reference or an error message."""
        while self.loading and self.loading[0][1].done():
            folder, future = self.loading.pop(0)
            try:
                yield folder, self.welcome(folder, future.result())
            except Exception as e:  # for example too little memory
                if not isinstance(e, ConfigError):
                    log.exception("%s: adapter cannot be read", escaped(folder))
                yield folder, words_of(e)

    def welcome(self, folder: str, adapter: PackedAdapter) -> AdapterRef:
        """Register an adapter for new requests, and put it into a slot if one is free."""
        self.forgotten.discard(adapter.digest)
        if self.free and adapter.digest not in self.residents:
            self.put(adapter)
        return AdapterRef(folder, adapter.digest, adapter.rank)

    def forget(self, digest: str) -> None:
        """Free the slot of an adapter that new requests no longer name, once its last request
        ends.
        """
        self.forgotten.add(digest)
        self.drop_if_forgotten(digest)

    def release(self, request: Request) -> None:
        """Release a request that has ended, whether it waited or ran."""
        if request.adapter is None:
            return
        for id, choices in [*self.waiting.items()]:
            if request in choices:
                choices.remove(request)
                if not choices:
                    del self.waiting[id]
        digest = request.adapter.digest
        if digest in self.residents:
            self.residents[digest].users.discard(request.id)
        elif digest in self.coming and not self.is_wanted(digest):
            self.coming.pop(digest).cancel()
        self.drop_if_forgotten(digest)

    def drop_if_forgotten(self, digest: str) -> None:
        resident = self.residents.get(digest)
        is_used = self.is_wanted(digest) or (resident is not None and bool(resident.users))
        if digest in self.forgotten and not is_used:
            self.forgotten.remove(digest)
            if resident is not None:
                self.drop(digest)

    def is_wanted(self, digest: str) -> bool:
        """Return whether a request waits for the adapter."""
        each = (choices[0].adapter for choices in self.waiting.values())
        return any(ref is not None and ref.digest == digest for ref in each)

    def drop(self, digest: str) -> None:
        slot = self.residents.pop(digest).slot
        self.slots.put(slot, None)
        self.free.append(slot)

    def wait(self, seconds: float) -> None:
        """Wait until an adapter was read, at most `seconds`."""
        loading = (future for _, future in self.loading)
        wait([*self.coming.values(), *loading], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def words_of(error: Exception) -> str:
    """Return an error as printable text, whatever a file contains."""
    return escaped(str(error) or type(error).__name__)[:LONGEST]


def use_one_core() -> None:
    torch.set_num_threads(1)  # only for this thread
