"""Evicted KV comes back from host memory and disk, and the text stays the same."""

from collections import defaultdict
from random import Random
from unittest.mock import Mock

import pytest

from specserve.engine.runner import KVLost
from specserve.exchange.messages import Caller
from specserve.exchange.sampling_params import Sampling
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small

BLOCK = 8192  # bytes of 16 tokens
LARGE = {"kv_bytes": 1 << 26}
SMALL = {"kv_bytes": 20 * BLOCK, "max_running": 4}  # a request of full length fits
MODES = {"host": 0, "host and disk": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return (
        load_small(tiny_checkpoint(root / "target", seed=1), max_len=200),
        load_small(tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1), max_len=200),
    )


def tiered(target, draft=None, drafter="none", folder=None, num_host=400, **overrides):
    """An engine with a small pool. Loads are used whatever they cost."""
    overrides = {"max_len": 200, "host_bytes": num_host * BLOCK, **SMALL, **overrides}
    if folder is not None:
        overrides |= {"disk_path": str(folder), "disk_bytes": 600 * BLOCK}
    engine = engine_for(target, draft, drafter, **overrides)
    assert engine.pool.block_bytes == BLOCK
    engine.scheduler.is_load_faster = lambda *_: True
    return engine


def prompt_of(seed, size=100):
    return [Random(seed).randrange(1, 300) for _ in range(size)]


def sampling(max_tokens=8, **more):
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    return Sampling(max_tokens=max_tokens, **plain, **more)


def run(engine, asked, caller=None):
    """Run (prompt, sampling) pairs at once; return the outputs of each, and the requests."""
    outputs = defaultdict(list)
    requests = [engine.add_choices(p, [s], caller=caller)[0] for p, s in asked]
    while not engine.is_idle:
        for output in engine.step():
            outputs[output.id].append(output)
        engine.check()
    return [outputs[request.id] for request in requests], requests


def evict(engine):
    """Let the blocks of other requests take all of the pool."""
    pool = engine.pool
    pool.release(reversed(pool.try_allocate(pool.num_available)))
    assert not pool.found


CALLS = [
    [(prompt_of(i), sampling(logprobs=3)) for i in range(3)],
    [(prompt_of(0) + prompt_of(9, 20), sampling()), (prompt_of(1, 60), sampling())],
    [(prompt_of(2), sampling(20, prompt_logprobs=2)), (prompt_of(3), sampling(cache_salt="s"))],
    [(prompt_of(3), sampling(30)), (prompt_of(3), sampling(30, cache_salt="s"))],
    [(prompt_of(i, 120), sampling(40)) for i in range(6)],
    [(prompt_of(i, 150), sampling(2, logprobs=1)) for i in range(6)],
]


@pytest.mark.parametrize("has_disk", MODES.values(), ids=MODES)
@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "auto"])
def test_texts_logprobs_and_hits_are_as_with_a_large_pool(pair, drafter, has_disk, tmp_path):
    draft = pair[1] if drafter in ("model", "auto") else None
    large = engine_for(pair[0], draft, drafter, max_len=200, **LARGE | {"max_running": 4})
    num_host = 40 if has_disk else 400
    small = tiered(pair[0], draft, drafter, tmp_path if has_disk else None, num_host)
    for calls in CALLS:
        want, got = ([], [])
        for engine, found in ((large, want), (small, got)):
            for each in calls:
                found += joined(run(engine, [each])[0])
        assert got == want
        evict(small)
    stats = small.scheduler.tiers.stats
    assert stats["host"].hits > 20 and (not has_disk or stats["disk"].hits > 5)
    small.close()


def joined(outputs):
    """Per request, because drafts change the number of steps. Of cached tokens, whole blocks count:
    tiers have no parts of blocks.
    """
    for each in outputs:
        tokens = [token for o in each for token in o.tokens]
        logprobs = [x for o in each for x in o.logprobs]
        scores = [x for o in each for x in o.prompt_logprobs]
        yield tokens, logprobs, scores, each[-1].finish_reason, each[-1].num_cached // 16


def test_concurrent_requests_have_the_same_texts(pair):
    large, small = engine_for(pair[0], max_len=200, **LARGE), tiered(pair[0])
    for _ in range(2):
        for calls in CALLS:
            want, got = (list(joined(run(engine, calls)[0])) for engine in (large, small))
            assert [each[:4] for each in got] == [each[:4] for each in want]
    assert small.scheduler.tiers.stats["host"].hits > 50


def test_a_preempted_request_loads_its_kv(pair):
    engine = tiered(pair[0])
    request = engine.add(prompt_of(0), sampling(40))
    for _ in range(20):
        engine.step()
    engine.scheduler.preempt(request)
    evict(engine)
    before, tokens = engine.stats.num_rows, len(request.token_ids)
    while len(request.token_ids) == tokens:
        engine.step()
        engine.check()
    assert engine.stats.num_rows - before == tokens - tokens // 16 * 16
    engine.finish(request.id)


def test_draft_kv_is_loaded_as_well(pair):
    asked = [(prompt_of(0), sampling(12))]
    options = {"min_gain": 0.0, "min_value": 0.0}
    engine = tiered(*pair, "model", options=options)
    (first,), _ = run(engine, asked)
    evict(engine)
    rows = engine.draft_model.num_rows
    (again,), _ = run(engine, asked)
    drafted = [sum(o.num_drafted for o in outputs) for outputs in (first, again)]
    assert min(drafted) > 0 and engine.draft_model.num_rows - rows < rows - 90
    loaded = engine.scheduler.tiers.stats["host"].hits
    assert loaded > len(prompt_of(0)) // 16


def test_draft_kv_is_loaded_although_a_part_of_a_block_could_be_copied(pair):
    prompt = prompt_of(0)
    engine = tiered(*pair, "model", options={"min_gain": 0.0, "min_value": 0.0})
    (first,), _ = run(engine, [(prompt, sampling(12))])
    evict(engine)
    size = engine.draft_model.runner.kv.block_size
    run(engine, [(prompt[: size // 2] + prompt_of(1), sampling(12))])
    rows = engine.draft_model.num_rows
    (again,), _ = run(engine, [(prompt, sampling(12))])
    assert [o.tokens for o in again] == [o.tokens for o in first]
    assert engine.draft_model.num_rows - rows < len(prompt), "the draft model computes it again"


def test_other_streams_run_while_blocks_are_loaded(pair):
    engine = tiered(pair[0], kv_bytes=60 * BLOCK)
    run(engine, [(prompt_of(0, 180), sampling(2))])
    evict(engine)
    stream = engine.add(prompt_of(1, 20), sampling(60))
    engine.step()
    tiers = engine.scheduler.tiers
    tiers.host_seconds = 1e6  # so that each step loads a block
    request, tokens, steps = engine.add(prompt_of(0, 180), sampling(2)), len(stream.token_ids), 0
    while request.num_output == 0:
        engine.step()
        engine.check()
        steps += 1
    assert request.num_cached == 176 and 11 <= steps <= 14
    assert len(stream.token_ids) - tokens == steps
    for each in (request, stream):
        engine.finish(each.id)


def test_a_load_that_is_slower_than_computing_is_not_used(pair):
    engine = tiered(pair[0])
    del engine.scheduler.is_load_faster
    (_,), (first,) = run(engine, [(prompt_of(0), sampling())])
    for seconds, num_cached in ((1.0, 0), (1e-6, 96)):
        evict(engine)
        engine.scheduler.tiers.host_seconds = seconds
        (_,), (request,) = run(engine, [(prompt_of(0), sampling())])
        assert request.num_cached == num_cached and request.token_ids == first.token_ids


def test_a_load_next_to_streams_takes_longer(pair):
    """Its share of each step decides."""
    engine = tiered(pair[0], kv_bytes=60 * BLOCK)
    del engine.scheduler.is_load_faster
    run(engine, [(prompt_of(0), sampling())])
    seconds = engine.scheduler.costs.seconds(96, 96, 1) / 6 / 2  # half of computing a block
    engine.scheduler.tiers.host_seconds = seconds
    for has_stream, num_cached in ((True, 0), (False, 96)):
        evict(engine)
        stream = engine.add(prompt_of(1, 20), sampling(60))
        engine.step()
        if not has_stream:
            engine.finish(stream.id)
        request = engine.add(prompt_of(0), sampling())
        while request.num_output == 0:
            engine.step()
        assert request.num_cached == num_cached
        for each in (request, stream):
            engine.finish(each.id)


def test_a_request_for_prompt_logprobs_loads_nothing(pair):
    engine = tiered(pair[0])
    run(engine, [(prompt_of(0), sampling())])
    evict(engine)
    run(engine, [(prompt_of(0), sampling(prompt_logprobs=1))])
    assert engine.scheduler.tiers.stats["host"].hits == 0


def test_requests_with_one_prefix_share_a_load(pair):
    engine = tiered(pair[0], kv_bytes=60 * BLOCK)
    run(engine, [(prompt_of(0), sampling())])
    evict(engine)
    tiers = engine.scheduler.tiers
    _, requests = run(engine, [([*prompt_of(0), i], sampling()) for i in range(3)])
    assert [r.num_cached for r in requests] == [96] * 3 and tiers.stats["host"].hits == 6


def test_a_request_may_leave_while_its_blocks_are_loaded(pair):
    engine = tiered(pair[0])
    run(engine, [(prompt_of(0), sampling())])
    for keeps_stream in (False, True):
        evict(engine)
        stream = engine.add(prompt_of(1, 20), sampling(60)) if keeps_stream else None
        engine.step()
        request = engine.add(prompt_of(0), sampling())
        engine.step()
        assert engine.scheduler.tiers.loads
        engine.finish(request.id)
        engine.check()
        assert not engine.scheduler.tiers.loads
        if stream is not None:
            engine.finish(stream.id)
        assert engine.is_idle and engine.pool.is_whole


def test_running_requests_take_the_blocks_of_a_load(pair):
    """Rather than being preempted."""
    engine = tiered(pair[0])
    run(engine, [(prompt_of(0, 150), sampling(2))])
    evict(engine)
    stream = engine.add(prompt_of(1, 90), sampling(100))
    engine.step()
    engine.scheduler.tiers.issue = lambda seconds: None  # loads take forever
    request = engine.add(prompt_of(0, 150), sampling(2))
    while stream.id in engine.requests:
        engine.step()
        engine.check()
    assert engine.scheduler.num_preempted == 0 and request.num_output == 0
    engine.finish(request.id)


def test_a_reset_empties_all_tiers(pair, tmp_path):
    engine = tiered(pair[0], folder=tmp_path)
    run(engine, [(prompt_of(0), sampling())])
    evict(engine)
    engine.step()
    request = engine.add(prompt_of(0), sampling())
    engine.step()
    assert engine.scheduler.tiers.loads
    engine.reset_cache()
    engine.check()
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert request.num_cached == 0
    engine.reset_cache()
    assert all(stats.num_bytes == 0 for stats in engine.scheduler.tiers.stats.values())
    engine.close()


def keep(target, folder, asked, caller=None, **overrides):
    """Run a request, and move its blocks to the folder."""
    engine = tiered(target, folder=folder, **overrides)
    run(engine, [asked], caller)
    evict(engine)
    engine.target.run_updates(engine.pool.updates)
    engine.scheduler.tiers.advance()
    engine.close()


def test_blocks_on_disk_serve_the_next_engine(pair, tmp_path):
    asked = prompt_of(0), sampling()
    keep(pair[0], tmp_path, asked)
    assert found(pair[0], tmp_path, asked) == 96


def found(target, folder, asked, caller=None, **overrides):
    engine = tiered(target, folder=folder, **overrides)
    _, (request,) = run(engine, [asked], caller)
    engine.close()
    return request.num_cached


def test_a_salted_block_is_found_with_the_salt_only(pair, tmp_path):
    keep(pair[0], tmp_path, (prompt_of(0), sampling(cache_salt="mine")))
    assert found(pair[0], tmp_path, (prompt_of(0), sampling())) == 0
    assert found(pair[0], tmp_path, (prompt_of(0), sampling(cache_salt="other"))) == 0
    assert found(pair[0], tmp_path, (prompt_of(0), sampling(cache_salt="mine"))) == 96


def test_a_tenant_finds_only_its_own_blocks(pair, tmp_path):
    asked = prompt_of(0), sampling()
    keep(pair[0], tmp_path, asked, Caller(0, tenant=1))
    assert found(pair[0], tmp_path, asked, Caller(0, tenant=2)) == 0
    assert found(pair[0], tmp_path, asked) == 0
    assert found(pair[0], tmp_path, asked, Caller(0, tenant=1)) == 96


def test_a_damaged_block_ends_the_hit_before_it(pair, tmp_path):
    asked = prompt_of(0), sampling()
    keep(pair[0], tmp_path, asked)
    data = bytearray((tmp_path / "blocks").read_bytes())
    engine = tiered(pair[0], folder=tmp_path)
    keys = engine.tables.prompt_keys(asked[0], "")
    place = engine.scheduler.tiers.disk.found[next(iter(keys.values()))[3]]
    engine.close()
    data[place * BLOCK + 5] ^= 1
    (tmp_path / "blocks").write_bytes(data)
    assert found(pair[0], tmp_path, asked) == 48


def test_no_block_is_kept_whose_copy_was_lost(pair, tmp_path):
    """A step that fails before its updates has not stored the blocks that were evicted for it."""
    engine = tiered(pair[0], folder=tmp_path)
    run(engine, [(prompt_of(0), sampling())], Caller(0, 0, "", "talk"))
    engine.scheduler.sessions.pin("talk", True)
    evict(engine)
    engine.target.launch = Mock(side_effect=RuntimeError("the device has failed"))
    engine.add(prompt_of(1), sampling())
    with pytest.raises(RuntimeError, match="failed"):
        engine.step()
    engine.close()
    assert found(pair[0], tmp_path, (prompt_of(0), sampling())) == 0


def test_lost_updates_empty_the_cache_and_keep_the_disk(pair, tmp_path):
    asked = prompt_of(0), sampling()
    keep(pair[0], tmp_path, asked)
    engine = tiered(pair[0], folder=tmp_path)
    run(engine, [(prompt_of(1), sampling())])
    engine.add(prompt_of(2), sampling())
    with pytest.MonkeyPatch.context() as patch:
        lost = KVLost("KV updates failed")
        lost.__cause__ = MemoryError()
        patch.setattr(engine.target, "launch", Mock(side_effect=lost))
        assert [output.finish_reason for output in engine.step()] == ["error"]
    engine.check()
    assert not engine.pool.found and not engine.scheduler.tiers.host.found
    _, (request,) = run(engine, [asked])
    assert request.num_cached == 96
    engine.close()


def test_a_request_whose_loads_are_cancelled_computes_its_prompt(pair):
    engine = tiered(pair[0])
    run(engine, [(prompt_of(0), sampling())])
    evict(engine)
    request, steps = engine.add(prompt_of(0), sampling()), 0
    while request.num_output == 0:
        engine.step()
        engine.scheduler.cancel_load()  # as a running request does that needs its blocks
        steps += 1
        assert steps < 10, "the request waits forever"
    assert request.num_cached == 0
    engine.finish(request.id)
