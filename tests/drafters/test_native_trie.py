"""Tries, scores and selections in C++, against those in Python: the same bits."""

import sys
import threading
from array import array
from math import log, nan

from hypothesis import given
from hypothesis import strategies as st

from specserve_drafters.candidates import MAX_NODES, ROOT, Candidate, CandidateColumns
from specserve_drafters.trie import DROPPED, BinCounts, begun_with
from tests.drafters.asks import Asks, RequestCandidates
from tests.drafters.native_tries import OpenCalibration
from tests.drafters.oracle_trie import Calibration
from tests.drafters.test_grammar import Texts

SOURCES = "a", "b", "model"
TOKENS = st.integers(0, 3)
SCORES = st.one_of(st.floats(0, 1), st.sampled_from([None, nan, -1.0, 2.0, 0.35]))
PRIOR = {"b": [BinCounts(9, 100.0, 20.0, 50.0), BinCounts(40, 3.0, 3.0, 2.0)]}


@st.composite
def candidates(draw):
    source, found = draw(st.sampled_from(SOURCES)), []
    for k in range(draw(st.integers(0, 8))):
        number = draw(st.sampled_from([0, 0, 1, 7]))
        found.append(Candidate(draw(TOKENS), draw(st.integers(0, k)), draw(SCORES), source, number))
    return found


def chance(of):
    return st.one_of(st.none(), of)


# What happens to a request in a step.
events = st.fixed_dictionaries(
    {
        "merges": st.lists(st.tuples(candidates(), st.integers(0, 5)), max_size=3),
        "model": chance(st.dictionaries(TOKENS, st.floats(0, 1), max_size=3)),
        "limit": st.sampled_from([0, 1, 3, MAX_NODES]),
        "depth": st.sampled_from([1, 2, MAX_NODES]),
        "behind": st.sampled_from([0.0, 0.0, 0.0, 0.4, 2.0]),
        "after": st.lists(TOKENS, min_size=1, max_size=4),
        "num_ids": st.sampled_from([None, None, 2]),
        "rules": st.sampled_from([None, None, Texts([0, 1, 2], [1, 1], [3, 0, 0])]),
        "ends": st.sampled_from([None, None, None, "forget", "drop"]),
    }
)
steps = st.lists(
    st.tuples(st.lists(events, min_size=1, max_size=3), st.integers(0, 12)), max_size=6
)


def same(values):
    one, other = values
    assert one == other
    return one


def learnt(calibration):
    """The counts that differ from the prior: a source may have begun with it, or not so far."""
    begun = {source: [begun_with(one) for one in bins] for source, bins in PRIOR.items()}
    return {s: bins for s, bins in calibration.counts().items() if bins != begun.get(s)}


def columns(trie):
    return trie.tokens, trie.parents, trie.depths, trie.expanded, trie.p, trie.values


def grown(tries, event):
    """Add what the sources say; each level of the model runs the children of the one before."""
    for found, below in event["merges"]:
        below = min(below, same(len(trie) for trie in tries))
        same(trie.merge(found, below) for trie in tries)
        same(columns(trie) for trie in tries)
    nodes = [ROOT]
    for _ in range(2 if event["model"] is not None else 0):
        if not nodes:
            break
        same(trie.reaches(nodes, "model") for trie in tries)
        tokens = [[*event["model"]]] * len(nodes)
        log_p = [[log(max(p, 1e-6)) for p in event["model"].values()]] * len(nodes)
        levels = [t.branch_each([(t, n) for n in nodes], tokens, log_p, "model") for t in tries]
        nodes = [node for own in same(levels).nodes for node in own]
        same(columns(trie) for trie in tries)
    same(trie.reach(ROOT, "b") for trie in tries)
    same([trie.sources(node) for node in range(1, len(trie) + 1)] for trie in tries)


@given(steps)
def test_both_select_and_learn_the_same_whatever_is_proposed(steps):
    both = Calibration(PRIOR), OpenCalibration(PRIOR)
    for requests, most in steps:
        tries = []
        for id, event in enumerate(requests):
            tries.append([c.trie(id, event["rules"], event["num_ids"]) for c in both])
            grown(tries[-1], event)
        asks = [
            Asks(
                RequestCandidates(pair[form], e["limit"], e["depth"], e["behind"])
                for pair, e in zip(tries, requests, strict=True)
            )
            for form in (0, 1)
        ]
        found = same(own.select(most) for own in asks)
        chosen = found.by_request(len(found.nodes), len(requests))
        for pair, nodes, event in zip(tries, chosen, requests, strict=True):
            drafted = [trie.draft(nodes) for trie in pair]
            same(one[:2] for one in drafted)
            same([(names[0], {*names}) for names in one.sources] for one in drafted)
            same(columns(trie) for trie in pair)
            same(trie.observe(event["after"]) for trie in pair)
        for id, event in enumerate(requests):
            for calibration in both:
                if event["ends"] == "forget":
                    calibration.forget(id)
                elif event["ends"] == "drop":
                    calibration.drop("a")
        same(learnt(calibration) for calibration in both)


@given(events)
def test_a_cleared_trie_is_as_a_new_one(event):
    """Also if it had other nodes, scores and questions."""
    tries = []
    for calibration in (Calibration(PRIOR), OpenCalibration(PRIOR)):
        used, new = (calibration.trie(id, event["rules"], event["num_ids"]) for id in range(2))
        used.merge([Candidate(0, ROOT, 0.5, "a"), Candidate(1, 1, 0.5, "b")])
        used.ask(ROOT, "model")
        used.merge([Candidate(0, ROOT, 0.9, "b")])  # it is not settled
        used.num_continued = 1
        used.clear()
        assert used.num_continued == 0
        tries.append((used, new))
    for pair in tries:
        grown(pair, event)
        same(trie.settle() for trie in pair)
    grown([new for _, new in tries], {"merges": [], "model": None})
    same(used.observe(event["after"]) for used, _ in tries)


def test_columns_are_merged_as_their_rows_are():
    found = CandidateColumns(
        array("i", [5, 6, 9, 7]), array("i", [0, 1, 1, 3]), array("d", [0.5, nan, 0.2, 0.9]), "a"
    )
    rows = [*found]
    assert rows[0] == found[0] == Candidate(5, 0, 0.5, "a") and found[2:] == rows[2:]
    by_row, at_once = (OpenCalibration().trie(0, num_ids=9) for _ in range(2))
    assert by_row.merge(rows) == at_once.merge(found) == [1, 2, DROPPED, DROPPED]
    assert columns(by_row) == columns(at_once)


def test_a_trie_is_usable_after_its_request_was_forgotten():
    calibration = OpenCalibration()
    trie = calibration.trie(3)
    trie.merge([Candidate(5, 0, 0.5, "a")])
    calibration.forget(3)
    assert trie.observe([5]) == 1 and calibration.counts()["a"][0].hits == 1


def test_many_sources_share_bits():
    num_sources, trie = 60, OpenCalibration().trie(0)
    for k in range(num_sources):
        trie.merge([Candidate(k, 0, 0.5, f"source {k}")])
    names = trie.draft(range(1, num_sources + 1)).sources
    assert [each[0] for each in names] == [f"source {k}" for k in range(num_sources)]


def test_threads_share_no_buffers():
    """Each thread's results are its own, also if another thread runs between call and copy."""
    errors = []

    def work(token):
        trie = OpenCalibration().trie(0)
        nodes = trie.merge([Candidate(token, k, 0.9, "a") for k in range(30)])
        for _ in range(2000):
            drafted = trie.draft(nodes).draft
            if drafted.tokens != [token] * 30:
                errors.append(drafted.tokens)

    threads = [threading.Thread(target=work, args=(token,)) for token in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
