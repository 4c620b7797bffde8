"""The n-gram source, lookups of the suffix source, tries, scores and selections in C++.

`lookup.py` and `suffix.py` have the same in Python. They define the results, and serve machines
that cannot compile.
"""

import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from ctypes import byref
from itertools import accumulate, chain, pairwise
from math import nan
from typing import Any, ClassVar

from specserve_drafters import lookup, suffix, trie
from specserve_drafters.base import DraftRequest, DraftSource
from specserve_drafters.candidates import (
    MAX_NODES,
    ROOT,
    Candidate,
    CandidateColumns,
    Rules,
)
from specserve_drafters.tenants import PerTenantSource
from specserve_drafters.trie import (
    CHILDREN_BY,
    NUM_BINS,
    AcceptancePrior,
    BaseTrie,
    BinCounts,
    TrieLevel,
)


def ngram_sources() -> PerTenantSource:
    """Return the n-gram source of `auto`, whose statistics are kept per tenant scope."""
    return PerTenantSource(ngram_source, lookup.NgramSource.name)


def ngram_source() -> DraftSource:
    from specserve_kernels.cpu import BuildError

    try:
        return NativeSource()
    except BuildError:
        return lookup.NgramSource()


class NativeSource(DraftSource):
    """`lookup.NgramSource` in C++."""

    name = lookup.NgramSource.name
    is_estimating: ClassVar[bool] = True

    def __init__(self) -> None:
        # A process that only checks a drafter's name and options needs no kernels.
        from specserve_kernels.cpu.drafting import NgramSettings, ngram_functions

        settings = NgramSettings(
            lookup.MAX_TOKENS,
            lookup.AT_ONCE,
            lookup.LEAST_SIZE,
            lookup.MAX_MATCHES,
            lookup.MAX_VISITS,
            lookup.ENOUGH,
            lookup.SUM_EVERY,
            lookup.MIX,
            lookup.PRIOR,
            lookup.MEMORY,
            tuple(lookup.LIKELY),
            tuple(lookup.SURE),
        )
        self.native = ngram_functions()
        self.source = self.native.new(byref(settings))
        self.address = self.native.native(self.source)
        weakref.finalize(self, self.native.free, self.source)
        room = 2 * MAX_NODES
        self.tokens, self.parents = array("i", [0] * room), array("i", [0] * room)
        self.scores = array("d", [0.0] * room)
        self.out = [out.buffer_info()[0] for out in (self.tokens, self.parents, self.scores)]

    def expected_accepted(self, id: int, text: "array[int]") -> float:
        return self.native.follow(self.source, id, *text.buffer_info())

    def candidates(self, items: Sequence[DraftRequest]) -> list[CandidateColumns]:
        return [self.look_up(item.id, item.known, item.limit) for item in items]

    def look_up(self, id: int, text: "array[int]", limit: int) -> CandidateColumns:
        assert 0 <= limit <= MAX_NODES, "the limit exceeds the buffers"
        n = self.native.propose(self.source, id, *text.buffer_info(), limit, *self.out)
        return CandidateColumns(self.tokens[:n], self.parents[:n], self.scores[:n], self.name)

    def forget(self, id: int) -> None:
        self.native.forget(self.source, id)

    def reset(self) -> None:
        self.native.reset(self.source)


def suffix_source() -> suffix.SuffixSource:
    from specserve_kernels.cpu import BuildError

    try:
        return NativeSuffixSource()
    except BuildError:
        return suffix.SuffixSource()


class NativeOutputIndex(suffix.OutputIndex):
    """`suffix.OutputIndex` with lookups in C++."""

    def __init__(self) -> None:
        from specserve_kernels.cpu.drafting import SuffixSettings, suffix_functions

        super().__init__()
        self.native = suffix_functions()
        bounds = suffix.END, suffix.MAX_MATCHES, suffix.MAX_VISITS
        columns = suffix.LENGTHS, tuple(suffix.MIX), tuple(lookup.SURE)
        self.settings = SuffixSettings(*bounds, *columns)
        self.point()

    def point(self) -> None:
        """Get the addresses of the parts: they change with each text."""
        from specserve_kernels.cpu.drafting import OutputsPart

        found = (OutputsPart * len(self.parts))()
        for own, part in zip(found, self.parts, strict=True):
            own.tokens, own.size = part.tokens.buffer_info()[0], part.size
            for k in range(len(suffix.LENGTHS)):
                own.newest[k] = part.newest[k].buffer_info()[0]
                own.before[k] = part.before[k].buffer_info()[0]
        self.pointers = found
        self.given = byref(self.settings), byref(found), len(found)

    def add(self, text: "array[int]", num_context: int = 0) -> None:
        super().add(text, num_context)
        self.point()

    def matches(self, text: "array[int]", most: int) -> tuple[int, list[suffix.SuffixPlace]]:
        out, (address, size) = BUFFERS, text.buffer_info()
        end = address + text.itemsize * size
        code = self.native.match(*self.given, end, size, most, out.of_ints[0])
        number, length = divmod(code, 64)
        places = out.ints[0]
        return length, [(self.parts[places[2 * k]], places[2 * k + 1]) for k in range(number)]

    def candidates(self, text: "array[int]", limit: int) -> CandidateColumns:
        assert 0 <= limit <= MAX_NODES, "the limit exceeds the buffers"
        out, (address, size) = BUFFERS, text.buffer_info()
        end, columns = address + text.itemsize * size, (*out.of_ints[:2], out.of_doubles)
        n = self.native.propose(*self.given, end, size, limit, *columns)
        tokens, parents = (column[:n] for column in out.ints[:2])
        return CandidateColumns(tokens, parents, out.doubles[:n], suffix.NAME)


class NativeSuffixSource(suffix.SuffixSource):
    """`suffix.SuffixSource` with lookups in C++."""

    make_index: ClassVar[type[suffix.OutputIndex]] = NativeOutputIndex

    def __init__(self) -> None:
        NativeOutputIndex()  # BuildError if there is no library
        super().__init__()


class NativeCalibration:
    """The bins of all sources, the gain of agreement, and every request's calibrators, in C++."""

    def __init__(self, prior: AcceptancePrior | None = None) -> None:
        from specserve_kernels.cpu import drafting

        self.types = drafting
        settings = drafting.TrieSettings(
            trie.BOUNDS,
            *(trie.LEAST, trie.MOST, trie.UNSCORED, trie.FINDS),
            *(trie.PRIOR, trie.MEMORY, trie.SHIFT_PRIOR, trie.SHIFT_MEMORY),
            *(trie.MAX_SHIFT, trie.WORTH, trie.WORTH_RATE),
        )
        self.prior, self.native = prior or {}, drafting.trie_functions()
        self.handle = self.native.calibration(byref(settings))
        weakref.finalize(self, self.native.free_calibration, self.handle)
        self.numbers: dict[str, int] = {}  # of sources, in the order of their first use
        self.names: list[str] = []
        self.requests: dict[int, NativeCalibrators] = {}

    def number(self, source: str) -> int:
        """Return a source's number. A new one begins with its prior."""
        number = self.numbers.get(source)
        if number is None:
            number = self.numbers[source] = self.native.add_source(self.handle)
            self.names.append(source)
            for kind, tries, hits, scores in self.prior.get(source, ()):
                begun = trie.begun_with(BinCounts(kind, tries, hits, scores))
                self.native.set_bin(self.handle, number, *begun)
        return number

    def calibrators(self, id: int) -> "NativeCalibrators":
        """Return the request's calibrators; they are kept until `forget`."""
        found = self.requests.get(id)
        if found is None:
            found = self.requests[id] = NativeCalibrators(self)
        return found

    def trie(self, id: int, rules: Rules | None = None, num_ids: int | None = None) -> "NativeTrie":
        return NativeTrie(self, id, rules, num_ids)

    def forget(self, id: int) -> None:
        self.requests.pop(id, None)

    def drop(self, source: str) -> None:
        """Drop what was learned of a source: another one has its name now."""
        if source in self.numbers:
            number = self.numbers[source]
            self.native.clear_bins(self.handle, number)
            for calibrators in self.requests.values():
                self.native.drop_shift(calibrators.handle, number)

    def bins(self, source: str) -> list[BinCounts]:
        """Return the bins with draft tokens of a source."""
        out = array("d", [0.0] * (3 * NUM_BINS))
        self.native.read_bins(self.handle, self.numbers[source], out.buffer_info()[0])
        rows = zip(range(NUM_BINS), out[::3], out[1::3], out[2::3], strict=True)
        return [BinCounts(*row) for row in rows if row[1]]

    def counts(self) -> dict[str, list[BinCounts]]:
        return {source: bins for source in self.names if (bins := self.bins(source))}

    def table(self) -> dict[str, list[dict[str, float]]]:
        return trie.table(self.counts())


class NativeCalibrators:
    """The calibrators of one request."""

    def __init__(self, calibration: NativeCalibration) -> None:
        native = calibration.native
        self.calibration = calibration  # it is freed later than this
        self.free, self.handle = native.free_calibrators, native.calibrators(calibration.handle)

    def __del__(self) -> None:
        self.free(self.handle)


ROOM = 1 << 12  # draft tokens of a step that are selected


class Buffers(threading.local):
    """Outputs of calls. A thread copies what a call has written before its next call."""

    def __init__(self) -> None:
        self.ints = [array("i", [0] * ROOM) for _ in range(3)]
        self.doubles = array("d", [0.0] * ROOM)
        self.of_ints = [column.buffer_info()[0] for column in self.ints]  # addresses
        self.of_doubles = self.doubles.buffer_info()[0]
        self.reals = [array("d", [0.0] * ROOM) for _ in range(3)]
        self.level_columns: Any = None

    @property
    def level(self) -> Any:
        """Return the addresses for levels."""
        if self.level_columns is None:
            from specserve_kernels.cpu.drafting import LevelColumns

            reals = [column.buffer_info()[0] for column in self.reals]
            self.level_columns = byref(LevelColumns(*reals, *self.of_ints[:3]))
        return self.level_columns


BUFFERS = Buffers()
COLUMNS = "tokens", "parents", "depths", "expanded", "p", "values"


def columns_of(candidates: Sequence[Candidate]) -> CandidateColumns | None:
    """Return candidates by column; None if there are none, or if columns do not hold all of it."""
    if not candidates:
        return None
    tokens, parents, p, sources, expanded = zip(*candidates, strict=True)
    if any(expanded) or len(set(sources)) > 1:
        return None
    scores = array("d", [nan if x is None else x for x in p])
    return CandidateColumns(array("i", tokens), array("i", parents), scores, sources[0])


class NativeTrie(BaseTrie):
    """A trie in C++."""

    def __init__(
        self,
        calibration: NativeCalibration,
        id: int,
        rules: Rules | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.calibration, self.native = calibration, calibration.native
        self.number = calibration.number
        self.rules, self.num_ids = rules, num_ids
        self.calibrators = calibration.calibrators(id)  # it is freed later than this
        most = 2**31 - 1 if num_ids is None else num_ids
        self.handle = self.native.trie(self.calibrators.handle, most)

    def __del__(self) -> None:
        self.native.free_trie(self.handle)

    def __len__(self) -> int:
        return self.native.size(self.handle) - 1

    def __getattr__(self, name: str) -> Any:
        """Return one of COLUMNS."""
        if name not in COLUMNS:
            raise AttributeError(name)
        self.native.columns(self.handle, byref(columns := self.calibration.types.TrieColumns()))
        return getattr(columns, name)[: len(self) + 1]

    def child(self, node: int, token: int) -> int | None:
        found = self.native.child(self.handle, node, token)
        return None if found < 0 else found

    def children_of(self, node: int) -> list[int]:
        out = BUFFERS
        n = self.native.children(self.handle, node, ROOM, out.of_ints[0])
        return out.ints[0][:n].tolist()

    def sources(self, node: int) -> list[str]:
        out = BUFFERS
        n = self.native.sources(self.handle, node, ROOM, out.of_ints[0])
        return [self.calibration.names[number] for number in out.ints[0][:n]]

    def set_number(self, node: int, number: int) -> None:
        self.native.set_number(self.handle, node, number)

    def add(self, parent: int, token: int, p: float | None, source: str) -> int:
        number = self.number(source)
        return self.native.add(self.handle, parent, token, nan if p is None else p, number)

    def merge(self, candidates: Iterable[Candidate], below: int = ROOT) -> list[int]:
        if self.rules is not None:
            return super().merge(candidates, below)
        if not isinstance(candidates, CandidateColumns):
            candidates = [*candidates]
            own = columns_of(candidates)
            if own is None:
                return super().merge(candidates, below)
        else:
            own = candidates
        n, out = len(own), BUFFERS
        assert n < ROOM, "the candidates exceed the buffers"
        each = own.tokens.buffer_info()[0], own.parents.buffer_info()[0], own.p.buffer_info()[0]
        number = self.number(own.source)
        self.native.merge(self.handle, number, n, *each, None, below, out.of_ints[0])
        return out.ints[0][1 : n + 1].tolist()

    def branch(self, node: int, scored: Iterable[tuple[int, float]], source: str) -> list[float]:
        tokens, p = array("i"), array("d")
        for token, score in self.allowed(node, scored):
            tokens.append(token)
            p.append(score)
        number, out = self.number(source), BUFFERS
        each = tokens.buffer_info()[0], p.buffer_info()[0], ROOM, out.of_doubles
        n = self.native.branch(self.handle, node, number, len(tokens), *each)
        return out.doubles[:n].tolist()

    def branch_each(
        self,
        rows: Sequence[tuple[BaseTrie, int]],
        tokens: Sequence[Sequence[int]],
        log_p: Sequence[Sequence[float]],
        source: str,
    ) -> TrieLevel:
        n, k, out = len(rows), len(tokens[0]), BUFFERS
        ids, scores = (
            array("i", chain.from_iterable(tokens)),
            array("d", chain.from_iterable(log_p)),
        )
        ran, by = array("q"), CHILDREN_BY + source
        for its, node in rows:
            ran.extend((its.handle, node, its.number(source), its.number(by)))
        given = ids.buffer_info()[0], scores.buffer_info()[0], trie.LEAST_VALUE, ROOM, out.level
        num_before = -1
        if all([its.rules is None for its, _ in rows]):
            num_before = self.native.branch_each(ran.buffer_info()[0], n, k, *given)
        if num_before < 0:
            return super().branch_each(rows, tokens, log_p, source)
        (likely, sizes, nodes), (before, values, reaches) = out.ints[:3], out.reals
        ends = [0, *accumulate(sizes[:n])]
        parts = [slice(begin, end) for begin, end in pairwise(ends)]
        of_values, of_reaches = [[c[part].tolist() for part in parts] for c in (values, reaches)]
        of_nodes, known = [nodes[part].tolist() for part in parts], before[:num_before].tolist()
        return TrieLevel(known, likely[:n].tolist(), of_nodes, of_values, of_reaches)

    def reaches(self, nodes: Sequence[int], source: str) -> list[float]:
        number, which = self.number(CHILDREN_BY + source), array("i", nodes)
        assert len(which) <= ROOM, "the nodes exceed the buffers"
        addresses, out = which.buffer_info()[0], BUFFERS
        self.native.reaches(self.handle, len(which), addresses, number, out.of_doubles)
        return out.doubles[: len(which)].tolist()

    def ask(self, node: int, source: str) -> None:
        by, number = self.number(CHILDREN_BY + source), self.number(source)
        self.native.ask(self.handle, node, by, number)
