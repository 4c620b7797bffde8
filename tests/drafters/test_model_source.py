"""Levels that a scripted draft model adds to what other sources have proposed."""

import pytest

from specserve_drafters.candidates import ROOT, Candidate
from specserve_drafters.model_source import ModelSource, RequestTrie
from tests.drafters.oracle_trie import Calibration, Trie
from tests.drafters.paths import path_value
from tests.drafters.test_model import Script, ask


class EveryLevel:
    """Runs all that there is; `values` are those of each level's children, after and before."""

    def __init__(self):
        self.values = []

    def first(self, reach):
        return [*range(len(reach))]

    def next(self, reach):
        return len(reach)

    def ran(self, values, before):
        self.values.append((values, before))


def test_it_goes_on_from_draft_tokens_that_only_others_make():
    """It says 0 or 1 everywhere, n-grams say 3: one of the three is run beside its own."""
    script, trie, levels = (
        Script(lambda text: [0.5, 0.5, 0, 0]),
        Trie(Calibration(), 0),
        EveryLevel(),
    )
    trie.merge([Candidate(3, ROOT, 0.9, "ngram")])
    ModelSource("model", script, 2, 3, 1.0).grow([RequestTrie(ask(limit=4), trie, {})], levels)
    assert sorted(script.calls[0][0].tokens) == [0, 1, 3]
    below = trie.children[trie.children[ROOT][3]]
    assert [trie.sources(node) for node in below.values()] == [["model"], ["model"]]
    told = [(len(values), len(before)) for values, before in levels.values]
    assert told == [(3, 1), (6, 0)], "what another had proposed was there before"


def test_a_level_is_reported_what_draft_tokens_were_worth_before_it_agreed():
    script, trie, levels = (
        Script(lambda text: [0.2, 0.8, 0, 0]),
        Trie(Calibration(), 0),
        EveryLevel(),
    )
    below, last = trie.merge([Candidate(1, ROOT, 0.9, "ngram"), Candidate(1, 1, 0.5, "ngram")])
    ModelSource("model", script, 2, 2, 1.0).grow([RequestTrie(ask(limit=4), trie, {})], levels)
    (first, before), (second, later) = levels.values
    assert before == [pytest.approx(0.9)] and later == [pytest.approx(0.45)]
    assert first[0] == path_value(trie, below) > 0.9 and second[0] == path_value(trie, last) > 0.5
