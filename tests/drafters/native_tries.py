"""Tries in C++ with all that a step does with them: the product calls it in C++, see plans.cpp."""

from array import array
from ctypes import c_int64, c_void_p

from specserve_drafters.candidates import ROOT, Draft
from specserve_drafters.native import NativeCalibration, NativeTrie
from specserve_kernels.cpu import build
from specserve_kernels.cpu.drafting import named
from tests.drafters.oracle_trie import ChosenDraft

P, N = c_void_p, c_int64


def call(name, *kinds):
    return named(build.library(), name, None, *kinds)


class OpenCalibration(NativeCalibration):
    def trie(self, id, rules=None, num_ids=None):
        return OpenTrie(self, id, rules, num_ids)


class OpenTrie(NativeTrie):
    def clear(self):
        handles = array("q", [self.handle])
        call("clear_tries", P, N)(handles.buffer_info()[0], 1)
        self.num_continued = 0

    def settle(self):
        call("settle", P)(self.handle)
        return self.values

    def observe(self, tokens):
        fields, after = array("q", (self.handle, len(tokens))), array("i", tokens)
        given = fields.buffer_info()[0], 1, after.buffer_info()[0]
        call("observe_each", P, N, P)(*given)
        return self.child(ROOT, tokens[0]) if tokens else None

    def draft(self, chosen):
        n, which, codes = len(chosen), array("i", chosen), array("Q", [0] * len(chosen))
        ints = [array("i", [0] * n) for _ in range(4)]
        columns = (column.buffer_info()[0] for column in (which, *ints, codes))
        call("draft", P, N, *[P] * 6)(self.handle, n, *columns)
        tokens, parents, numbers, order = (column.tolist() for column in ints)
        draft = Draft(tokens, parents, numbers if any(numbers) else [])
        return ChosenDraft(draft, order, [sources_of(self, code) for code in codes])


def sources_of(trie, code):
    """Return the sources of a draft token by their code: the first one, then the others."""
    names, first, bits = trie.calibration.names, code & 0xFF, code >> 8
    others = [n for n in range(len(names)) if bits >> n & 1 and n != first]
    return tuple(names[n] for n in (first, *others))
