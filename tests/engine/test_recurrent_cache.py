"""Recurrent states in host memory and on disk, in sessions, with adapters and beams."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve.engine.sleep import Sleeper
from specserve.errors import ConfigError
from specserve.exchange.messages import Caller
from specserve.memory.blocks import state_key
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.engine import test_adapters as adapted
from tests.engine.engines import Case, Scripted, bush, engine_for, load_small, plain, right
from tests.engine.test_beams import beams, finished, of_transformers, started
from tests.engine.test_recurrent import LAYERS, greedy, prompt


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5"])
def folder(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / request.param
    return tiny_checkpoint(root, request.param, seed=1, **LAYERS[request.param])


@pytest.fixture(scope="module")
def target(folder):
    return load_small(folder)


def tiered(target, drafter="none", folder=None, **settings):
    """An engine with tiers. Loads are used whatever they cost."""
    settings = {"host_bytes": 1 << 24, "state_interval": 64} | settings
    if folder is not None:
        settings |= {"disk_path": str(folder), "disk_bytes": 1 << 24}
    engine = engine_for(target, None, drafter, **settings)
    engine.scheduler.is_load_faster = lambda *_: True
    return engine


def evict(engine):
    """Let the blocks of other requests take all of the pool, as later steps would."""
    pool = engine.pool
    with torch.inference_mode():
        engine.target.run_updates(pool.updates)
        pool.release(reversed(pool.try_allocate(pool.num_available)))
        engine.target.run_updates(pool.updates)
    assert not pool.found and not pool.checkpoints


def ended(engine, ids, sampling, **more):
    [request] = engine.add_choices(ids, [sampling], **more)
    while not engine.is_idle:
        engine.step()
        engine.check()
    return request


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("script", [right, bush])
def test_turns_are_found_in_tiers_and_have_the_same_text(target, script, kind, tmp_path):
    host_bytes = 1 << 24 if kind == "host" else 1 << 19
    ids, truth = prompt(70), {}
    disk = tmp_path if kind == "disk" else None
    engine = tiered(target, Scripted(script, truth), disk, host_bytes=host_bytes)
    for turn in range(3):
        case = Case(ids, greedy(30))
        truth[turn] = plain(target, [case])[0]
        request = ended(engine, ids, case.sampling)
        assert request.token_ids.tolist() == truth[turn]
        if turn:
            assert request.num_cached >= (len(ids) - 9 - 1) // 16 * 16 - 16
        ids = [*truth[turn], *prompt(9, turn + 5)]
        evict(engine)
    tiers = engine.scheduler.tiers
    assert tiers.stats["host"].hits + (tiers.stats["disk"].hits if tiers.disk else 0) > 10
    engine.close()


def test_a_restarted_engine_finds_states_on_disk(target, tmp_path):
    case = Case(prompt(100), greedy(20))
    [want] = plain(target, [case])
    for num_cached in (0, 96):
        engine = tiered(target, folder=tmp_path)
        request = ended(engine, case.prompt, case.sampling)
        assert request.token_ids.tolist() == want and request.num_cached == num_cached
        pool, scheduler = engine.pool, engine.scheduler
        with torch.inference_mode():
            scheduler.save(pool.tier_keys, engine.target.run_updates)
        engine.close()


def test_a_damaged_part_of_a_state_on_disk_is_not_used(target, tmp_path, monkeypatch):
    case = Case(prompt(100), greedy(20))
    [want] = plain(target, [case])
    engine = tiered(target, folder=tmp_path, state_interval=0)
    ended(engine, case.prompt, case.sampling)
    with torch.inference_mode():
        engine.scheduler.save(engine.pool.tier_keys, engine.target.run_updates)
    keys = [*engine.pool.checkpoints]
    engine.close()
    engine = tiered(target, folder=tmp_path, state_interval=0)
    disk, last = engine.scheduler.tiers.disk, engine.target.arena.state_size - 1
    for key in keys:
        disk.sums[disk.found[state_key(key, last)]] ^= 1
    request = ended(engine, case.prompt, case.sampling)
    assert request.token_ids.tolist() == want and request.num_cached == 0
    assert not engine.scheduler.tiers.loads
    engine.close()


def test_a_preempted_request_loads_its_state(target):
    engine = tiered(target)
    [want] = plain(target, [Case(prompt(70), greedy(40))])
    request = engine.add(prompt(70), greedy(40))
    for _ in range(25):
        engine.step()
    engine.scheduler.preempt(request)
    evict(engine)
    before, known = engine.stats.num_rows, len(request.token_ids)
    while len(request.token_ids) == known:
        engine.step()
        engine.check()
    assert engine.stats.num_rows - before == known - known // 16 * 16
    while not engine.is_idle:
        engine.step()
    assert request.token_ids.tolist() == want


def test_sleep_keeps_states_in_host_memory(target):
    """Also the last checkpoint of output, which only a pending replay has written."""
    cases = [Case(prompt(70), greedy(28))]
    cases.append(Case([*plain(target, cases)[0], *prompt(9, 5)], greedy(4)))
    want = plain(target, cases)
    engine = tiered(target, Scripted(right, dict(enumerate(want))))
    first = ended(engine, cases[0].prompt, cases[0].sampling)
    sleeper = Sleeper.__new__(Sleeper)
    sleeper.ops = SimpleNamespace(release=lambda memory: memory[0].fill_(255))
    with torch.inference_mode():
        sleeper.release_kv(engine)
    again = ended(engine, cases[1].prompt, cases[1].sampling)
    assert [r.token_ids.tolist() for r in (first, again)] == want and again.num_cached == 96


def test_a_session_has_the_blocks_of_its_states(target, tmp_path):
    engine, caller = tiered(target, folder=tmp_path), Caller(0, session="talk")
    ended(engine, prompt(100), greedy(4), caller=caller)
    sessions = engine.scheduler.sessions
    size = engine.target.arena.state_size
    number, near, _ = sessions.count("talk")
    assert number == near == 6 + size * len(engine.pool.checkpoints) > 6 + size
    sessions.pin("talk", True)
    sessions.save(1, "talk")
    while sessions.is_busy:
        engine.step()
        sessions.finished()
    assert sessions.count("talk") == (number, number, number)
    evict(engine)
    for seed in range(1, 4):  # other requests pass through the host tier
        ended(engine, prompt(200, seed), greedy(4))
        evict(engine)
    assert ended(engine, prompt(100), greedy(4)).num_cached == 96
    engine.close()


def test_blocks_are_stored_before_a_replay_overwrites_them(target):
    """Checkpoints of output take the blocks of earlier prompts."""
    cases = [Case(prompt(100, seed), greedy(8)) for seed in range(1, 6)]
    long = Case(prompt(20, 9), greedy(120))
    want, truth = plain(target, [*cases, long]), {}
    engine = tiered(target, Scripted(right, truth), kv_bytes=1 << 19, max_running=1, max_nodes=7)
    for number, place in enumerate([*range(6), *range(5)]):
        truth[number] = want[place]
        case = [*cases, long][place]
        assert ended(engine, case.prompt, case.sampling).token_ids.tolist() == want[place]
    assert engine.scheduler.tiers.stats["host"].hits > 20


def test_an_unwritten_checkpoint_is_not_stored(target):
    """A replay of the next launch writes it, after the stores."""
    engine = tiered(target, max_nodes=0)
    request, pool = engine.add(prompt(60), greedy(40)), engine.pool
    while not pool.updates.replays:
        engine.step()
    unwritten = pool.updates.replays[0].snapshot
    key = pool.checkpoint_of[unwritten[0]]
    assert unwritten and pool.updates.writes_checkpoint(unwritten[-1])
    pool.evict_checkpoint(key)
    assert not engine.scheduler.tiers.has_checkpoint(key, len(unwritten))
    engine.finish(request.id)


def test_a_host_tier_without_room_for_two_states_is_refused(target):
    with pytest.raises(ConfigError, match=r"holds fewer than \d+ blocks"):
        engine_for(target, host_bytes=1 << 14)


@pytest.mark.parametrize("max_running", [2, 64])
def test_beams_are_those_of_transformers(folder, target, max_running):
    """In a small pool and next to other requests, too."""
    theirs, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompt(21)
    want, _ = of_transformers(theirs, ids, 4, max_tokens=20)
    size = {} if max_running > 2 else {"kv_bytes": 1 << 18}
    engine = engine_for(target, None, "ngram", max_running=max_running, **size)
    other = engine.add(prompt(40), greedy(30))
    choices = started(engine, ids, 4, max_tokens=20)
    found = finished(engine, (other.id,))
    assert [found[choice.id][0] for choice in choices] == want
    assert other.token_ids.tolist() == plain(target, [Case(prompt(40), greedy(30))])[0]
    assert engine.pool.is_whole


def test_beams_of_a_known_prompt_are_the_same(target):
    engine = engine_for(target)
    first = beams(engine, prompt(40), 3)
    assert beams(engine, prompt(40), 3) == first and engine.pool.num_checkpoint_hits


def test_adapters_have_their_own_texts_and_states(folder, target, tmp_path):
    modules = "in_proj", "in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "w1", "w2", "up_proj"
    models, refs = (target, None), [None]
    plain_engine = adapted.engine_with(models)
    for seed in range(2):
        path = write_adapter(tmp_path / f"{seed}", folder, seed, modules=modules, scale=0.5)
        refs.append(adapted.load(plain_engine, path))
    how = adapted.sampling(24)
    want = [adapted.alone(models, ref, prompt(40), how)[0] for ref in refs]
    assert len({*map(tuple, want)}) == 3
    engine = adapted.engine_with(models, **{"drafter.name": "ngram"})
    engine.speculator.asks_always = True
    for num_cached in (0, 32):
        each = [engine.add_choices(prompt(40), [how], adapter=ref)[0] for ref in refs]
        adapted.finish(engine)
        assert [r.output.tolist() for r in each] == want
        assert [r.num_cached for r in each] == [num_cached] * 3
