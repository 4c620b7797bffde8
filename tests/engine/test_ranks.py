"""The text of several ranks is the text of one process, with every drafter and every event."""

from collections import Counter
from contextlib import contextmanager

import pytest
from hypothesis import given, settings

from specserve.exchange.sampling_params import Sampling
from specserve.models.eagle_head import load_eagle_head
from specserve_kernels import RankLost
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Scripted, Watch, bush, each_choice, engine_for, load_small, plain
from tests.engine.ranks import Shards
from tests.engine.test_promise import scenarios, stretched, truth_by_id
from tests.models.eagle_heads import write_head

SEEN = Counter()
PLACES = {"tensor 2": (2, 1), "pipeline 2": (1, 2), "tensor 2, pipeline 2": (2, 2)}
GREEDY = Sampling(max_tokens=20, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", seed=1)
    tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    write_head(root / "head", eagle_aux_hidden_state_layer_ids=[0, 1])
    return root


@pytest.fixture(scope="module")
def whole(folders):
    return load_small(folders / "target"), load_small(folders / "draft")


@pytest.fixture(scope="module", params=PLACES)
def shards(request, folders):
    return Shards(folders / "target", *PLACES[request.param])


@contextmanager
def running(shards, *args, **given):
    engine = engine_for(shards.target, *args, shards=shards, **given)
    try:
        yield engine
    finally:
        engine.followers.close()


@pytest.mark.parametrize("drafter", ["none", "model", "auto", "eagle", bush])
@settings(max_examples=4)
@given(**scenarios)
def test_text_is_that_of_one_process(folders, whole, shards, drafter, scenario, events, **limits):
    target, draft = whole
    want = plain(target, scenario)
    given, name = stretched(limits), drafter
    if drafter == "eagle":
        given |= {"head": load_eagle_head(folders / "head", shards.target)}
        given |= {"options": {"min_gain": 0.0, "min_value": 0.0}}
    if drafter is bush:
        name = Scripted(drafter, truth_by_id(scenario, want))
    with running(shards, draft if drafter in ("model", "auto") else None, name, **given) as engine:
        watch = Watch(engine)
        got = watch.run(scenario, events)
        SEEN.update(watch.seen)
        SEEN["accepted"] += engine.stats.num_accepted
    for (_, _, may_leave), request, text in zip(each_choice(scenario), got, want, strict=True):
        found = request.token_ids.tolist()
        assert found == (text[: len(found)] if may_leave else text)


@settings(max_examples=4)
@given(**scenarios)
def test_kv_of_8_bits_is_cut_by_heads(whole, shards, scenario, events, **limits):
    want = plain(whole[0], scenario, kv_dtype="int8")
    with running(shards, None, "ngram", kv_dtype="int8", **stretched(limits)) as engine:
        got = Watch(engine).run(scenario, events)
    for (_, _, may_leave), request, text in zip(each_choice(scenario), got, want, strict=True):
        found = request.token_ids.tolist()
        assert found == (text[: len(found)] if may_leave else text)


def test_the_runs_above_met_what_is_hard():
    for what in ("moved", "preempted", "copied", "found", "loaded", "accepted"):
        assert SEEN[what] >= 20, (what, SEEN)


def test_a_lost_rank_ends_the_engine(shards):
    with running(shards, None, "ngram") as engine:
        engine.add([1, 2, 3], GREEDY)
        engine.step()
        engine.followers.each[-1].link.sock.close()
        with pytest.raises(RankLost):
            while not engine.is_idle:
                engine.step()
