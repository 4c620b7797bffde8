"""Draft models with a recurrent state: levels of a tree, rejection, catching up and prefix hits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.engine.runner import RowGroup, snapshot_at
from specserve.errors import ConfigError
from specserve.memory.blocks import BlockPool, BlockTable
from specserve.memory.states import RequestState
from specserve.speculation.draft_model import part
from specserve.speculation.speculator import UserSource
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    SCRIPTS,
    Case,
    Scripted,
    Watch,
    ask_always,
    engine_for,
    load_small,
    plain,
    plan_by_chance,
    planned,
    row_counts,
)
from tests.engine.test_promise import VOCAB, check, scenarios, truth_by_id
from tests.engine.test_recurrent import LAYERS, greedy, prompt, stretched
from tests.engine.test_recurrent_cache import evict

SEEN = {"accepted": 0, "proposed": 0}
EVERY = {"min_gain": 0.0, "min_value": 0.0, "ngrams": False}
CHAIN = EVERY | {"width": 1, "max_depth": 63}
given_scenarios = {**scenarios, "host_bytes": st.sampled_from([0, 1 << 21, 1 << 24])}


@pytest.fixture(scope="module", params=LAYERS)
def recurrent(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / request.param
    return load_small(tiny_checkpoint(folder, request.param, seed=1, **LAYERS[request.param]))


@pytest.fixture(scope="module")
def attending(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", seed=1))


@pytest.mark.parametrize("is_hybrid", [False, True])
@settings(max_examples=10)
@given(drafter=st.sampled_from(["model", "auto"]), seed=st.integers(0, 10**6), **given_scenarios)
def test_text_is_the_targets_own(
    recurrent, attending, is_hybrid, drafter, seed, scenario, events, **limits
):
    """The target is the draft model itself, or has attention only."""
    target = recurrent if is_hybrid else attending
    options = EVERY if drafter == "model" else None
    engine = engine_for(target, recurrent, drafter, options=options, **stretched(limits))
    if drafter == "auto":
        plan_by_chance(engine, seed)
        ask_always(engine)
    check(engine, scenario, events, plain(target, scenario))
    SEEN["accepted"] += engine.stats.num_accepted


@settings(max_examples=10)
@given(script=st.sampled_from(SCRIPTS), seed=st.integers(0, 10**6), **given_scenarios)
def test_text_is_the_targets_own_with_other_sources(
    recurrent, script, seed, scenario, events, **limits
):
    want = plain(recurrent, scenario)
    engine = engine_for(recurrent, recurrent, "auto", **stretched(limits))
    users = UserSource("scripted", Scripted(script, truth_by_id(scenario, want)), VOCAB)
    engine.speculator = planned(engine, users, model_sources=engine.speculator.model_sources)
    plan_by_chance(engine, seed)
    ask_always(engine)
    check(engine, scenario, events, want)
    SEEN["proposed"] += engine.stats.sources["model"].proposed


def test_the_runs_above_had_draft_tokens():
    assert SEEN["accepted"] > 100 and SEEN["proposed"] > 100, SEEN


@pytest.mark.parametrize("options", [CHAIN, EVERY], ids=["chain", "tree"])
def test_an_identical_draft_model_is_always_right(recurrent, options):
    """A state with a rejected node, or without an accepted one, would lead to other tokens."""
    engine = engine_for(recurrent, recurrent, "model", max_nodes=12, options=options)
    counts, seen = row_counts(engine.draft_model.runner), []

    def observe(id, draft, accepted):
        path = [k for k in range(1, len(draft) + 1) if draft.parents[:k] == [*range(k)]]
        seen.append((path, accepted))

    engine.speculator.drafter.observe = observe
    cases = [Case(prompt(n, n), greedy(40)) for n in (1, 20, 150)]
    Watch(engine).run(cases)
    assert all(accepted[: len(path)] == path for path, accepted in seen if len(accepted) < 12)
    assert sum(len(path) for path, _ in seen) > 60
    assert max(map(max, counts)) > 12, "no gap was caught up"


def run_alone(engine, tokens, n):
    """The text, and the rows of each launch of the draft model."""
    counts = row_counts(engine.draft_model.runner)
    request = engine.add(tokens, greedy(n))
    while not engine.is_idle:
        engine.step()
        engine.check()
    return request.token_ids.tolist(), [sum(count) for count in counts]


@pytest.mark.parametrize(
    "limits",
    [{"draft_block_size": 5}, {"max_batched_tokens": 24, "max_running": 4, "draft_block_size": 16}],
)
def test_the_next_turn_of_a_conversation_finds_a_checkpoint(recurrent, limits):
    """Of the output: each replaces the last one. Launches may be smaller than a gap."""
    engine = engine_for(recurrent, recurrent, "model", max_nodes=4, options=CHAIN, **limits)
    first, _ = run_alone(engine, prompt(150), 80)
    drafts = [key for key, each in engine.pool.checkpoints.items() if is_draft(engine, each)]
    assert len(drafts) <= 2, "one of the prompt, one of the output"
    text, rows = run_alone(engine, [*first, *prompt(9, 5)], 30)
    assert sum(n for n in rows if n > 5) <= 2 * 16 + 10, "it ran known tokens again"
    assert text == plain(recurrent, [Case([*first, *prompt(9, 5)], greedy(30))])[0]
    assert engine.stats.num_accepted == engine.stats.num_drafted


def test_each_level_of_a_tree_runs_the_nodes_before_it_again(recurrent):
    engine = engine_for(recurrent, recurrent, "model", max_nodes=4, options=CHAIN)
    _, rows = run_alone(engine, prompt(40), 30)
    assert [1, 2, 3] in [rows[i : i + 3] for i in range(len(rows))], rows


def is_draft(engine, blocks):
    return engine.pool.owners[blocks[0]] == "draft"


def test_checkpoints_at_intervals_are_found(recurrent):
    engine = engine_for(
        recurrent, recurrent, "model", options=CHAIN, state_interval=32, draft_block_size=16
    )
    for end, most in ((200, 201), (150, 151 - 128)):
        _, rows = run_alone(engine, prompt(200)[:end], 4)
        assert sum(n for n in rows if n > 5) <= most


def test_one_part_of_a_divided_group_copies_the_state():
    table = BlockTable(BlockPool(9), 16, state=RequestState(1))
    table.state.snapshot, table.state.snapshot_end = [1], 32
    group = RowGroup(table, [*range(10, 50)], 10, num_read=1)
    parts = [part(group, begin, begin + 8) for begin in range(0, 40, 8)]
    assert [snapshot_at(each) for each in parts] == [0, 0, 6, 0, 0]
    assert snapshot_at(group._replace(num_known=0)) == 0


def test_several_completions_find_the_leaders_checkpoint(recurrent):
    engine = engine_for(recurrent, recurrent, "model", max_nodes=4, options=CHAIN)
    counts = row_counts(engine.draft_model.runner)
    [request, *_] = Watch(engine).run([Case(prompt(100), greedy(12), n=3)])
    assert request.num_output == 12
    assert sum(n for rows in counts for n in rows if n > 16) <= 101 + 2 * 17, counts


def test_a_failed_launch_releases_the_state_that_it_may_have_changed(recurrent):
    engine = engine_for(recurrent, recurrent, "model", max_nodes=4, options=CHAIN)
    request = engine.add(prompt(40), greedy(40))
    while request.num_output < 10:
        engine.step()
    compute = engine.draft_model.runner.compute

    def fail(step, residual):
        compute(step, residual)
        engine.draft_model.runner.compute = compute
        raise MemoryError

    engine.draft_model.runner.compute = fail
    engine.step()
    assert engine.stats.drafter_errors == 1 and not request.draft_table.held
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert request.token_ids.tolist() == plain(recurrent, [Case(prompt(40), greedy(40))])[0]
    assert engine.stats.num_accepted == engine.stats.num_drafted > 20


def test_nothing_leaks_over_many_requests(recurrent):
    """In so small a pool that draft states are taken back."""
    limits = {"kv_bytes": 1 << 20, "max_running": 4, "max_nodes": 3}
    engine = engine_for(recurrent, recurrent, "model", options=EVERY, **limits)
    free = engine.pool.num_blocks
    for i in range(300):
        engine.add(prompt(1 + i * 7 % 40, i % 9), greedy(1 + i % 4))
        while len(engine.requests) > 5:
            engine.step()
        if i % 50 == 0:
            engine.check()
    while not engine.is_idle:
        engine.step()
    engine.check()
    assert engine.pool.is_whole and engine.stats.num_drafted > 100
    engine.pool.drop("draft")
    engine.check()
    assert not any(is_draft(engine, each) for each in engine.pool.checkpoints.values())
    engine.reset_cache()
    assert len(engine.pool.free) == free


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_draft_model_finds_its_states_in_tiers(recurrent, kind, tmp_path):
    """After its blocks were evicted, it runs only the tokens after the checkpoint."""
    disk = {"disk_path": str(tmp_path), "disk_bytes": 1 << 24} if kind == "disk" else {}
    disk |= {"host_bytes": 1 << 19 if disk else 1 << 24}
    limits = {"max_nodes": 4, "options": CHAIN, "draft_block_size": 16}
    engine = engine_for(recurrent, recurrent, "model", **limits, **disk)
    engine.scheduler.is_load_faster = lambda *_: True
    first, _ = run_alone(engine, prompt(150), 40)
    evict(engine)
    ids = [*first, *prompt(9, 5)]
    text, rows = run_alone(engine, ids, 60)
    assert text == plain(recurrent, [Case(ids, greedy(60))])[0]
    assert sum(n for n in rows if n > 5) <= 4 * 16, "it ran known tokens again"
    assert engine.stats.num_accepted > 20
    engine.close()


def test_a_host_tier_without_room_for_two_draft_states_is_refused(recurrent, attending):
    with pytest.raises(ConfigError, match=r"holds fewer than \d+ blocks"):
        engine_for(attending, recurrent, "model", host_bytes=1 << 14)
