"""Earlier outputs as guesses: whose requests see them."""

import pytest
from msgspec.structs import replace

from specserve.exchange.messages import Caller
from specserve.exchange.sampling_params import Sampling, SpeculationParams
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import ask_always, engine_for, load_small

PROMPT = [7, 8, 9]
GREEDY = Sampling(max_tokens=40, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1))


@pytest.fixture
def engine(target, monkeypatch):
    Clock(monkeypatch)  # so that auto is sure to guess
    engine = engine_for(target, None, "auto", options={"sources": ["suffix"]})
    ask_always(engine)
    return engine


def accepted(engine, tenant=0, **asked):
    """How many guesses of a request were right."""
    before = engine.stats.num_accepted
    engine.add_choices(PROMPT, [replace(GREEDY, **asked)], caller=Caller(0, tenant))
    while not engine.is_idle:
        engine.step()
    return engine.stats.num_accepted - before


def test_what_comes_again_is_drafted_for_the_same_key_and_salt_alone(engine):
    assert accepted(engine, tenant=1, cache_salt="a") == 0
    assert accepted(engine, tenant=2, cache_salt="a") == 0
    assert accepted(engine, tenant=1, cache_salt="b") == 0
    assert accepted(engine, tenant=1, cache_salt="a") > 20


def test_what_is_not_to_be_learnt_is_not_drafted(engine):
    assert accepted(engine, speculation=SpeculationParams(learn=False)) == 0
    assert accepted(engine) == 0
    assert accepted(engine) > 20
    assert accepted(engine, speculation=SpeculationParams(enabled=False)) == 0


def test_nothing_of_a_request_is_kept_that_has_ended(engine):
    accepted(engine, speculation=SpeculationParams(learn=False))
    (suffix,) = (s for s in engine.speculator.sources if s.name == "suffix")
    assert not suffix.requests and not suffix.scopes
