"""Successors from the target's logits: what is taken over, whose it is, and what that costs."""

import pytest
import torch
from msgspec.structs import replace

from specserve.exchange.messages import Caller
from specserve.exchange.sampling_params import Sampling, SpeculationParams
from specserve.speculation import recycler
from specserve.speculation.planner import AcceptanceStats
from specserve_drafters.recycle import NUM_SUCCESSORS, ONE
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import ask_always, engine_for, load_small

PROMPT = [7, 8, 9]
GREEDY = Sampling(max_tokens=60, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def engine(target, clock):
    engine = engine_for(target, None, "auto", options={"sources": ["recycle"]})
    ask_always(engine)
    return engine


def source_of(engine):
    return engine.speculator.recyclers[0].source


def run(engine, tenant=0, prompt=PROMPT, **asked):
    """A request's text, and how many guesses it had."""
    before = engine.stats.num_drafted
    choices = engine.add_choices(prompt, [replace(GREEDY, **asked)], caller=Caller(0, tenant))
    while not engine.is_idle:
        engine.step()
    return choices[0].token_ids.tolist(), engine.stats.num_drafted - before


def logits_after(target, text):
    """Of every token of a text, from an engine without guesses."""
    engine, found = engine_for(target), []
    launch = engine.target.launch

    def spy(step):
        launched = launch(step)
        found.append(launched.logits.clone())
        return launched

    engine.target.launch = spy
    engine.add(text[: len(PROMPT)], replace(GREEDY, max_tokens=len(text) - len(PROMPT)))
    while not engine.is_idle:
        engine.step()
    return torch.cat(found)


def test_successors_are_the_likeliest_by_the_targets_logits(engine, target, monkeypatch):
    """Also where the request has a bias and a ban: they are of the model's own logits."""
    text, _ = run(engine)
    source, table = source_of(engine), source_of(engine).table
    [known] = source.scopes.idle.values()
    seen = set()
    for token, logits in zip(text[len(PROMPT) - 1 :], logits_after(target, text), strict=False):
        if token in seen:
            continue
        seen.add(token)
        slot = table.find(known.number, token)
        begin, end = slot * NUM_SUCCESSORS, (slot + 1) * NUM_SUCCESSORS
        p, ids = logits.float().softmax(0).topk(NUM_SUCCESSORS)
        assert table.ids[begin:end].tolist() == ids.tolist()
        kept = [each / ONE for each in table.p[begin:end]]
        assert kept == pytest.approx(p.tolist(), abs=2 / ONE)
    assert len(seen) > 10


def test_successors_are_of_raw_logits_whatever_a_request_bans(engine, target):
    text, _ = run(engine)
    first = text[len(PROMPT)]
    run(engine, cache_salt="b", logit_bias={first: -100.0})
    known = source_of(engine).scopes.find((0, "b", ""))
    slot = source_of(engine).table.find(known.number, PROMPT[-1])
    assert source_of(engine).table.best(slot)[0] == first


def test_draft_tokens_come_from_requests_of_the_same_key_and_salt_alone(engine):
    assert run(engine, tenant=1, cache_salt="a", max_tokens=1)[1] == 0
    source = source_of(engine)
    asked = {"max_tokens": 2, "speculation": SpeculationParams(learn=False)}
    assert run(engine, tenant=2, cache_salt="a", **asked)[1] == 0
    assert run(engine, tenant=1, cache_salt="b", **asked)[1] == 0
    assert source.table.now == 1
    run(engine, tenant=1, cache_salt="a", max_tokens=60)
    assert run(engine, tenant=1, cache_salt="a", **asked | {"max_tokens": 60})[1] > 0
    assert run(engine, tenant=1, cache_salt="b", **asked | {"max_tokens": 60})[1] == 0


def test_what_is_not_to_be_learnt_leaves_nothing(engine):
    run(engine, speculation=SpeculationParams(learn=False))
    table = source_of(engine).table
    assert not any(table.keys) and not any(table.ids) and table.now == 0
    assert run(engine)[0] and any(table.keys)
    assert not source_of(engine).is_learnt


def test_draft_tokens_of_successors_are_accepted(engine):
    first, _ = run(engine)
    again, _ = run(engine)
    assert first == again and engine.stats.sources["recycle"].accepted > 5


def test_taking_over_has_a_small_share_of_the_time(engine, clock):
    token_recycler, taken, before = engine.speculator.recyclers[0], [], clock.now
    enter = token_recycler.enter

    def slow(wanted, answers):
        taken.append(0.001)
        clock.now += 0.001
        enter(wanted, answers)

    token_recycler.enter = slow
    for seed in range(6):
        run(engine, temperature=3.0, seed=seed, max_tokens=200)
    spent = clock.now - before
    assert len(taken) > 1 and sum(taken) < recycler.COLLECTING * spent + 2 * 0.001


@pytest.mark.parametrize(("saved", "part"), [(0.1, 1.0), (-0.1, recycler.SELDOM)])
def test_a_source_that_saves_nothing_collects_seldom(engine, saved, part):
    acceptance, [token_recycler] = AcceptanceStats(), engine.speculator.recyclers
    acceptance.set_account("recycle", 0.0, saved)
    assert token_recycler.has_time([1], [acceptance], 2.0)
    assert acceptance.left == pytest.approx(part * recycler.COLLECTING * 2.0)


def test_rows_whose_logits_are_gone_are_left_out(engine):
    engine.target.is_sliced = lambda step, draws: True
    run(engine)
    assert not any(source_of(engine).table.keys)


def test_an_error_in_taking_over_costs_no_text(engine):
    want, _ = run(engine)
    engine.speculator.recyclers[0].enter = lambda wanted, answers: 1 / 0
    assert run(engine, cache_salt="b")[0] == want
    assert engine.stats.sources["recycle"].errors > 0
