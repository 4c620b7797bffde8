"""Beside large requests a small one waits a few steps only; waiting changes no text."""

import pytest

from specserve.exchange.sampling_params import Sampling
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, engine_for, load_small, plain

SMALL = Case([7] * 12, Sampling(max_tokens=6, temperature=0, top_k=0, top_p=1, min_p=0, seed=3))
LARGE = {
    "many choices": Case(
        [*range(1, 51)],
        Sampling(max_tokens=30, temperature=1, top_k=0, top_p=1, min_p=0, seed=3),
        n=24,
    ),
    "a long prompt": Case(
        [*range(1, 241)],
        Sampling(max_tokens=5, temperature=1, top_k=0, top_p=1, min_p=0, seed=4),
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=1))


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("large", LARGE)
def test_a_small_request_speaks_in_its_first_step_and_all_say_the_same(target, large, drafter):
    cases = [LARGE[large], SMALL]
    limits = {"max_running": 6, "prefill_chunk": 24, "max_batched_tokens": 36}
    engine = engine_for(target, None, drafter, **limits)
    requests = engine.add_choices(cases[0].prompt, cases[0].choices)
    for _ in range(5):
        engine.step()
    [small] = engine.add_choices(SMALL.prompt, SMALL.choices)
    assert small.id in [output.id for output in engine.step()]
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert engine.scheduler.num_preempted == (large == "many choices")
    assert [r.token_ids.tolist() for r in [*requests, small]] == plain(target, cases)
