"""The acceptance with which new servers begin, and how it is measured."""

import pytest

from specserve_bench import priors
from specserve_drafters.base import SOURCES
from specserve_drafters.trie import KNOWN_WEIGHT, NUM_BINS, BinCounts, shipped_prior
from tests.drafters.native_tries import OpenCalibration
from tests.drafters.oracle_trie import Calibration


def test_each_model_counts_equally():
    one = {"a": [BinCounts(3, 10 * priors.MOST, 5 * priors.MOST, 8 * priors.MOST)]}
    other = {"a": [BinCounts(3, 4.0, 1.0, 2.0)], "b": [BinCounts(0, 1.0, 1.0, 1.0)]}
    most = priors.MOST
    assert priors.together([one, other]) == {
        "a": [BinCounts(3, most + 4, most / 2 + 1, round(0.8 * most + 2, 2))],
        "b": [BinCounts(0, 1.0, 1.0, 1.0)],
    }


def test_the_shipped_file_has_the_usual_sources():
    shipped = shipped_prior()
    assert {"ngram", "suffix", "recycle", "prediction", "grammar", "model"} <= shipped.keys()
    known = {*SOURCES, "model", "eagle"}
    assert {source.removeprefix("children by ") for source in shipped} <= known
    for bins in shipped.values():
        assert all(0 <= bin.kind < NUM_BINS for bin in bins)
        assert all(0 <= bin.hits <= bin.tries * 1.001 for bin in bins)


@pytest.mark.parametrize("make", [Calibration, OpenCalibration])
def test_a_scope_begins_with_it_and_learns_on(make):
    calibration, plain = make(shipped_prior()), make()
    tries = [c.trie(0) for c in (calibration, plain)]
    nodes = [trie.add(0, 5, 0.9, "ngram") for trie in tries]
    assert tries[0].p[nodes[0]] != tries[1].p[nodes[1]] == pytest.approx(0.9)
    assert max(bin.tries for bin in calibration.counts()["ngram"]) <= KNOWN_WEIGHT
    for _ in range(300):
        trie = calibration.trie(0)
        trie.add(0, 5, 0.9, "ngram")
        trie.observe([6])
    trie = calibration.trie(1)
    node = trie.add(0, 5, 0.9, "ngram")
    assert trie.p[node] < 0.2
