"""What a grammar forbids enters no tree, and what it forces is guessed and gone on from."""

import numpy as np
import pytest

from specserve_drafters.candidates import ROOT, Candidate
from specserve_drafters.grammar import GrammarSource
from specserve_drafters.model_source import ModelSource, RequestTrie
from specserve_drafters.trie import DROPPED
from tests.drafters.oracle_trie import Calibration, Trie
from tests.drafters.test_model import Script, ask, paths
from tests.drafters.test_model_source import EveryLevel


class Texts:
    """Rules that allow some texts only."""

    def __init__(self, *texts):
        self.texts = [list(text) for text in texts]

    def after(self, path):
        n = len(path)
        return {text[n] for text in self.texts if text[:n] == [*path] and len(text) > n}

    def allows(self, path, token):
        return token in self.after(path)

    def forced(self, path):
        tokens = []
        while len(next_ids := self.after([*path, *tokens])) == 1:
            tokens += next_ids
        return tokens

    def mask(self, path):
        return np.array([sum(1 << token for token in self.after(path))], np.int32)


class Chains(Script):
    """May be given nodes below others of the same call."""

    def expand(self, nodes):
        self.calls.append(nodes)
        new = []
        for id, tokens, parents in nodes:
            for token, parent in zip(tokens, parents, strict=True):
                new.append([*self.paths[id][parent], token])
                self.paths[id].append(new[-1])
        return [*range(len(nodes))], self.logits(new)


def alike(text):
    return [0.25, 0.25, 0.25, 0.25]


@pytest.fixture
def rules():
    return Texts([0, 1, 2, 3, 1], [0, 1, 2, 3, 2], [3, 3])


@pytest.fixture
def trie(rules):
    return Trie(Calibration(), 0, rules)


@pytest.fixture
def grammar(rules):
    source = GrammarSource()
    source.constrain(0, rules)
    return source


def texts_of(trie):
    return sorted(trie.path(node) for node in range(1, len(trie) + 1))


def test_what_is_forbidden_is_no_candidate_nor_is_what_comes_after(trie):
    candidates = [
        Candidate(0, 0, 0.9, "a"),
        Candidate(2, 1, 0.9, "a"),  # forbidden after 0
        Candidate(2, 2, 0.9, "a"),
        Candidate(1, 1, 0.9, "a"),
        Candidate(1, 0, 0.9, "a"),
    ]
    assert trie.merge(candidates) == [1, DROPPED, DROPPED, 2, DROPPED]
    assert texts_of(trie) == [[0], [0, 1]]
    trie.branch(ROOT, [(0, 0.5), (1, 0.4), (3, 0.1)], "b")
    assert texts_of(trie) == [[0], [0, 1], [3]]


def test_it_promises_what_it_forces_and_nothing_of_requests_without_a_grammar(grammar):
    grammar.constrain(1, Texts([2, 2, 2]))
    assert [grammar.expected_accepted(id, ask().known) for id in (0, 1, 2)] == [0.0, 3.0, 0.0]
    none, forced, unknown = grammar.candidates([ask(0), ask(1, limit=2), ask(2)])
    assert not none and not unknown
    assert forced == [Candidate(2, 0, 1.0, "grammar"), Candidate(2, 1, 1.0, "grammar")]


def test_it_goes_on_where_paths_of_others_end(trie, grammar):
    proposed = {}
    trie.merge([Candidate(0, 0, 0.5, "ngram")])
    grammar.extend(trie, ask(limit=8), proposed)
    assert texts_of(trie) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]] and proposed == {"grammar": 3}
    grammar.extend(trie, ask(limit=8), proposed)
    assert proposed == {"grammar": 3}, "only what is new is gone on from"
    trie.merge([Candidate(3, 0, 0.5, "ngram")])
    grammar.extend(trie, ask(limit=8), proposed)
    assert [3, 3] in texts_of(trie)


def test_it_draft_tokens_no_further_than_the_limit(trie, grammar):
    trie.merge([Candidate(0, 0, 0.5, "ngram")])
    grammar.extend(trie, ask(limit=3), {})
    assert texts_of(trie) == [[0], [0, 1], [0, 1, 2]]


def test_the_draft_model_runs_a_forced_path_at_once_and_draft_tokens_behind_it(trie, grammar):
    script, request_tries = Chains(alike), RequestTrie(ask(limit=8), trie, {})
    ModelSource("model", script, 3, 4, 1.0).grow([request_tries], EveryLevel(), [grammar])
    [[first], *_] = script.calls
    assert first.tokens == [3, 3, 0, 1, 2, 3] and first.parents == [0, 1, 0, 3, 4, 5]
    assert [0, 1, 2, 3, 1] in texts_of(trie) and [0, 1, 2, 3, 2] in texts_of(trie)
    last = trie.children[trie.children[trie.children[trie.children[ROOT][0]][1]][2]][3]
    assert [trie.expanded[node] for node in (*ancestors(trie, last), last)] == [3, 4, 5, 6]
    draft = trie.draft(range(1, len(trie) + 1)).draft
    assert sorted(paths(draft)[1:]) == texts_of(trie)


def ancestors(trie, node):
    found = []
    while (node := trie.parents[node]) != ROOT:
        found.insert(0, node)
    return found
