"""Of several models the most promising guesses first, and has the merit of what both guess."""

from collections import Counter
from itertools import accumulate
from operator import mul
from types import SimpleNamespace

import msgspec
import pytest

from specserve.models.eagle_head import load_eagle_head
from specserve.speculation import adaptive_speculator
from specserve.speculation.adaptive_speculator import in_order
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.draft_depth import DraftDepthController, DraftDepthPolicy
from specserve.speculation.planner import AcceptanceStats
from specserve.speculation.verify import DraftSources
from specserve_drafters.candidates import ROOT, Candidate, Draft
from specserve_drafters.trie import FINDS, Calibration, Trie
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import Case, Watch, engine_for, load_small
from tests.models.eagle_heads import write_head
from tests.speculation.test_head_model import PROMPT, sampling

ROOTS, TARGET, FIRST, LEVEL = 2, 0.05, 0.009, 0.004  # requests, and seconds


def asked(name, rate, by_costs=0.0):
    model_source = SimpleNamespace(name=name)
    return SimpleNamespace(
        model_source=model_source, rate=lambda texts: rate if texts else by_costs
    )


def names(order):
    return [one.model_source.name for one in order]


def test_the_most_promising_is_first():
    assert names(in_order([asked("a", 40.0), asked("b", 60.0)], True)) == ["b", "a"]
    assert names(in_order([asked("a", 40.0)], True)) == ["a"]


def test_next_to_others_no_texts_decide_who_is_first():
    growing = [asked("a", 40.0, by_costs=2.0), asked("b", 60.0, by_costs=1.0)]
    assert names(in_order(growing, False)) == ["a", "b"]


def costs_of(seconds):
    costs = StepCosts(64)
    for rows in (1, 2, 3, 4):
        for _ in range(4):
            costs.observe(rows, 0, ROOTS, seconds)
    return costs


class Model:
    """Takes the same time for any number of rows."""

    def __init__(self, level):
        self.first_costs, self.costs, self.num_rows = costs_of(FIRST), costs_of(level), 0

    def usual_rows(self, request):
        return 1

    def missing(self, request):
        return 0


@pytest.mark.parametrize("level", [LEVEL, 0.04])
@pytest.mark.parametrize("chances", [(0.9, 0.9), (0.9, 0.1), (0.2, 0.9)])
def test_a_model_promises_what_its_best_number_of_levels_brings(level, chances):
    step = Step(rows=ROOTS, context=0, requests=ROOTS, num_roots=ROOTS)
    growth = DraftDepthPolicy(costs_of(TARGET), step, [])
    requests, depth = [SimpleNamespace(token_ids=[], num_left=9)] * ROOTS, 6
    levels = DraftDepthController(
        growth, [AcceptanceStats()] * ROOTS, "a", Model(level), requests, depth
    )
    own = [[p, *[p * 0.8] * (depth - 1)] for p in chances]
    want = 0.0
    for number in range(1, depth + 1):
        found = sum(sum(accumulate(each[:number], mul)) for each in own)
        seconds = TARGET + FIRST + (number - 1) * level
        want = max(want, (ROOTS + found) / seconds)
    assert levels.rate(own) == pytest.approx(want, rel=0.02)


def test_what_a_model_finds_is_learnt_by_depth():
    """A candidate that is there leaves less to be found."""
    calibration = Calibration()
    for _ in range(60):
        trie = Trie(calibration, 1)
        trie.ask(ROOT, "a")
        node = trie.put(ROOT, 5, trie.calibrators["a"].weigh(0.6, 1))
        trie.ask(node, "a")
        trie.put(node, 6, trie.calibrators["a"].weigh(0.6, 2))
        trie.observe([5, 9])
    calibration.forget(1)
    trie = Trie(calibration, 2)
    first, second, third = trie.chances("a", 3)
    assert first > 0.9 and second < 0.1 and third == pytest.approx(FINDS)
    assert trie.chances("b", 2) == pytest.approx([FINDS, FINDS])
    trie.merge([Candidate(5, ROOT, 0.9, "n-grams")])
    assert trie.chances("b", 2)[0] < 0.2


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The draft model is the target itself, and the head is never right."""
    Clock(monkeypatch)
    target = load_small(tiny_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=4))
    write_head(tmp_path / "head")
    head = load_eagle_head(tmp_path / "head", target)
    return engine_for(target, target, "auto", head=head)


def test_an_engine_soon_runs_the_better_one_first_and_the_other_seldom(engine, monkeypatch):
    firsts, rows = [], []

    def ordered(growing, is_alone):
        order = in_order(growing, is_alone)
        if len(order) > 1:
            firsts.append(order[0].model_source.name)
            rows.append(engine.head.num_rows)
        return order

    monkeypatch.setattr(adaptive_speculator, "in_order", ordered)
    Watch(engine).run([Case(PROMPT[i:], sampling(160, seed=i)) for i in range(3)])
    assert len(firsts) > 8, "until the head is left out"
    assert Counter(firsts[8:])["eagle"] <= 3, firsts
    counts = {name: sums.verified for name, sums in engine.stats.sources.items()}
    assert counts["model"] > 9 * counts["eagle"], counts


def test_what_another_owner_has_shown_changes_nobodys_order(engine, monkeypatch):
    """The first of them is alone; once the others are there, only what levels take decides."""
    seen = {True: Counter(), False: Counter()}

    def ordered(growing, is_alone):
        order = in_order(growing, is_alone)
        if len(order) > 1:
            seen[is_alone][order[0].model_source.name] += 1
        return order

    monkeypatch.setattr(adaptive_speculator, "in_order", ordered)
    engine.head.first_costs.seconds = engine.head.costs.seconds = lambda *_, **__: 1e-6
    engine.draft_model.costs.seconds = lambda *_, **__: 1e-3
    mine = Case(PROMPT, sampling(160))
    others = [Case(PROMPT[i:], salted(sampling(60), "others"), arrives=5) for i in (1, 2)]
    Watch(engine).run([mine, *others])
    assert seen[True]["model"] > 3 and seen[False]["model"] == 0 < seen[False]["eagle"]


def salted(sampling, salt):
    return msgspec.structs.replace(sampling, cache_salt=salt)


@pytest.mark.parametrize(("first", "other"), [("eagle", "model"), ("model", "eagle")])
def test_what_both_draft_is_the_merit_of_the_one_that_was_run_first(engine, first, other):
    guesses = engine.speculator
    guesses.saved_per_draft_token, guesses.row_seconds = 1.0, 0.25
    trie = Trie(Calibration(), 1)
    both = trie.put(ROOT, 5, trie.calibrators[first].weigh(0.6, 1))
    trie.agree(both, trie.calibrators[other].weigh(0.9, 1))
    own = trie.put(both, 6, trie.calibrators[other].weigh(0.9, 2))
    wrong = trie.put(own, 7, trie.calibrators[other].weigh(0.9, 3))
    sources = [tuple(trie.sources(node)) for node in (both, own, wrong)]
    root = SimpleNamespace()
    guesses.note_savings(root, DraftSources(Draft(), sources, {}).groups([1, 2]))
    assert root.credit == {first: 0.75, other: 0.75 - 0.25}
    assert root.saved_of == {first: 0.75, other: 1.25}
