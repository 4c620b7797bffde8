"""What requests of one key and salt have shown changes nothing for those of another."""

import pytest
from msgspec.structs import replace

from specserve.exchange.messages import Caller, SpeculationState
from specserve.exchange.sampling_params import Sampling
from specserve_bench.figures.merged import RowCosts
from specserve_drafters.base import DraftSource
from specserve_drafters.candidates import Candidate
from specserve_drafters.native import ngram_source
from specserve_drafters.prediction import PredictionSource
from specserve_drafters.recycle import RecycleSource
from specserve_drafters.tenants import DEFAULT_SCOPE, PerTenantSource
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import Case, engine_for, load_small, plain, planned

PROMPT = [5, 17, 42, 5, 17, 99, 3]
GREEDY = Sampling(max_tokens=80, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
STEP = 1.0  # seconds, to which each row adds an eighth: sums of such times are exact
TAKES = {"prediction": 1.5 * STEP, "ngram": STEP / 16, "known": 3 * STEP / 16}  # of asking
TAKES["recycle"] = 3 * STEP / 32


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


@pytest.fixture(scope="module")
def text(target):
    (text,) = plain(target, [Case(PROMPT, GREEDY)])
    return text


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    return Clock(monkeypatch, target=lambda rows: STEP + rows / 8, draft=lambda rows: 1 / 1024)


class Predicted(PredictionSource):
    clock = None

    def candidates(self, items):
        self.clock.now += TAKES[self.name] * len(items)
        return super().candidates(items)


class Repeated(PerTenantSource):
    clock = None

    def add_candidates(self, items, tries):
        self.clock.now += TAKES[self.name] * len(items)
        return super().add_candidates(items, tries)


class Recycled(RecycleSource):
    clock = None

    def candidates(self, items):
        self.clock.now += TAKES[self.name] * len(items)
        return super().candidates(items)


class TenantSuccessors(DraftSource):
    """Knows a text, of which it says four tokens."""

    name = "known"

    def __init__(self, clock, text):
        self.clock, self.text = clock, text

    def candidates(self, items):
        self.clock.now += TAKES[self.name] * len(items)
        return [self.chain(len(item.known)) for item in items]

    def chain(self, size):
        return [Candidate(t, k, 0.4, self.name) for k, t in enumerate(self.text[size : size + 4])]


def engine_of(target, clock, text, draft=None, names=()):
    """With costs that nothing changes, and sources that take time."""
    engine = engine_for(target, draft, "auto", max_nodes=16)
    model_sources = engine.speculator.model_sources
    every = Predicted(), Repeated(ngram_source, "ngram"), TenantSuccessors(clock, text), Recycled()
    for source in every:
        source.clock = clock
    sources = [source for source in every if source.name in names]
    engine.speculator = planned(engine, *sources, model_sources=model_sources)
    engine.scheduler.timed = lambda rows, seconds: None
    if draft is not None:
        engine.draft_model.costs.observe = lambda *step: None
    engine.speculator.planner.costs = RowCosts(1 / 8)
    return engine


def others(target):
    """Texts that sources do not know, and predictions that part from them again and again."""
    hot = replace(GREEDY, temperature=3.0)
    cases = [Case(PROMPT, replace(hot, seed=seed)) for seed in range(6)]
    for case, text in zip(cases, plain(target, cases), strict=True):
        yield {"temperature": 3.0, "seed": case.sampling.seed, "prediction": edited(text, 7)}


def edited(text, every):
    """An output with another token in every so many places."""
    return tuple(t if i % every else t ^ 1 for i, t in enumerate(text[len(PROMPT) :]))


def steps_of(engine, tenant=0, **asked):
    """The guesses of each step of a request: how many were verified, and accepted."""
    engine.add_choices(PROMPT, [replace(GREEDY, **asked)], caller=Caller(0, tenant))
    steps = []
    while not engine.is_idle:
        steps += [(o.num_drafted, o.num_accepted, o.sources) for o in engine.step()]
    return steps


SOURCES = ("prediction",), ("ngram",), ("known",), ("recycle",), tuple(TAKES), ()


@pytest.mark.parametrize("names", SOURCES, ids=lambda names: ", ".join(names) or "draft model")
def test_what_others_texts_have_shown_changes_no_guess(target, clock, text, monkeypatch, names):
    asked = {"cache_salt": "b", "prediction": edited(text, 12)}
    draft = None if names else target
    alone = steps_of(engine_of(target, clock, text, draft, names), **asked)
    assert sum(accepted for _, accepted, _ in alone) > 2
    for other in ({"cache_salt": "a"}, {"tenant": 1, "cache_salt": "b"}):
        engine = engine_of(target, clock, text, draft, names)
        for wrong in others(target):
            steps_of(engine, **(wrong | other))
        assert steps_of(engine, **asked) == alone
    engine = engine_of(target, clock, text, draft, names)
    for wrong in others(target):
        steps_of(engine, **(wrong | {"cache_salt": "b", "temperature": 0.0}))
    assert steps_of(engine, **asked) != alone, "its own owner's texts do change what is guessed"


class Liar(TenantSuccessors):
    """Lies to one request, and notes whom it is asked for."""

    def __init__(self, clock, text, id):
        super().__init__(clock, text)
        self.id, self.asked = id, []

    def candidates(self, items):
        self.asked += [item.id for item in items]
        found = super().candidates(items)
        return [
            [c._replace(token=c.token ^ 1) for c in chain] if i.id == self.id else chain
            for i, chain in zip(items, found, strict=True)
        ]


@pytest.mark.parametrize("salt", ["a", "b"])
def test_a_source_is_left_out_for_the_requests_alone_whose_time_it_does_not_save(
    target, clock, text, salt
):
    engine = engine_of(target, clock, text)
    engine.speculator = planned(engine, source := Liar(clock, text, 0))
    for salt_of in (salt, "b"):
        engine.add(PROMPT, replace(GREEDY, cache_salt=salt_of))
    while not engine.is_idle:
        engine.step()
    lied_to, other = (source.asked.count(id) for id in (0, 1))
    assert lied_to < 13 < 15 < other


def test_greedy_and_sampled_requests_are_counted_apart(target, clock, text):
    engine = engine_of(target, clock, text, names=("known",))
    steps_of(engine)
    learned = engine.speculator.acceptance.find(DEFAULT_SCOPE)
    assert learned.calibration(0.0).counts() and not learned.calibration(0.7).counts()
    greedy = learned.counts()
    assert greedy == learned.calibration(0.0).counts()
    steps_of(engine, temperature=0.7)
    assert learned.calibration(0.7).counts() and learned.calibration(0.0).counts() == greedy
    tries = [sum(one.tries for one in counts["known"]) for counts in (greedy, learned.counts())]
    assert tries[0] < tries[1], "both are reported together"


def test_a_key_is_reported_what_its_own_requests_have_shown(target, clock, text):
    engine = engine_of(target, clock, text, names=("known",))
    steps_of(engine, tenant=1)
    steps_of(engine, tenant=2, cache_salt="a")
    told = [engine.speculation(tenant) for tenant in range(3)]
    assert [bool(state.calibration) for state in told] == [False, True, False]
    assert [state.tenant for state in told] == [0, 1, 2]


def test_a_plan_is_reported_to_whom_all_of_its_step_was(target, clock, text):
    engine = engine_of(target, clock, text, names=["ngram", "known"])
    told = SpeculationState(tenant=1)
    steps_of(engine, tenant=1, max_tokens=8)
    own = engine.speculator.tell(told).plan
    engine.add_choices(PROMPT, [GREEDY], caller=Caller(1, 1))
    engine.add_choices(PROMPT, [replace(GREEDY, seed=1)], caller=Caller(2, 2))
    for _ in range(8):
        engine.step()
    assert own is not None and engine.speculator.tell(told).plan == own
    assert engine.speculator.tell(replace(told, tenant=2)).plan is None


def test_running_requests_use_the_new_statistics_after_a_reset(target, clock, text):
    engine = engine_of(target, clock, text, names=["ngram"])
    id = engine.add(PROMPT, GREEDY).id
    engine.step()
    engine.speculator.reset()
    [own] = [source for source in engine.speculator.sources if source.name == "ngram"]
    used = {name: source for source, name, _ in engine.speculator.served[id].estimating}
    assert used["ngram"] is own.serving(id)
