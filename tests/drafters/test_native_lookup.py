"""The n-gram source in C++, against the one in Python: the same bits."""

import random
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters import DraftRequest, lookup
from specserve_drafters.lookup import NgramSource
from specserve_drafters.native import NativeCalibration, NativeSource, ngram_source
from specserve_kernels.cpu import BuildError, build
from tests.drafters.test_grammar import Texts

# Those of `lookup` that may bound what a short text needs; FEW is Python's alone.
BOUNDS = {
    "MAX_TOKENS": st.sampled_from([8, 64, 1 << 16]),
    "LEAST_SIZE": st.sampled_from([1, 8, 1 << 12]),
    "AT_ONCE": st.sampled_from([3, 30, 1 << 13]),
    "FEW": st.sampled_from([0, 64]),
    "MAX_MATCHES": st.sampled_from([1, 5, 16]),
    "MAX_VISITS": st.sampled_from([2, 64]),
    "ENOUGH": st.sampled_from([2, 4]),
}
TOKENS = 0, 1, 2**31 - 1

steps = st.lists(
    st.tuples(
        st.integers(0, 1),  # the request
        st.lists(st.sampled_from(TOKENS), max_size=8),  # its new tokens
        st.integers(0, 20),  # how many of its latest come again after them
        st.sampled_from([None, 0, 1, 7, 63]),  # the limit of guesses, if they are asked for
        st.sampled_from(["follow", "follow", "follow", "leave", "forget", "reset"]),
    ),
    max_size=60,
)


def both():
    return NgramSource(), NativeSource()


def same(values):
    one, other = values
    assert one == other
    return one


@given(steps, st.fixed_dictionaries(BOUNDS))
def test_both_promise_and_draft_the_same_however_texts_grew(steps, bounds):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bounds.items():
            patch.setattr(lookup, name, value)
        sources, texts = both(), {0: array("i"), 1: array("i")}
        for id, tokens, again, limit, what in steps:
            text = texts[id]
            text.extend(tokens)
            text.extend(text[len(text) - again :])
            if what == "follow":
                same(source.expected_accepted(id, text) for source in sources)
            if limit is not None:
                items = [DraftRequest(id, text, limit, 0.0, 0)]
                same([[*found] for found in source.candidates(items)] for source in sources)
                tries = [NativeCalibration().trie(id, num_ids=2) for _ in sources]
                same(s.add_candidates(items, [t]) for s, t in zip(sources, tries, strict=True))
                same((trie.tokens, trie.parents, trie.p) for trie in tries)
            if what == "forget":
                texts[id] = array("i")
                for source in sources:
                    source.forget(id)
            if what == "reset":
                for source in sources:
                    source.reset()


def test_draft_tokens_of_several_requests_are_added_at_once():
    texts = [array("i", [1, 2, 3, 4, 1, 2]), array("i", [9, 8]), array("i", [5, 6, 5])]
    items = [DraftRequest(id, text, 4, 0.0, 0) for id, text in enumerate(texts)]
    for rules in (None, Texts([3, 4])):  # tries with rules take them one by one
        tries = [NativeCalibration().trie(item.id) for item in items]
        tries[0].rules = rules
        assert NativeSource().add_candidates(items, tries) == [4, 0, 4]
        assert tries[0].tokens[1:] == ([3, 4, 1, 2] if rules is None else [3, 4])
        assert len(tries[1]) == 0 and tries[2].tokens[1:] == [6, 5, 6, 5]


@pytest.mark.parametrize("num_tokens", [1, 3, 300])
def test_both_promise_the_same_over_long_texts(num_tokens):
    """So long that one token again and again is sure to come, up to the last bit."""
    draw, sources, text = random.Random(0), both(), array("i", [0])
    most = 0.0
    while len(text) < 12000:
        begin = draw.randrange(len(text))
        copied = text[begin : begin + draw.randrange(1, 40)]
        for token in (*copied, draw.randrange(num_tokens)):
            text.append(token)
            if draw.randrange(4):  # some steps bring several tokens
                most = max(most, same(source.expected_accepted(0, text) for source in sources))
        same([*source.look_up(0, text, 16)] for source in sources)
    assert most == 17.0 or num_tokens > 1


def test_nothing_of_texts_outlives_a_reset():
    for source in both():
        text = array("i", [*range(40)] * 9)
        before = source.expected_accepted(0, text[:60])
        source.expected_accepted(0, text)
        assert source.expected_accepted(1, text[:60]) > before
        source.reset()
        assert source.expected_accepted(0, text[:60]) == before


# In a process of its own: one that has freed much gives new blocks the same memory.
MEMORY = """
from array import array
from pathlib import Path

from specserve_drafters.native import NativeSource


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


text, sources = array("i", range(400)), [NativeSource() for _ in range(1000)]
before = resident()
for id in range(1000):
    sources[0].expected_accepted(id, text)
    sources[0].forget(id)
assert resident() - before < 16 << 20, "of forgotten requests"
for source in sources:
    source.expected_accepted(0, text)
assert resident() - before > 48 << 20, "they hold nothing"
del source
sources.clear()
for _ in range(1000):
    NativeSource().expected_accepted(0, text)
assert resident() - before < 80 << 20, "of sources that are gone"
"""


def test_forgotten_requests_and_sources_are_freed():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_more_draft_tokens_than_there_is_room_for_are_refused():
    with pytest.raises(AssertionError, match="the limit exceeds the buffers"):
        NativeSource().look_up(0, array("i", [1, 1, 1]), 64)


def test_a_machine_that_cannot_compile_it_has_it_in_python(monkeypatch):
    assert isinstance(ngram_source(), NativeSource)

    def kernels():
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(build, "kernels", kernels)
    assert isinstance(ngram_source(), NgramSource)
