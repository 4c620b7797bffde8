"""Of several models, the one with cheap levels goes first and gets the credit for shared tokens."""

import pytest

from specserve.models.eagle_head import load_eagle_head
from specserve.speculation.verify import DraftSources
from specserve_drafters.candidates import ROOT, Candidate, Draft
from specserve_drafters.trie import CHILDREN_BY, FINDS
from tests.checkpoints import tiny_checkpoint
from tests.drafters.oracle_trie import Calibration, Trie
from tests.engine.clock import Clock
from tests.engine.engines import Case, Watch, engine_for, load_small
from tests.models.eagle_heads import write_head
from tests.scheduling import simulation
from tests.speculation.oracle_accounts import OracleStats
from tests.speculation.oracle_requests import OracleDraft
from tests.speculation.test_head_model import PROMPT, sampling


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
    first = trie.reach(ROOT, "a")
    trie.put(ROOT, 5, trie.calibrators["b"].weigh(0.6, 1))
    second = trie.calibrators[CHILDREN_BY + "a"].weigh(FINDS, 2)[3]
    third = trie.calibrators[CHILDREN_BY + "a"].weigh(FINDS, 3)[3]
    assert first > 0.9 and second < 0.1 and third == pytest.approx(FINDS)
    trie = Trie(calibration, 3)
    assert trie.reach(ROOT, "b") == pytest.approx(FINDS)
    trie.merge([Candidate(5, ROOT, 0.9, "n-grams")])
    assert trie.reach(ROOT, "b") < 0.2


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The draft model is the target itself, and the head is never right."""
    Clock(monkeypatch)
    target = load_small(tiny_checkpoint(tmp_path / "target", seed=1, num_hidden_layers=4))
    write_head(tmp_path / "head")
    head = load_eagle_head(tmp_path / "head", target)
    return engine_for(target, target, "auto", head=head)


def test_a_model_that_is_never_right_is_soon_left_out(engine):
    Watch(engine).run([Case(PROMPT[i:], sampling(160, seed=i)) for i in range(3)])
    counts = {name: sums.verified for name, sums in engine.stats.sources.items()}
    assert counts["model"] > 9 * counts["eagle"], counts


@pytest.mark.parametrize(("first", "other"), [("eagle", "model"), ("model", "eagle")])
def test_the_model_with_cheap_levels_goes_first(engine, monkeypatch, first, other):
    models, order = {"eagle": engine.head, "model": engine.draft_model}, []
    for name, seconds in ((first, 1e-6), (other, 1e-3)):
        models[name].costs.seconds = lambda *_, seconds=seconds, **__: seconds
    grow_by = engine.speculator.grow_by
    monkeypatch.setattr(
        engine.speculator,
        "grow_by",
        lambda one, *rest: order.append(one.name) or grow_by(one, *rest),
    )
    Watch(engine).run([Case(PROMPT, sampling(20))])
    assert order[:2] == [first, other]


@pytest.mark.parametrize(("first", "other"), [("eagle", "model"), ("model", "eagle")])
def test_what_both_draft_is_the_merit_of_the_one_that_was_run_first(first, other):
    trie = Trie(Calibration(), 1)
    both = trie.put(ROOT, 5, trie.calibrators[first].weigh(0.6, 1))
    trie.agree(both, trie.calibrators[other].weigh(0.9, 1))
    own = trie.put(both, 6, trie.calibrators[other].weigh(0.9, 2))
    wrong = trie.put(own, 7, trie.calibrators[other].weigh(0.9, 3))
    sources = [tuple(trie.sources(node)) for node in (both, own, wrong)]
    root = OracleDraft(simulation.request(simulation.scheduler(8), 1, 4, 4), OracleStats(), (), ())
    root.note_savings(DraftSources(Draft(), sources, {}).groups([1, 2]), 1.0, 0.25)
    assert root.credit == {first: 0.75, other: 0.75 - 0.25}
    assert root.saved_of == {first: 0.75, other: 1.25}
