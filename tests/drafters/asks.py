"""Requests of a step with their candidates, as `choose` takes them: of slow tries, or of tries in
C++.
"""

from array import array
from ctypes import Structure, byref, c_double, c_int64, c_void_p

from specserve.speculation.constants import LEAST_EXPECTED
from specserve_drafters.candidates import Draft, Size, WeighedSizes
from specserve_drafters.trie import LEAST_VALUE
from specserve_kernels.cpu import build
from specserve_kernels.cpu.drafting import named
from tests.drafters import oracle_trie
from tests.drafters.native_tries import sources_of
from tests.drafters.oracle_trie import ChosenDraft, RequestCandidates, Selection

__all__ = ["Asks", "RequestCandidates", "Selection"]
ROOM = 1 << 12


class Columns(Structure):
    """`Outputs` in C++."""

    NAMES = (
        *("values", "places", "nodes", "counts", "expected"),
        *("tokens", "parents", "expanded", "order", "codes", "sizes"),
    )
    KINDS = "diiidiiiiQd"
    _fields_ = [(name, c_void_p) for name in NAMES]


class Asks(list):
    @property
    def is_native(self):
        return bool(self and self[0].trie.handle)

    def weigh(self, most, step, costs):
        if not self.is_native:
            self.found, known, hoped = oracle_trie.weigh(self, step, costs, most)
            return WeighedSizes(known, hoped)
        given = min(most, ROOM), LEAST_VALUE, LEAST_EXPECTED, byref(step.native)
        self.found, _ = self.call("weigh", *given, byref(costs.native))
        size, gain, seconds, rate, *hoped = self.out["sizes"][:8]
        known = Size(int(size), gain, seconds, rate)
        return WeighedSizes(known, Size(int(hoped[0]), *hoped[1:]))

    def select(self, most):
        if not self.is_native:
            return oracle_trie.best(self, most)
        return self.call("select", min(most, ROOM), LEAST_VALUE)[0]

    def cut(self, size):
        """Return the draft of each request that has the first `size` nodes of the selection, and
        the sum of its likely values.
        """
        found = self.found
        if not self.is_native:
            expected = [0.0] * len(self)
            for place, value in zip(found.places[:size], found.values, strict=False):
                expected[place] += value if value > LEAST_EXPECTED else 0.0
            nodes = found.by_request(size, len(self))
            drafts = [ask.trie.draft(own) for ask, own in zip(self, nodes, strict=True)]
            return [*zip(drafts, expected, strict=True)]
        self.call("cut", size, LEAST_EXPECTED, found=found)
        return [*zip(self.drafts(size), self.out["expected"][: len(self)].tolist(), strict=True)]

    def drafts(self, size):
        out, end = self.out, 0
        for ask, count in zip(self, out["counts"], strict=False):
            begin, end = end, end + count
            names = ("tokens", "parents", "expanded", "order", "codes")
            tokens, parents, numbers, nodes, codes = (out[n][begin:end].tolist() for n in names)
            sources = [sources_of(ask.trie, code) for code in codes]
            draft = Draft(tokens, parents, numbers if any(numbers) else [])
            yield ChosenDraft(draft, nodes, sources)

    def call(self, name, *given, found=None):
        """Call a function of tries.cpp; return the selection and what the function returns."""
        each = zip(Columns.NAMES, Columns.KINDS, strict=True)
        self.out = out = {name: array(kind, [0] * ROOM) for name, kind in each}
        if found is not None:
            for column, known in zip(("values", "places", "nodes"), found, strict=True):
                out[column][: len(known)] = known
        limits = [x for ask in self for x in (ask.trie.handle, ask.limit, ask.max_depth)]
        asked, behind = array("q", limits), array("d", [ask.behind for ask in self])
        columns = Columns(*(column.buffer_info()[0] for column in out.values()))
        at, p, n, x = asked.buffer_info()[0], c_void_p, c_int64, c_double
        late = behind.buffer_info()[0]
        if name == "cut":
            named(build.library(), "cut", None, p, n, n, x, p)(
                at, len(self), *given, byref(columns)
            )
            return found, None
        kinds = {"select": (n, x), "weigh": (n, x, x, p, p)}[name]
        run = named(build.library(), name, n, p, p, n, *kinds, p)
        number = run(at, late, len(self), *given, byref(columns))
        return Selection(*(out[c][:number] for c in ("values", "places", "nodes"))), number
