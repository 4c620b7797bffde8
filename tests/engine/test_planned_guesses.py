"""The engine with several sources and the planner: what the promise cannot see."""

import pytest

from specserve.engine import planned_guesses
from specserve.engine.source import UserSource
from specserve.exchange.sampling_params import Sampling, Slo, SpeculationParams
from specserve_drafters import Draft
from specserve_drafters.candidates import Candidate
from specserve_drafters.lookup import NgramSource
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, Watch, engine_for, load_small, plain, planned

PROMPT = [5, 17, 42, 5, 17, 99, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


def greedy(max_tokens, **kw):
    return Sampling(
        max_tokens=max_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **kw
    )


class Oracle:
    """Knows the target's text, and says a chain of it with a score; `wrong` turns it into a lie."""

    def __init__(self, name, truth, p=0.9, wrong=0):
        self.name, self.truth, self.p, self.wrong = name, truth, p, wrong

    def candidates(self, items):
        return [self.chain(self.truth[len(i.known) :][: i.limit]) for i in items]

    def chain(self, tokens):
        return [Candidate(t ^ self.wrong, k, self.p, self.name) for k, t in enumerate(tokens)]


class Raising(Oracle):
    def candidates(self, items):
        raise RuntimeError("a source with a bug")


def run(target, sources, max_tokens=60, **sampling):
    """An engine after a request with such sources, which are made from the target's text."""
    case = Case(PROMPT, greedy(max_tokens, **sampling))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=16)
    engine.scheduler.timed = lambda rows, seconds: None  # rows cost what they do at first
    engine.guesses = planned(engine, *sources(truth))
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    return engine


def test_a_source_that_raises_costs_its_own_guesses_only(target):
    engine = run(target, lambda truth: [Raising("bad", truth), Oracle("good", truth)])
    sums = engine.stats.sources
    assert engine.stats.drafter_errors > 0
    assert sums["bad"].proposed == 0 and sum(sums["good"].accepted) > 30


def test_a_source_that_lies_about_its_scores_is_soon_not_verified(target):
    def sources(truth):
        return [Oracle("liar", truth, p=0.99, wrong=1)]

    engine = run(target, sources, max_tokens=200)
    assert engine.stats.num_steps == 200 and engine.stats.num_drafted < 200


def test_a_source_that_takes_more_time_than_it_saves_is_dropped_and_rarely_asked_again(
    target, monkeypatch
):
    """The clock goes on by a second with every question to it; a step takes far less."""
    late = [0.0]
    real = planned_guesses.perf_counter
    monkeypatch.setattr(planned_guesses, "perf_counter", lambda: real() + late[0])

    class Late(Oracle):
        def candidates(self, items):
            late[0] += 1.0
            return super().candidates(items)

    engine = run(target, lambda truth: [Late("late", truth, wrong=1)], max_tokens=200)
    assert engine.stats.num_steps == 200
    assert engine.stats.sources["late"].seconds < 14
    assert engine.stats.sources["late"].saved_seconds < 0


def test_sources_are_told_apart_where_they_agree_and_where_they_do_not(target):
    case = Case(PROMPT, greedy(40, return_speculation_details=True))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=16)
    engine.guesses = planned(
        engine, Oracle("a", truth), Oracle("b", truth), Oracle("c", truth, 0.9, 1)
    )
    assert engine.sources == ("a", "b", "c")
    engine.add(case.prompt, case.sampling)
    told = []
    while not engine.is_idle:
        told += [output for output in engine.step() if output.tree]
    assert len(told) > 2
    for output in told:
        tree, sums = output.tree, output.sources
        assert len(tree.tokens) == len(tree.parents) == len(tree.sources) == output.num_drafted
        assert sums["a"] == sums["b"] and sums["a"].accepted == output.num_accepted
        assert sums["c"].accepted == 0
        assert {tree.sources[node - 1] for node in tree.accepted} <= {0b11}
        assert [tree.tokens[node - 1] for node in tree.accepted] == output.tokens[:-1]
    stats = engine.stats.sources
    assert sum(stats["a"].accepted) == engine.stats.num_accepted
    assert stats["a"].verified + stats["c"].verified == engine.stats.num_drafted


ASKED = {  # what a request asks for -> the sources that guessed for it, guesses a step, depth
    "nothing": ({}, {"a", "b"}, 16, 16),
    "no guesses": ({"enabled": False}, set(), 0, 0),
    "one source": ({"sources": ("b",)}, {"b"}, 16, 16),
    "a source that is not there": ({"sources": ("model",)}, set(), 0, 0),
    "no source": ({"sources": ()}, set(), 0, 0),
    "few guesses": ({"max_nodes": 2}, {"a", "b"}, 2, 2),
    "no more than the server allows": ({"max_nodes": 99}, {"a", "b"}, 16, 16),
    "short paths": ({"max_depth": 1}, {"a", "b"}, 2, 1),
}


@pytest.mark.parametrize(("asked", "sources", "nodes", "depth"), ASKED.values(), ids=ASKED)
def test_a_request_has_the_guesses_that_it_asks_for(target, asked, sources, nodes, depth):
    drafts = []

    class Watched(Oracle):
        def candidates(self, items):  # more and deeper than it was asked for
            return [self.chain(self.truth[len(i.known) :][:20]) for i in items]

        def observe(self, id, draft, accepted):
            drafts.append(draft)

    params = SpeculationParams(**asked)
    engine = run(
        target,
        lambda truth: [Watched("a", truth), Oracle("b", truth, wrong=1)],
        speculation=params,
    )
    assert {name for name, sums in engine.stats.sources.items() if sums.proposed} == sources
    assert max((len(draft) for draft in drafts), default=0) <= nodes
    assert max((max(draft.depths()) for draft in drafts), default=0) <= depth


class Unscored:
    """A user's drafter of the simple kind."""

    def __init__(self, truth):
        self.truth, self.seen, self.ended = truth, [], []

    def propose(self, items):
        return [Draft.chain(self.truth[len(i.known) :][: i.limit]) for i in items]

    def observe(self, id, draft, accepted):
        self.seen.append((len(draft), len(accepted)))

    def forget(self, id):
        self.ended.append(id)


def test_a_drafter_without_scores_is_a_source_like_others(target):
    drafters = []

    def sources(truth):
        drafters.append(Unscored(truth))
        return [UserSource("mine", drafters[0], 320), NgramSource()]

    engine = run(target, sources)
    (drafter,) = drafters
    assert engine.stats.num_accepted > 30 and engine.stats.drafter_errors == 0
    assert sum(n for _, n in drafter.seen) == engine.stats.num_accepted
    assert drafter.ended == [0]


@pytest.mark.parametrize("found", [None, 3, [[None]], [[Candidate("x", 0, 0.5, "mine")]], []])
def test_nonsense_of_a_scored_drafter_costs_no_text(target, found):
    class Confused:
        def candidates(self, items):
            return found

    engine = run(target, lambda truth: [UserSource("mine", Confused(), 320)])
    assert engine.stats.num_drafted == 0


def test_requests_behind_their_targets_say_so_of_the_most_urgent_priority_only(target):
    engine = engine_for(target, None, "auto", max_nodes=4)
    seen, choose = [], engine.guesses.planner.choose

    def spy(asks, step, most):
        seen.append(([ask.behind > 0 for ask in asks], step.allowed))
        return choose(asks, step, most)

    engine.guesses.planner.choose = spy
    tight, loose = Slo(tpot_ms=1e-3), Slo(tpot_ms=1e6)
    for slo, priority in ((tight, 1), (tight, 0), (loose, 0), (Slo(), 0)):
        engine.add(PROMPT, greedy(9, slo=slo, priority=priority))
    for _ in range(4):
        engine.step()
    behind, allowed = seen[-1]
    assert behind == [True, False, False, False], "in order of rank, the second request is first"
    assert allowed == pytest.approx(1e-6)


class Counting(Oracle):
    """Counts how often it is asked; right from a length on, and wrong before it."""

    def __init__(self, truth, right_from):
        super().__init__("counting", truth)
        self.right_from, self.asked = right_from, []

    def candidates(self, items):
        self.asked += [len(item.known) for item in items]
        is_wrong = len(items[0].known) < self.right_from
        self.wrong = int(is_wrong)
        return super().candidates(items)


def run_counting(target, right_from, max_tokens=300):
    case = Case(PROMPT, greedy(max_tokens))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=16)
    engine.scheduler.timed = lambda rows, seconds: None
    source = Counting(truth, right_from)
    engine.guesses = planned(engine, source)
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    return engine, source


def test_where_guesses_save_no_time_nothing_is_asked_or_planned_in_most_steps(target):
    engine, source = run_counting(target, right_from=10**6)
    assert engine.stats.num_steps == 300
    assert len(source.asked) < 60


def test_a_request_is_asked_in_every_step_again_once_guesses_are_right(target):
    engine, source = run_counting(target, right_from=100)
    assert len([known for known in source.asked if known < 100]) < 40
    assert engine.stats.num_steps < 200


def test_nothing_learnt_outlives_a_reset(target):
    engine, _ = run_counting(target, right_from=10**6)
    engine.reset_learned()
    guesses = engine.guesses
    assert guesses.last is None and not guesses.turns.num_steps
    assert not guesses.calibration.sources and not guesses.trials.waits
