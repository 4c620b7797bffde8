"""Models with a recurrent state: the promise, prefix hits by checkpoints, and wrong replays."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from specserve.config import load_config
from specserve.engine import runner
from specserve.engine.pool_plan import pool_words, size_words
from specserve.engine.tuning import choose_threads, measure
from specserve.exchange.messages import ResumeState
from specserve.exchange.sampling_params import Sampling
from specserve.memory.checkpoints import next_checkpoint
from specserve.memory.states import StateReplay
from specserve.scheduling import scheduler
from specserve_drafters import Draft
from specserve_kernels import cpu
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    SCRIPTS,
    Case,
    Scripted,
    Watch,
    ask_always,
    bush,
    engine_for,
    hedge,
    load_small,
    plain,
    plan_by_chance,
    right,
    wrong_later,
)
from tests.engine.test_promise import check, scenarios, truth_by_id

LAYERS = {
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_hidden_layers": 4,
    },
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "falcon_h1": {},  # attention and Mamba-2 in each layer
}
SHARP = {"logits_scaling": 0.5, "residual_multiplier": 1.0}  # small changes of a state show up
MORE = {"bamba": {}, "granite_hybrid": SHARP, "granite_hybrid_moe": SHARP, "nemotron_h": {}}
MORE |= {"nemotron_h_moe": {}, "olmo_hybrid": LAYERS["qwen3_5"]}
SEEN = {"hits": 0, "replays": 0}


slow = [pytest.param(name, marks=pytest.mark.slow) for name in MORE]


@pytest.fixture(scope="module", params=[*LAYERS, *slow])
def target(request, tmp_path_factory):
    folder, fields = tmp_path_factory.mktemp("models") / request.param, (LAYERS | MORE)
    return load_small(tiny_checkpoint(folder, request.param, seed=1, **fields[request.param]))


@pytest.fixture(scope="module")
def replayed():
    """Counts replays."""
    op, patch = cpu.replay, pytest.MonkeyPatch()

    def replay(states, replays):
        SEEN["replays"] += len(replays.blocks)
        op(states, replays)

    patch.setattr(cpu, "replay", replay)
    yield
    patch.undo()


given_scenarios = {**scenarios, "host_bytes": st.sampled_from([0, 1 << 21, 1 << 24])}


def stretched(limits):
    interval = {"state_interval": 32} if limits["block_size"] == 16 else {}
    host_bytes = limits["host_bytes"] if limits["prefix_cache"] else 0
    limits = limits | {"max_step_nodes": 2 * limits["max_nodes"], "host_bytes": host_bytes}
    return limits | interval


def run(engine, scenario, events, want):
    check(engine, scenario, events, want)
    SEEN["hits"] += engine.pool.num_checkpoint_hits


@settings(max_examples=30)
@given(script=st.sampled_from(SCRIPTS), **given_scenarios)
def test_text_is_the_targets_own_whatever_a_drafter_does(
    target, replayed, script, scenario, events, **limits
):
    want = plain(target, scenario)
    drafter = Scripted(script, truth_by_id(scenario, want))
    run(engine_for(target, None, drafter, **stretched(limits)), scenario, events, want)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), **given_scenarios)
def test_text_is_the_targets_own_whatever_is_planned(
    target, replayed, seed, scenario, events, **limits
):
    engine = engine_for(target, None, "auto", **stretched(limits))
    plan_by_chance(engine, seed)
    ask_always(engine)
    run(engine, scenario, events, plain(target, scenario))


def test_the_runs_above_met_what_is_hard():
    assert SEEN["hits"] >= 20 and SEEN["replays"] >= 200, SEEN


def prompt(n, seed=0):
    return [Random(seed * 1000 + i).randrange(1, 320) for i in range(n)]


def greedy(n):
    return Sampling(max_tokens=n, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def texts_of(engine, cases):
    return [r.token_ids.tolist() for r in Watch(engine).run(cases, is_kept=True)]


def test_text_over_kv_of_8_bits_is_the_same_with_drafts(target):
    scenario = [Case(prompt(40, seed), greedy(24), arrives=seed) for seed in range(3)]
    want = plain(target, scenario, kv_dtype="int8")
    engine = engine_for(target, None, Scripted(bush, dict(enumerate(want))), kv_dtype="int8")
    assert texts_of(engine, scenario) == want


@pytest.mark.parametrize("script", [right, bush, wrong_later, hedge])
def test_the_next_turn_of_a_conversation_computes_only_its_new_tokens(target, script):
    """The output's last checkpoint is within a block of its end."""
    first = Case(prompt(70), greedy(40))
    want = plain(target, [first])[0]
    second = Case([*want, *prompt(9, 5)], greedy(12))
    after = plain(target, [second])[0]
    engine = engine_for(target, None, Scripted(script, [want, after]))
    assert texts_of(engine, [first]) == [want]
    request = engine.add(second.prompt, second.sampling)
    while not engine.is_idle:
        engine.step()
    assert request.token_ids.tolist() == after
    assert request.num_cached >= (len(want) - 1) // 16 * 16 - 16


def test_a_request_resumes_in_another_engine(target):
    """As after the end of an engine process: the other engine computes the state again."""
    case = Case(prompt(40), greedy(30))
    want = plain(target, [case])[0]
    for k in (1, 7, 8, 9, 29):
        engine = engine_for(target, None, Scripted(bush, [want]))
        resume = ResumeState(want[40 : 40 + k])
        [request] = engine.add_choices(case.prompt, [case.sampling], resume=resume)
        while not engine.is_idle:
            engine.step()
            engine.check()
        assert request.token_ids.tolist() == want


def test_a_repeated_prompt_is_found_up_to_its_last_full_block(target):
    engine = engine_for(target)
    for num_cached in (0, 96):
        request = engine.add(prompt(100), greedy(4))
        while not engine.is_idle:
            engine.step()
        assert request.num_cached == num_cached


@pytest.mark.parametrize(("num_history", "num_cached"), [(70, 64), (0, 0)])
def test_an_edited_message_is_computed_from_its_beginning(target, num_history, num_cached):
    """The checkpoint is before the newest message, even if the prompt is computed for the first
    time."""
    engine = engine_for(target, state_interval=0)
    for seed, found in ((1, 0), (2, num_cached)):
        sampling = replace(greedy(4), num_history=num_history)
        request = engine.add(prompt(70) + prompt(60, seed), sampling)
        while not engine.is_idle:
            engine.step()
        assert request.num_cached == found


def test_a_common_beginning_is_found_from_the_third_prompt_on(target):
    """The second prompt finds KV without a checkpoint, and writes one there."""
    engine, found = engine_for(target, state_interval=0), []
    for seed in range(1, 4):
        request = engine.add(prompt(64) + prompt(30, seed), greedy(4))
        while not engine.is_idle:
            engine.step()
        found.append(request.num_cached)
    assert found == [0, 0, 64]


def test_requests_that_arrive_together_share_a_common_beginning(target):
    engine = engine_for(target, state_interval=0)
    requests = [engine.add(prompt(64) + prompt(30, seed), greedy(4)) for seed in range(1, 4)]
    while not engine.is_idle:
        engine.step()
    assert [r.num_cached for r in requests] == [0, 64, 64]


@pytest.mark.parametrize(("interval", "last"), [(32, 128), (5, 144)])
def test_checkpoints_at_intervals_are_found(target, interval, last):
    """An interval within a block means every block."""
    engine = engine_for(target, state_interval=interval, max_batched_tokens=512)
    for end, num_cached in ((200, 0), (150, last)):
        request = engine.add(prompt(200)[:end], greedy(2))
        while not engine.is_idle:
            engine.step()
        assert request.num_cached == num_cached


def test_nothing_leaks_over_many_requests(target):
    engine = engine_for(target, drafter="ngram", kv_bytes=1 << 19, max_running=4)
    rng = Random(7)
    for i in range(150):
        engine.add(prompt(rng.randrange(1, 120), rng.randrange(6)), greedy(rng.randrange(1, 20)))
        for _ in range(rng.randrange(6)):
            engine.step()
        engine.check()
        if i % 10 == 0 and engine.requests:
            engine.finish(next(iter(engine.requests)))
    while not engine.is_idle:
        engine.step()
    engine.check()
    assert engine.pool.is_whole
    assert len(engine.pool.checkpoint_of) <= len(engine.pool.cached)
    engine.reset_cache()
    assert len(engine.pool.free) == engine.pool.num_blocks


def test_nothing_leaks_over_a_thousand_requests(tmp_path):
    target = load_small(tiny_checkpoint(tmp_path, "lfm2", seed=1))
    engine = engine_for(target, drafter="ngram", kv_bytes=1 << 18, max_running=4)
    rng, free = Random(3), engine.pool.num_blocks
    for _ in range(1000):
        engine.add(prompt(rng.randrange(1, 40), rng.randrange(9)), greedy(rng.randrange(1, 5)))
        while len(engine.requests) > 5:
            engine.step()
    while not engine.is_idle:
        engine.step()
    engine.check()
    assert engine.pool.is_whole and engine.pool.num_checkpoint_hits >= 100
    engine.reset_cache()
    assert len(engine.pool.free) == free


def test_start_up_reports_the_size_of_a_state(target):
    engine = engine_for(target)
    size, config = engine.target.arena.state_size, load_config(None, {})
    kib = size * engine.pool.block_bytes / 2**10
    words = pool_words(config, engine.pool, 16, size, 2 * size)
    assert f"A recurrent state takes {kib:.1f} KiB" in words
    assert f"A recurrent draft state takes {2 * kib:.1f} KiB" in words


def test_sizes_have_a_fitting_unit():
    sizes = 512, 40 << 10, 19 << 20
    assert [*map(size_words, sizes)] == ["0.5 KiB", "40.0 KiB", "19.0 MiB"]


def test_steps_are_measured_with_states(target):
    engine, config = engine_for(target), load_config(None, {"model.threads": 1})
    choose_threads(engine.target, engine.pool, config, 288)
    assert (
        measure(engine.target, engine.pool, engine.scheduler.costs, config, 288) != "not measured"
    )
    assert engine.pool.is_whole


def left_out(places):
    return []


def twice(places):
    return [*places, *places]


def in_reverse(places):
    return places[::-1]


def with_a_rejected_node(places):
    return [*places, places[-1] + 1] if places else places


MUTANTS = [left_out, twice, in_reverse, with_a_rejected_node]


def wrong_half(truth, limit):
    """A right chain of one or two tokens, and a wrong one after it."""
    n = 1 + len(truth) % 2
    return Draft.chain([*truth[:n], *(t ^ 1 for t in truth[n : n + 2])])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_replay_changes_the_text(target, mutant, monkeypatch):
    scenario = [Case(prompt(40, seed), greedy(40)) for seed in range(4)]
    want = plain(target, scenario)
    engine = engine_for(target, None, Scripted(wrong_half, dict(enumerate(want))))
    right_form = runner.replays_of

    def replays_of(replays, size):
        changed = [r._replace(places=mutant(r.places)) for r in replays]
        # A copy is due after a replayed token.
        ends = [min(r.snapshot_at, len(r.places)) for r in changed]
        changed = [r._replace(snapshot_at=end) for r, end in zip(changed, ends, strict=True)]
        return right_form(changed, size)

    assert texts_of(engine, scenario) == want, "without a mutant"
    engine.reset_cache()
    monkeypatch.setattr(runner, "replays_of", replays_of)
    engine.speculator.drafter.truth = {4 + i: text for i, text in enumerate(want)}
    assert texts_of(engine, scenario) != want


def test_a_copy_before_its_replay_changes_the_text(target, monkeypatch):
    """A checkpoint of output must have the accepted draft tokens before it."""

    def early(table, token_ids, end, places, spare):
        border = table.num_computed // table.block_size * table.block_size
        blocks = next_checkpoint(table, token_ids, border, spare) if border >= end else []
        if places or blocks:
            replay = StateReplay([*table.state.blocks], places, 0 if blocks else -1, blocks)
            table.pool.updates.replay(replay)

    changed = 0
    for is_mutant in (False, True):
        if is_mutant:
            monkeypatch.setattr(scheduler, "advance_state", early)
        for seed in range(4):
            first = Case(prompt(41 + seed, seed), greedy(60))
            want = plain(target, [first])[0]
            second = Case([*want, *prompt(9, 5)], replace(greedy(40), temperature=1.0))
            after = plain(target, [second])[0]
            engine = engine_for(target, None, Scripted(right, [want, after]), max_nodes=15)
            texts_of(engine, [first])
            changed += texts_of(engine, [second]) != [after]
        assert bool(changed) == is_mutant
