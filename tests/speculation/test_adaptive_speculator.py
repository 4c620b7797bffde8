"""The engine with several sources and the planner: what the promise cannot see."""

from collections import Counter

import msgspec
import pytest

from specserve.api.outputs import Generation
from specserve.exchange.sampling_params import Sampling, Slo, SpeculationParams
from specserve.speculation import planner
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.constants import KNOWN
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.planner import Planner, Plans
from specserve.speculation.speculator import UserSource
from specserve.speculation.verify import DraftSources
from specserve.text.tokenizer import Tokenizer
from specserve_bench.local import reset_learned
from specserve_drafters import ROOT, Draft
from specserve_drafters.base import DraftSource
from specserve_drafters.candidates import Candidate
from specserve_drafters.lookup import NgramSource
from specserve_drafters.native import NativeSource, ngram_source
from specserve_drafters.tenants import DEFAULT_SCOPE
from tests.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.drafters.asks import Asks, RequestCandidates
from tests.drafters.oracle_trie import Calibration, Trie
from tests.engine.clock import Clock
from tests.engine.engines import (
    Case,
    Watch,
    ask_always,
    engine_for,
    load_small,
    plain,
    planned,
    row_counts,
)

PROMPT = [5, 17, 42, 5, 17, 99, 3]
STEP = 0.01  # seconds of a step, whatever its rows


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    return Clock(monkeypatch, target=lambda rows: STEP)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model that says something else."""
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=4))


def greedy(max_tokens, **kw):
    return Sampling(
        max_tokens=max_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **kw
    )


class Oracle(DraftSource):
    """Knows the target's text, and says a chain of it with a score; `wrong` turns it into a lie."""

    def __init__(self, name, truth, p=0.9, wrong=0):
        self.name, self.truth, self.p, self.wrong = name, truth, p, wrong

    def candidates(self, items):
        return [self.chain(self.truth[len(i.known) :][: i.limit]) for i in items]

    def chain(self, tokens):
        return [Candidate(t ^ self.wrong, k, self.p, self.name) for k, t in enumerate(tokens)]


class Next(Oracle):
    """Knows the next token only."""

    def chain(self, tokens):
        return super().chain(tokens[:1])


class Raising(Oracle):
    def candidates(self, items):
        raise RuntimeError("a source with a bug")


def run(target, sources, max_tokens=60, **sampling):
    """An engine after a request with such sources, which are made from the target's text."""
    case = Case(PROMPT, greedy(max_tokens, **sampling))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=16)
    engine.scheduler.timed = lambda rows, seconds: None  # rows cost what they do at first
    engine.speculator = planned(engine, *sources(truth))
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    return engine


class AskedInPython(NativeSource):
    def __init__(self):
        super().__init__()
        self.address = 0


def make_rows_free(engine):
    engine.scheduler.timed, costs = (lambda rows, seconds: None), engine.scheduler.costs
    for edge in costs.edges * KNOWN:
        costs.observe(edge, 0, 1, STEP)


@pytest.mark.parametrize("limits", [{}, {"max_depth": 2}])
def test_a_source_that_cpp_asks_drafts_and_counts_as_one_that_python_asks(target, limits):
    """Also next to sources that Python asks, and within the limits of requests."""
    found = []
    for cls in (NativeSource, AskedInPython, NgramSource):
        engine = engine_for(target, None, "auto", max_nodes=16)
        make_rows_free(engine)
        engine.speculator = speculator = planned(engine, cls(), Guessing("guess", []))
        ask_always(engine)
        params = greedy(50, speculation=SpeculationParams(**limits))
        for begin in range(3):
            engine.add(PROMPT[begin:] * 2, params)
        drafts = []
        while not engine.is_idle:
            outputs = engine.step()
            roots = speculator.roots.items()
            drafts.append([(id, root.scheduled.draft) for id, root in roots])
            drafts.append([(one.id, one.sources) for one in outputs])
        sums = engine.stats.sources["ngram"]
        assert sums.verified > 50 and sums.accepted > 5
        assert (sums.seconds > 0) == (cls is NativeSource)
        found.append((drafts, sums.proposed, sums.verified, sums.accepted, sums.accepted_at))
    for own in found[1:]:
        assert own[1:] == found[0][1:]
        for number, (want, got) in enumerate(zip(found[0][0], own[0], strict=True)):
            assert got == want, number


class Guessing(Oracle):
    """Proposes the same two tokens in every step."""

    def chain(self, tokens):
        return super().chain([4, 7])


class Extending(Oracle):
    """Adds one token to the candidates of others; it proposes nothing itself."""

    is_estimating, extends_paths = True, True

    def extend(self, trie, item, proposed):
        trie.merge([Candidate(7, ROOT, 0.5, self.name)])
        proposed[self.name] = 1


def test_paths_are_extended_also_if_only_sources_in_cpp_are_asked(target):
    engine = engine_for(target, None, "auto", max_nodes=16)
    make_rows_free(engine)
    engine.speculator = planned(engine, NativeSource(), Extending("more", []))
    engine.add(PROMPT * 2, greedy(40))
    while not engine.is_idle:
        engine.step()
    sums = engine.stats.sources
    assert sums["ngram"].proposed > 0 and sums["more"].proposed > 5


def test_draft_tokens_of_late_requests_come_first(target):
    """Of two requests with the same text, whichever is behind its target."""
    for late in (0, 1):
        engine = engine_for(target, None, "auto", max_nodes=16)
        engine.speculator = speculator = planned(engine, NativeSource())
        ask_always(engine)
        for _ in range(2):
            engine.add(PROMPT * 4, greedy(9))
        while len(speculator.roots) < 2 or not min(len(r.trie) for r in speculator.roots.values()):
            engine.step()
        speculator.plans.set_behind([2.0 * (place == late) for place in range(2)])
        speculator.plans.select(4)
        assert speculator.plans.told.places[0] == late


class Late(Oracle):
    """Proposes nothing at first."""

    def candidates(self, items):
        return super().candidates(items) if len(items[0].known) > 20 else [[] for _ in items]


def test_sources_are_reported_in_one_order_whoever_proposes_first(target):
    case = Case(PROMPT, greedy(60))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=16)
    engine.speculator = planned(engine, Late("late", truth), Oracle("soon", truth))
    generation = Generation(
        engine.add(PROMPT, case.sampling).id,
        PROMPT,
        case.sampling,
        Tokenizer(tiny_tokenizer().backend_tokenizer),
    )
    while not engine.is_idle:
        for output in engine.step():
            generation.push(output)
    told = msgspec.to_builtins(generation.speculation("auto"))["sources"]
    assert [*told] == ["late", "soon"]
    assert all([*counts] == ["proposed", "verified", "accepted"] for counts in told.values())
    soon_alone = DraftSources(Draft(), [], {"soon": 1})
    assert [*engine.speculator.spec_stats.enter(soon_alone, [], {}, False)[0]] == ["late", "soon"]


def test_sources_are_reported_in_the_order_of_their_option(target):
    engine = engine_for(target, target, "auto", options={"sources": ["model", "ngram"]})
    assert engine.sources == ("model", "ngram")


def test_a_source_that_raises_costs_its_own_draft_tokens_only(target):
    engine = run(target, lambda truth: [Raising("bad", truth), Oracle("good", truth)])
    sums = engine.stats.sources
    assert engine.stats.drafter_errors > 0
    assert sums["bad"].proposed == 0 and sums["good"].accepted > 30


class Torn(Oracle):
    """Fails after its candidates were added."""

    def add_candidates(self, items, tries):
        super().add_candidates(items, tries)
        raise RuntimeError("a source with a bug")


def test_a_source_may_fail_after_some_of_its_candidates_were_added(target):
    engine = run(target, lambda truth: [Torn("torn", truth)])
    sums = engine.stats.sources["torn"]
    assert sums.errors > 0 and sums.proposed == 0 and sums.accepted > 0


@pytest.mark.parametrize("what", ["extend", "expand"])
def test_a_draft_model_that_fails_costs_its_own_draft_tokens_only(target, what):
    case = Case(PROMPT, greedy(60))
    (truth,) = plain(target, [case])
    engine = engine_for(target, target, "auto", max_nodes=16)
    engine.speculator = planned(
        engine, Next("good", truth, 0.3), model_sources=engine.speculator.model_sources
    )

    def fail(nodes):
        raise MemoryError

    setattr(engine.draft_model, what, fail)
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    assert engine.stats.drafter_errors > 0 and engine.stats.sources["good"].accepted > 10


def test_levels_that_do_not_pay_stop_no_other_source(target, other, clock):
    case = Case(PROMPT, greedy(200))
    (truth,) = plain(target, [case])
    engine, asked = engine_for(target, other, "auto", max_nodes=16), Counter()
    model_sources = engine.speculator.model_sources
    model = model_sources[0].source
    engine.speculator = planned(engine, source := Next("good", truth), model_sources=model_sources)
    grow, candidates = model.grow, source.candidates

    def slow(request_tries, levels, grammar):
        asked["model"] += 1
        clock.now += 3 * STEP
        grow(request_tries, levels)

    def counted(items):
        asked["good"] += 1
        return candidates(items)

    model.grow, source.candidates = slow, counted
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    assert engine.stats.num_steps < 120
    assert (
        asked["model"] < 0.2 * engine.stats.num_steps < 0.9 * engine.stats.num_steps < asked["good"]
    )


def test_a_source_that_takes_long_to_raise_is_dropped(target, clock):
    class SlowToRaise(Raising):
        def candidates(self, items):
            clock.now += 100 * STEP
            super().candidates(items)

    engine = run(target, lambda truth: [SlowToRaise("bad", truth)], max_tokens=200)
    assert engine.stats.num_steps == 200 and engine.stats.drafter_errors < 14


def test_a_source_that_lies_about_its_scores_is_soon_not_verified(target):
    def sources(truth):
        return [Oracle("liar", truth, p=0.99, wrong=1)]

    engine = run(target, sources, max_tokens=200)
    assert engine.stats.num_steps == 200 and engine.stats.num_drafted < 200


class Paced(Oracle):
    """Right while the text's length is in a range, else wrong; a question to it takes so many
    steps' time, or `after_pause` where none was asked in the step before.
    """

    def __init__(self, clock, truth, right, takes, after_pause=None):
        super().__init__("paced", truth)
        self.clock, self.right = clock, right
        self.takes, self.after_pause = takes, takes if after_pause is None else after_pause
        self.asked, self.left_at = [], clock.now

    def candidates(self, items):
        (item,) = items
        is_paused = self.clock.now > self.left_at + 1.5 * STEP
        self.clock.now += STEP * (self.after_pause if is_paused else self.takes)
        self.left_at = self.clock.now
        self.asked.append(len(item.known))
        self.wrong = int(len(item.known) not in self.right)
        return super().candidates(items)


class Foretelling(Paced):
    """Also promises so many right guesses for a text of a length."""

    is_estimating = True

    def __init__(self, clock, truth, right, takes, promises):
        super().__init__(clock, truth, right, takes)
        self.promises = promises

    def expected_accepted(self, id, text):
        return self.promises(len(text))

    def reset(self):
        self.promises = None


def run_paced(target, clock, right, *takes, max_nodes=4, cls=Paced):
    """An engine after a request with a `Paced` source, and the source."""
    case = Case(PROMPT, greedy(270))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=max_nodes)
    source = cls(clock, truth, right, *takes)
    engine.speculator = planned(engine, source)
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    return engine, source


NEVER, LATER = range(0), range(100, 300)  # lengths at which guesses are right


@pytest.fixture
def often(monkeypatch):
    """Trials may take so much time that a short text shows them."""
    monkeypatch.setattr(planner, "EXPLORATION", 0.04)


def test_a_source_that_takes_more_time_than_it_saves_is_dropped_and_rarely_asked_again(
    target, clock
):
    engine, source = run_paced(target, clock, NEVER, 100)
    assert engine.stats.num_steps == 270 and len(source.asked) < 14
    lost = STEP * 100 * len(source.asked)
    assert engine.stats.sources["paced"].saved_seconds == pytest.approx(-lost, rel=0.01)


def test_a_source_that_was_late_is_asked_in_every_step_again_once_a_trial_shows_its_worth(
    target, clock, often
):
    _, source = run_paced(target, clock, LATER, 0.8, max_nodes=1)
    asked = [known in LATER for known in source.asked]
    assert asked.count(False) < 14, "it was late"
    assert asked.count(True) > 50


def test_a_source_that_was_of_use_is_soon_tried_again_when_it_is_late_once_more(
    target, clock, often
):
    _, source = run_paced(target, clock, range(100, 160), 0.8, max_nodes=1)
    last = [known for known in source.asked if known > 180]
    assert 1 <= len(last) < 5


@pytest.mark.parametrize(("after_pause", "is_back"), [(1.3, True), (1.8, False)])
def test_a_turn_after_a_pause_takes_longer_than_one_in_every_step_will(
    target, clock, after_pause, is_back, often
):
    """A right guess saves one step's time: to make it takes more than that after a pause, and less
    in every step. What it takes in every step is not known after a pause, so it may be too much.
    """
    _, source = run_paced(target, clock, LATER, 0.8, after_pause, max_nodes=1)
    asked = [known in LATER for known in source.asked]
    assert asked.count(False) < 20
    assert (asked.count(True) > 50) == is_back


def test_sources_are_distinguished_where_they_agree_and_where_they_do_not(target):
    case = Case(PROMPT, greedy(40, return_speculation_details=True))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=16)
    engine.speculator = planned(
        engine, Oracle("a", truth), Oracle("b", truth), Oracle("c", truth, 0.9, 1)
    )
    assert engine.sources == ("a", "b", "c")
    a_and_b = sum(1 << engine.known_sources.index(name) for name in "ab")
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
        assert {tree.sources[node - 1] for node in tree.accepted} <= {a_and_b}
        assert [tree.tokens[node - 1] for node in tree.accepted] == output.tokens[:-1]
    stats = engine.stats.sources
    assert stats["a"].accepted == engine.stats.num_accepted
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
def test_a_request_has_the_draft_tokens_that_it_asks_for(target, asked, sources, nodes, depth):
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
        return [UserSource("mine", drafters[0], 320), ngram_source()]

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
    ask_always(engine)
    seen, plans = [], engine.speculator.plans
    set_behind = plans.set_behind

    def spy(behind):
        seen.append(([tokens > 0 for tokens in behind], engine.speculator.step.allowed))
        set_behind(behind)

    plans.set_behind = spy
    tight, loose = Slo(tpot_ms=1e-3), Slo(tpot_ms=1e6)
    for slo, priority in ((tight, 1), (tight, 0), (loose, 0), (Slo(), 0)):
        engine.add(PROMPT, greedy(9, slo=slo, priority=priority))
    for _ in range(4):
        engine.step()
    behind, allowed = seen[-1]
    assert behind == [True, False, False, False], "in order of rank, the second request is first"
    assert allowed == pytest.approx(1e-6)


def test_where_draft_tokens_save_no_time_nothing_is_asked_or_planned_in_most_steps(target, clock):
    engine, source = run_paced(target, clock, NEVER, 0.1)
    assert engine.stats.num_steps == 270
    assert 0.1 * len(source.asked) <= planner.AT_FIRST + planner.EXPLORATION * 270


@pytest.mark.parametrize("takes", [0.1, 0.3])
def test_a_request_is_asked_in_every_step_again_once_draft_tokens_are_right(
    target, clock, takes, often
):
    engine, source = run_paced(target, clock, LATER, takes)
    _, *early = [known for known in source.asked if known not in LATER]
    assert takes * len(early) <= planner.AT_FIRST + planner.EXPLORATION * LATER.start
    assert engine.stats.num_steps < 200


def test_a_source_is_asked_if_it_expects_to_save_more_than_planning_takes(target, clock):
    def promises(length):
        return 3.0 if length in LATER else 0.05

    engine, source = run_paced(target, clock, LATER, 0.1, promises, cls=Foretelling)
    early = [known for known in source.asked if known not in LATER]
    assert 0.1 * len(early) <= planner.AT_FIRST + planner.EXPLORATION * LATER.start, "trials"
    assert LATER.start in source.asked
    assert engine.stats.num_steps < 150


def test_a_slow_drafter_next_to_one_that_foresees_is_asked_in_trials_only(target, clock):
    case = Case(PROMPT, greedy(270))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=4)
    good = Foretelling(clock, truth, LATER, 0.05, lambda length: 3.0 if length in LATER else 0.0)
    slow = Paced(clock, truth, NEVER, 0.3)
    good.name, slow.name = "good", "slow"
    engine.speculator = planned(engine, good, slow)
    (request,) = Watch(engine).run([case])
    assert request.token_ids.tolist() == truth
    assert engine.stats.num_steps < 150
    assert len(good.asked) > 30 > len(slow.asked)


def was_planned(guesses):
    return any(acceptance.last is not None for acceptance in guesses.acceptance.every)


def test_what_a_request_does_not_allow_promises_it_nothing(target, clock):
    case = Case(PROMPT, greedy(60, speculation=SpeculationParams(sources=["other"])))
    (truth,) = plain(target, [case])
    engine = engine_for(target, None, "auto", max_nodes=4)
    engine.speculator = planned(engine, Foretelling(clock, truth, LATER, 0.1, lambda length: 3.0))
    Watch(engine).run([case])
    assert not was_planned(engine.speculator)


def test_promises_that_are_not_kept_are_believed_ever_less(target, clock):
    _, source = run_paced(target, clock, NEVER, 0.3, lambda length: 2.0, cls=Foretelling)
    assert len([known for known in source.asked if known > 100]) < 10


def test_promises_are_believed_again_some_time_after_they_were_not_kept(target, clock):
    engine, _ = run_paced(target, clock, LATER, 0.3, lambda length: 2.0, cls=Foretelling)
    assert engine.stats.num_steps < 200


def test_a_source_forgets_what_texts_have_shown_with_a_reset(target, clock):
    engine, source = run_paced(target, clock, LATER, 0.1, lambda length: 2.0, cls=Foretelling)
    reset_learned(engine)
    assert source.promises is None
    assert engine.speculator.acceptance.find(DEFAULT_SCOPE) is None


def test_other_sources_are_considered_at_once_after_those_that_saved_nothing(target, clock):
    """Statistics go on, and with them the number of the step in which sources were considered."""
    engine, _ = run_paced(target, clock, NEVER, 3)
    (truth,) = plain(target, [case := Case(PROMPT, greedy(60))])
    before = engine.speculator
    lent = engine.scheduler, engine.draft_model
    engine.speculator = AdaptiveSpeculator(
        [Oracle("new", truth)], (), *lent, engine.stats, before=before
    )
    Watch(engine).run([case])
    assert engine.speculator.acceptance is before.acceptance
    assert engine.speculator.number > before.number, "budgets never shrink by a change"
    assert engine.stats.sources["new"].accepted > 20


def test_an_engine_has_the_ngrams_of_the_compiled_kernels(target):
    source, *_ = engine_for(target, None, "auto").speculator.sources
    assert source.name == "ngram" and isinstance(source.sources.make(), NativeSource)


def test_nothing_learnt_outlives_a_reset(target, clock):
    engine, _ = run_paced(target, clock, NEVER, 0.1)
    reset_learned(engine)
    guesses = engine.speculator
    assert not guesses.acceptance.idle and not guesses.acceptance.live


def num_requests_of(launches):
    return max(map(len, launches))


def run_draft(target, draft, max_tokens=250, num_requests=1, tell=num_requests_of):
    """The steps in which the draft model ran, as the only source, and what its launches tell."""
    engine = engine_for(target, draft, "auto", max_nodes=4)
    engine.speculator = planned(engine, model_sources=engine.speculator.model_sources)
    launches, found = row_counts(engine.draft_model.runner), {}
    for id in range(num_requests):
        engine.add([id + 1, *PROMPT], greedy(max_tokens))
    while not engine.is_idle:
        launches.clear()
        engine.step()
        if launches:
            found[engine.stats.num_steps] = tell(launches)
    return found


def test_the_first_run_of_a_draft_model_is_free_as_nothing_else_shows_what_it_takes(target, clock):
    clock.target, clock.draft = (lambda rows: 1e-6), (lambda rows: 1e-8)
    assert min(run_draft(target, target)) == 2, "after the first token"
    clock.draft = lambda rows: 1e-3
    assert [*run_draft(target, target, max_tokens=16)] == [2]


def time_of_levels(steps):
    return 0.5 * sum(steps.values())


def test_a_draft_model_that_is_left_out_is_tried_with_one_request_for_all_of_them(
    target, other, clock
):
    clock.draft = lambda rows: 0.5 * STEP
    for num_requests in (1, 8):
        first, *others = run_draft(target, other, num_requests=num_requests).values()
        assert first == num_requests and {*others} == {1}
        levels = run_draft(target, other, num_requests=num_requests, tell=len)
        most = planner.AT_FIRST + planner.EXPLORATION * 250
        assert 2 < time_of_levels(levels) < most + 1.5, "a trial of three levels may exceed it"
        assert [*levels][-1] > 100, "ever more rarely"
        right = run_draft(target, target, num_requests=num_requests)
        assert [*right] == [*range(2, len(right) + 2)] and right[30] == num_requests


def test_a_trial_runs_three_levels_as_one_alone_is_slower_than_those_after_it(target, other, clock):
    clock.draft = lambda rows: 0.5 * STEP
    first, *trials = run_draft(target, other, tell=len).values()
    assert first == 1 and max(trials) == 3


def test_a_trial_for_one_request_says_nothing_of_others_and_costs_it_its_part(target, clock):
    """Levels for four requests take as long as those for one, and do not pay for all together."""
    clock.draft = lambda rows: 1.5 * STEP
    engine = engine_for(target, target, "auto", max_nodes=4)
    speculator = planned(engine, model_sources=engine.speculator.model_sources)
    engine.speculator = speculator
    requests = [engine.add([id + 1, *PROMPT], greedy(120)) for id in range(4)]
    acceptance, seen = speculator.acceptance.of(requests[0].id), []

    def saved_of(id):
        return acceptance.account("model", id).of_request

    while not engine.is_idle:
        before = {r.id: saved_of(r.id) for r in requests}
        is_alone = speculator.model_sources[0].is_trial_alone and len(speculator.roots) == 4
        tried = [id for id, root in speculator.roots.items() if root.tried]
        engine.step()
        changed = [id for id, saved in before.items() if saved_of(id) != saved]
        if is_alone and all(r.id in engine.requests for r in requests):
            assert changed == tried and len(tried) == 1
            seen.append(saved_of(tried[0]))
    assert seen and min(seen) > -5, "not all of three levels, which are 18 parts of a step"


class Counting(Foretelling):
    """Counts its estimates, each of which takes a part of a step."""

    num_estimates = 0

    def expected_accepted(self, id, text):
        self.num_estimates += 1
        self.clock.now += 0.02 * STEP
        return super().expected_accepted(id, text)


def test_sources_that_save_nothing_are_considered_in_every_eighth_step_only(target, clock):
    _, source = run_paced(target, clock, NEVER, 0.1, lambda length: 0.0, cls=Counting)
    steps = 270
    assert steps / planner.PAUSE - 2 < source.num_estimates < steps * 0.6


class Noting(Foretelling):
    """Notes the lengths of the text for which it was considered."""

    def __init__(self, *args):
        super().__init__(*args)
        self.considered = []

    def expected_accepted(self, id, text):
        self.considered.append(len(text))
        return super().expected_accepted(id, text)


@pytest.fixture
def considering(clock, monkeypatch):
    """Returns a function that sets how many steps' time it takes to choose the sources to ask."""
    begin = Plans.begin

    def take(steps):
        def slow(plans, *args):
            begin(plans, *args)
            is_paused = plans.told.num_paused or not plans.told.num_scopes
            clock.now += 0 if is_paused else steps * STEP

        monkeypatch.setattr(Plans, "begin", slow)

    return take


@pytest.mark.parametrize(("takes", "is_paused"), [(0.0, False), (0.4, True)])
def test_sources_that_save_less_than_considering_them_takes_are_paused(
    target, clock, considering, takes, is_paused
):
    """They save one step's time in eight steps."""
    considering(takes)
    right, takes = range(0, 300, 8), (0.0, lambda n: float(n % 8 == 0))
    _, source = run_paced(target, clock, right, *takes, max_nodes=1, cls=Noting)
    late = [length for length in source.considered if length > 100]
    assert len(late) < 90 if is_paused else len(late) > 140


def test_a_pause_ends_with_the_first_step_that_saves_more_than_it_takes(target, clock, considering):
    considering(3.0)
    _, source = run_paced(target, clock, LATER, 0.0, lambda n: 4.0 * (n in LATER), cls=Noting)
    quiet = [length for length in source.considered if 50 < length < 100]
    assert len(quiet) <= 50 / planner.PAUSE + 1
    first, *rest = [length for length in source.considered if length in LATER]
    assert first < LATER.start + planner.PAUSE
    assert len(rest) > 25, "of 34 steps of five tokens; each eighth step alone is 14"


def test_a_promise_counts_only_tokens_that_save_more_than_their_rows_take(target):
    plans = Plans()

    def promise(row_share):
        return plans.native.promise(plans.handle, 0.01, row_share, 1.0)

    assert promise(0.0) == pytest.approx(0.01), "1/2 + 1/4 + ... tokens"
    assert promise(0.2) == pytest.approx(0.01 * (0.5 - 0.2 + 0.25 - 0.2))
    assert promise(0.6) == 0.0


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_speculator_learns_the_share_of_expected_tokens_that_is_kept(target, wrong):
    engine = run(target, lambda truth: [Oracle("its", truth, p=0.6, wrong=wrong)], max_tokens=30)
    [acceptance] = engine.speculator.acceptance.every
    greedy, sampled = acceptance.kept
    assert sampled == 1.0 and (greedy < 1.0 if wrong else greedy > 1.05)


def test_plans_count_on_the_share_of_expected_tokens_that_is_kept(target):
    """A draft token of probability 0.3 takes 0.2 steps' time: worth it unless half are kept."""
    costs = StepCosts(8)
    for rows in (1, 2):
        for _ in range(4):
            costs.observe(rows, 0, 1, STEP * (1 + 0.2 * (rows - 1)))
    trie = Trie(Calibration(), 1)
    trie.put(ROOT, 5, trie.calibrators["a"].weigh(0.3, 1))
    asks = Asks([RequestCandidates(trie, 4)])
    steps = [Step(1, 0, 1, 1, kept=kept) for kept in (1.0, 0.5)]
    found = [Planner(costs).choose(asks, step, 4) for step in steps]
    assert [plan.size for plan in found] == [1, 0]
    [(_, expected)], p = asks.cut(1), trie.p[1]
    assert found[0].tokens == pytest.approx(1 + p) and expected == pytest.approx(p)
