"""Which requests run, with which rows: a table of plans, then invariants of every step."""

from array import array
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.scheduling.scheduler import RunningCounts, share
from tests.scheduling.simulation import filled, ids, request, rows, run, scheduler

STREAM, PROMPT = (10, 9), (99, 0)  # known tokens, computed ones

PLANS = {  # (known, computed) of who runs, budget beside 20 rows -> rows and guesses
    "a stream alone": ([STREAM], {}, [(1, 9)]),
    "a stream and as many guesses as fit": ([STREAM], {"max_nodes": 63}, [(1, 19)]),
    "no speculation": ([STREAM], {"max_nodes": 0}, [(1, 0)]),
    "a limit on all guesses": ([STREAM], {"max_step_nodes": 4}, [(1, 4)]),
    "shared evenly": ([STREAM] * 3, {"max_step_nodes": 6}, [(1, 2)] * 3),
    "a prompt alone": ([PROMPT], {}, [(20, 0)]),
    "a prompt's next chunk": ([(99, 90)], {}, [(9, 0)]),
    "a prompt alone, however small a chunk is": ([PROMPT], {"prefill_chunk": 8}, [(20, 0)]),
    "prompts alone": ([(6, 0), PROMPT], {"prefill_chunk": 8}, [(6, 0), (14, 0)]),
    "a chunk's own limit": ([STREAM, PROMPT], {"prefill_chunk": 8}, [(1, 9), (8, 0)]),
    "prompts first come, first served": ([(15, 0), (30, 0), PROMPT], {}, [(15, 0), (5, 0)]),
    "one chunk limit for all prompts": (
        [STREAM, (6, 0), PROMPT],
        {"prefill_chunk": 8},
        [(1, 9), (6, 0), (2, 0)],
    ),
    "one token left to compute is a root, two are a chunk": (
        [(7, 6), (7, 5)],
        {},
        [(1, 9), (2, 0)],
    ),
    "a prompt of one token is a root": ([(1, 0)], {}, [(1, 9)]),
    "prompts come before guesses": ([STREAM] * 4 + [PROMPT], {}, [(1, 0)] * 4 + [(16, 0)]),
    "guesses have what a short prompt leaves": (
        [STREAM] * 3 + [(5, 0)],
        {},
        [(1, 4)] * 3 + [(5, 0)],
    ),
    "and what is left of a step by a chunk": (
        [STREAM] * 4 + [PROMPT],
        {"prefill_chunk": 4},
        [(1, 3)] * 4 + [(4, 0)],
    ),
    "roots come before anything": ([STREAM] * 19 + [PROMPT], {}, [(1, 0)] * 19 + [(1, 0)]),
}


@pytest.mark.parametrize(("states", "budget", "want"), PLANS.values(), ids=PLANS)
def test_the_rows_of_a_step(states, budget, want):
    given = {"max_batched_tokens": 20, "max_running": 19, "max_nodes": 9, "max_step_nodes": 99}
    s = scheduler(**(given | budget))
    run(s, states)
    scheduled = filled(s)
    assert rows(scheduled) == dict(enumerate(want))
    for w in scheduled:
        assert w.start == w.request.num_computed
        assert w.is_sampled == (w.end == len(w.request.token_ids))
        assert w.is_root == (w.end - w.start == 1 and w.is_sampled)


CATCH_UPS = {  # (known, computed, prompt) of who runs -> rows of the draft model
    "a stream alone: those of a whole step, ten for one": ([(99, 98, 90)], 10 * 64),
    "more streams: those of a chunk": ([(99, 98, 90), (10, 9, 5)], 10 * 16),
    "beside a prompt: as many as it has": ([(99, 98, 90), (99, 0, 99)], 16),
    "beside the last token of a prompt": ([(99, 98, 90), (50, 49, 50)], 16),
    "a prompt alone": ([(99, 0, 99)], 16),
}


@pytest.mark.parametrize(("states", "want"), CATCH_UPS.values(), ids=CATCH_UPS)
def test_the_draft_model_may_catch_up_in_as_many_rows_as_prompts_leave_time_for(states, want):
    s = scheduler(max_batched_tokens=64, prefill_chunk=16, max_running=8, draft_rows_per_row=10)
    requests = run(s, [(known, computed) for known, computed, _ in states])
    for r, (_, _, num_prompt) in zip(requests, states, strict=True):
        r.num_prompt = num_prompt
    s.plan()
    assert s.catch_up_rows == want


@pytest.mark.parametrize(("max_tokens", "draft_tokens"), [(1, 0), (2, 1), (5, 4), (50, 9)])
def test_nobody_draft_tokens_beyond_the_tokens_left(max_tokens, draft_tokens):
    s = scheduler(max_nodes=9)
    run(s, [STREAM], max_tokens=max_tokens)
    assert rows(filled(s)) == {0: (1, draft_tokens)}


SHARES = {  # total, caps, step -> shares
    "nobody": (5, [], 3, []),
    "nothing": (0, [4, 4], 0, [0, 0]),
    "evenly": (6, [9, 9, 9], 0, [2, 2, 2]),
    "no more than anyone can take": (99, [3, 1, 2], 0, [3, 1, 2]),
    "what one leaves the others take": (9, [1, 9, 9], 0, [1, 4, 4]),
    "what does not divide, from the first": (7, [9, 9, 9], 0, [3, 2, 2]),
    "a step later, from the second": (7, [9, 9, 9], 1, [2, 3, 2]),
    "two steps later it goes round the end": (8, [9, 9, 9], 2, [3, 2, 3]),
    "steps go on counting": (7, [9, 9, 9], 4, [2, 3, 2]),
    "fewer than there are takers": (2, [9, 9, 9], 2, [1, 0, 1]),
    "who can take none is passed over": (3, [0, 9, 0, 9], 0, [0, 2, 0, 1]),
}


@pytest.mark.parametrize(("total", "caps", "step", "want"), SHARES.values(), ids=SHARES)
def test_a_share_is(total, caps, step, want):
    assert share(total, caps, step) == want


def test_what_does_not_divide_goes_round():
    s = scheduler(max_nodes=9, max_step_nodes=7)
    run(s, [STREAM] * 3)
    plans = [rows(filled(s)) for _ in range(3)]
    assert [sum(plan[i][1] for plan in plans) for i in range(3)] == [7, 7, 7]


def advance(scheduled):
    """Compute what was planned; who is sampled says one more token."""
    for w in scheduled:
        w.request.table.num_computed = w.end
        if w.is_sampled:
            w.request.token_ids.append(0)
            w.request.table.trim()


def test_a_long_prompt_stalls_nobody_and_gets_on():
    s = scheduler(max_batched_tokens=16, max_running=8, max_nodes=4)
    streams = run(s, [STREAM] * 3)
    s.add(late := request(s, 9, 300))
    for _ in range(20):
        done, scheduled = late.num_computed, filled(s)
        assert {r.id for r in streams} <= rows(scheduled).keys()
        assert rows(scheduled)[9][0] == 13
        advance(scheduled)
        assert late.num_computed > done


def test_admission_is_first_come_first_served():
    s = scheduler(num_blocks=4)
    for id, known in enumerate([16, 16 * 4, 16]):
        s.add(request(s, id, known))
    s.plan()
    assert [r.id for r in s.running] == [0]
    assert ids(s.waiting) == [1, 2], "a small request does not overtake"


@pytest.mark.parametrize(("free", "running"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_admission_leaves_a_block_to_every_running_request(free, running):
    s = scheduler(num_blocks=1 + free)
    run(s, [STREAM])
    for id in (1, 2):
        s.add(request(s, id, 10))
    s.plan_roots()
    s.admit()
    assert len(s.running) == running


def test_the_smaller_priority_is_admitted_first_then_who_came_first():
    s = scheduler(max_running=3)
    for id, priority in enumerate([5, 0, -1, 0, 5]):
        s.add(request(s, id, 10, priority=priority, text=1000 * id))
    s.plan()
    assert (ids(s.running), ids(s.waiting)) == ([2, 1, 3], [0, 4])


@pytest.mark.parametrize(("priority", "running"), [(-1, [9, 0]), (0, [0, 1]), (1, [0, 1])])
def test_a_newcomer_takes_the_place_of_a_larger_priority_only(priority, running):
    s = scheduler(max_running=2)
    run(s, [STREAM] * 2)
    s.add(request(s, 9, 10, priority=priority))
    s.plan()
    assert (ids(s.running), s.num_preempted) == (running, int(priority < 0))


@pytest.mark.parametrize(("known", "running"), [(70, [9, 0]), (90, [9]), (150, [0, 1])])
def test_a_newcomer_preempts_no_more_than_it_takes_and_nobody_in_vain(known, running):
    s = scheduler(num_blocks=9)
    for r in run(s, [(33, 32)] * 2):
        r.draft_table.try_reserve(16)
    s.add(request(s, 9, known, priority=-1))
    s.admit()
    assert ids(s.running) == running
    if known == 150:
        assert [len(r.draft_table.blocks) for r in s.running] == [1, 1]


def test_rows_for_prompts_go_by_rank():
    s = scheduler(max_batched_tokens=20, max_running=8)
    s.add(request(s, 0, 50, priority=1))
    s.add(request(s, 1, 15, text=1000))
    assert rows(filled(s)) == {1: (15, 0), 0: (5, 0)}


def test_blocks_are_taken_as_they_are_about_to_be_written():
    s = scheduler(num_blocks=20, max_batched_tokens=16, max_running=8)
    s.add(late := request(s, 0, 160))
    for chunks in range(1, 4):
        advance(s.plan())
        assert len(late.table.blocks) == chunks


def test_what_a_prompt_has_been_promised_goes_to_nobody_else():
    s = scheduler(num_blocks=14, prefill_chunk=16, max_nodes=63)
    run(s, [STREAM])
    s.add(request(s, 1, 160, text=1000))
    for _ in range(9):
        scheduled = filled(s)
        assert len(scheduled[0].draft) <= 63 and len(scheduled) == 2
        advance(scheduled)
    s.add(request(s, 2, 30, text=2000))
    s.plan()
    assert ids(s.waiting) == [2], "a block for each of the two would not be left"


def test_prompts_that_hold_a_part_of_the_pool_each_do_not_wait_for_each_other():
    s = scheduler(num_blocks=6)
    for r in run(s, [(48, 48)] * 2):
        r.token_ids.extend(range(30))
    scheduled = s.plan()
    assert ids(s.running) == [0] and rows(scheduled) == {0: (30, 0)}
    assert ids(s.waiting) == [1]


def publish(s, r, computed):
    r.table.num_computed = computed
    r.publish()


def test_who_begins_like_one_who_is_computing_waits_for_the_block():
    s = scheduler(max_batched_tokens=32, max_running=8)
    for id, text in ((0, 0), (1, 0), (2, 1000)):
        s.add(request(s, id, 60, text=text))
    s.plan()
    assert (ids(s.running), ids(s.waiting)) == ([0, 2], [1])
    publish(s, s.running[0], 32)
    s.plan()
    assert ids(s.waiting) == [1], "the third block is still to come"
    publish(s, s.running[0], 48)
    s.plan()
    assert (ids(s.waiting), s.running[1].num_computed) == ([], 48)


@pytest.mark.parametrize(("num_blocks", "is_in"), [(8, False), (9, True)])
def test_what_is_found_but_held_by_nobody_counts_as_taken(num_blocks, is_in):
    s = scheduler(num_blocks=num_blocks)
    old = request(s, 0, 65)
    assert old.table.try_reserve(64)
    publish(s, old, 64)
    old.release()
    run(s, [STREAM])
    s.add(request(s, 9, 100))
    s.admit()
    assert (9 in ids(s.running)) == is_in


def test_nobody_waits_for_one_who_has_gone():
    s = scheduler(max_batched_tokens=32, max_running=8)
    for id in (0, 1):
        s.add(request(s, id, 60))
    s.plan()
    s.remove(s.running[0])
    assert rows(filled(s)) == {1: (32, 0)}


def test_what_a_waiting_choice_was_brought_goes_before_a_running_request():
    s = scheduler(num_blocks=6, max_running=1)
    (stream,) = run(s, [(33, 33)])
    other = request(s, 1, 33)
    other.table.fork(stream.table, 32)
    stream.table.clear()
    assert stream.table.try_reserve(48)
    stream.table.num_computed = 47
    s.pool.try_allocate(s.pool.num_available)
    stream.token_ids = array("i", range(49))
    stream.table.num_computed = 48
    s.add(other)
    assert rows(filled(s)).keys() == {0}
    assert len(other.table.blocks) == 0 and s.num_preempted == 0


def test_no_more_than_max_running_are_admitted():
    s = scheduler(max_running=2)
    for id in range(4):
        s.add(request(s, id, 10))
    s.plan()
    assert ([r.id for r in s.running], ids(s.waiting)) == ([0, 1], [2, 3])


def test_whoever_is_admitted_has_blocks_for_all_it_knows():
    s = scheduler()
    s.add(request(s, 0, 33))
    assert rows(filled(s)) == {0: (33, 0)}
    assert s.running[0].table.missing(33) == 0


def test_a_prompt_of_one_token_is_a_root_in_the_step_of_its_admission():
    s = scheduler(max_nodes=3)
    run(s, [STREAM])
    s.add(request(s, 1, 1))
    assert rows(filled(s)) == {0: (1, 3), 1: (1, 3)}


def streams_of_full_blocks(num_blocks):
    """Three streams whose next token needs a new block each."""
    s = scheduler(num_blocks)
    for id in range(3):
        s.running.append(r := request(s, id, 33))
        assert r.table.try_reserve(32)
        r.table.num_computed = 32
    return s, s.running[:]


def test_where_blocks_run_out_the_youngest_makes_room():
    s, (old, middle, young) = streams_of_full_blocks(6)
    assert rows(filled(s)) == {0: (1, 15), 1: (1, 15)}
    assert (s.running, list(s.waiting), s.num_preempted) == ([old, middle], [young], 1)
    assert (young.num_computed, len(young.table.blocks)) == (0, 0)
    assert len(young.token_ids) == 33, "what it has said stays said"


def test_the_youngest_itself_goes_where_it_is_the_one_in_need():
    s, (old, middle, young) = streams_of_full_blocks(8)
    assert set(rows(filled(s))) == {0, 1}
    assert (s.running, list(s.waiting)) == ([old, middle], [young])


def test_who_was_preempted_comes_before_who_waits_and_waits_for_blocks():
    s, (_, _, young) = streams_of_full_blocks(6)
    s.add(request(s, 9, 1))
    s.plan()
    assert sorted(ids(s.waiting)) == [young.id, 9]
    assert s.waiting.next(RunningCounts(s.running)) is young


def test_draft_blocks_go_before_a_request_does_the_youngests_first():
    s, requests = streams_of_full_blocks(10)
    for r in requests[:2]:
        assert r.draft_table.try_reserve(32)
        r.draft_table.num_computed = 32
    assert rows(filled(s)).keys() == {0, 1, 2}
    assert [len(r.draft_table.blocks) for r in requests] == [0, 0, 0]
    assert (requests[0].draft_table.num_computed, s.num_preempted) == (0, 0)


def test_only_as_many_draft_blocks_go_as_are_needed():
    s, requests = streams_of_full_blocks(11)
    for r, slots in zip(requests, (16, 32, 32), strict=True):
        assert r.draft_table.try_reserve(slots)
    s.plan_roots()
    assert [len(r.draft_table.blocks) for r in requests] == [1, 0, 0]


def test_draft_blocks_go_before_a_newcomer_waits():
    s = scheduler(num_blocks=6)
    (stream,) = run(s, [STREAM])
    assert stream.draft_table.try_reserve(64)
    s.add(request(s, 1, 40))
    assert set(rows(filled(s))) == {0, 1}
    assert len(stream.draft_table.blocks) == 0


def test_draft_blocks_stay_where_they_would_not_be_enough():
    s = scheduler(num_blocks=6)
    (stream,) = run(s, [STREAM])
    assert stream.draft_table.try_reserve(64)
    s.add(request(s, 1, 200))
    assert set(rows(filled(s))) == {0}
    assert len(stream.draft_table.blocks) == 4


@pytest.mark.parametrize(("num_blocks", "draft_tokens"), [(1, 6), (2, 22), (3, 30)])
def test_a_tree_without_blocks_is_cut_never_refused(num_blocks, draft_tokens):
    s = scheduler(num_blocks=num_blocks, max_nodes=30)
    (stream,) = run(s, [STREAM])
    assert rows(filled(s)) == {0: (1, draft_tokens)}
    assert stream.table.missing(10 + draft_tokens) == 0


@pytest.mark.parametrize("place", ["running", "waiting"])
def test_who_is_removed_gives_everything_back(place):
    s = scheduler(num_blocks=9)
    (r,) = run(s, [STREAM])
    r.draft_table.try_reserve(40)
    if place == "waiting":
        s.preempt(r)
    s.remove(r)
    assert ([*s.running, *s.waiting], s.pool.num_available) == ([], 9)


def test_who_is_nowhere_is_removed_without_harm():
    s = scheduler(num_blocks=9)
    s.remove(request(s, 0, 5))
    assert s.pool.num_available == 9


counts = st.integers(1, 60)


@settings(max_examples=150)
@given(
    arrivals=st.lists(
        st.tuples(counts, st.integers(1, 12), st.integers(-1, 1), st.sampled_from([0, 0, 1000])),
        min_size=1,
        max_size=8,
    ),
    max_running=st.integers(1, 6),
    room=st.integers(1, 30),
    chunk=st.integers(1, 40),
    nodes=st.integers(0, 63),
    step_nodes=st.integers(0, 40),
    num_blocks=st.integers(9, 30),
    block_size=st.sampled_from([16, 17]),
    accepts=st.randoms(use_true_random=False),
)
def test_every_step_keeps_to_its_limits_and_everyone_ends(
    arrivals, max_running, room, chunk, nodes, step_nodes, num_blocks, block_size, accepts
):
    budget = max_running + room
    s = scheduler(
        num_blocks,
        max_running=max_running,
        max_batched_tokens=budget,
        prefill_chunk=chunk,
        max_nodes=nodes,
        max_step_nodes=step_nodes,
    )
    for id, (known, max_tokens, priority, text) in enumerate(arrivals):
        s.add(request(s, id, known, max_tokens, block_size, priority, text))
    while s.running or s.waiting:
        scheduled = filled(s)
        assert scheduled, "a step with someone waiting serves someone"
        check_step(s, scheduled, budget, chunk, nodes, step_nodes)
        for w in scheduled:
            finish(s, w, accepts)
        s.pool.check(t.blocks for r in s.running for t in (r.table, r.draft_table))
        assert s.running == sorted(s.running, key=lambda r: r.rank)
    assert s.pool.num_available == num_blocks


def check_step(s, scheduled, budget, chunk, nodes, step_nodes):
    chunks = [w for w in scheduled if not w.is_root]
    draft_tokens = [len(w.draft) for w in scheduled]
    assert len({w.request.id for w in scheduled}) == len(scheduled)
    assert sum(w.end - w.start for w in scheduled) + sum(draft_tokens) <= budget
    rows = sum(w.end - w.start for w in chunks)
    assert rows <= chunk or len(chunks) == len(scheduled), "a stream waits for no more than a chunk"
    assert sum(draft_tokens) <= step_nodes and max(draft_tokens) <= nodes
    assert not any(w.draft_limit for w in chunks), "causal rows or a tree, never both"
    assert {r.id for r in s.running if r.is_due} == {w.request.id for w in scheduled if w.is_root}
    assert {r.id for r in s.running} >= {w.request.id for w in scheduled}
    assert all(w.request.table.missing(w.end + len(w.draft)) == 0 for w in scheduled)
    if any(len(r.token_ids) - r.num_computed > 1 for r in s.running):
        assert chunks, "trees starve no prompt"


def finish(s, w, accepts):
    """What a step does to a request: its guesses are right or wrong at random."""
    w.request.table.num_computed = w.end
    if w.is_sampled:
        accepted = accepts.randint(0, len(w.draft))
        w.request.table.num_computed += accepted
        w.request.token_ids.extend([0] * (accepted + 1))
        w.request.table.trim()
    if w.request.num_left == 0:
        s.remove(w.request)


def with_targets(s, requests, tpot):
    """Streams that are neither ahead of their targets nor behind; a row costs a millisecond."""
    for r in requests:
        r.tpot, r.num_prompt = tpot, len(r.token_ids) - 100
        r.first_token_at = perf_counter() - 100 * (tpot or 0.0)
    for size in (1, 16, 64, 256) * 3:
        s.costs.observe(size, 0, 1, 0.001 * size)


@pytest.mark.parametrize(
    ("tpot", "rows_of_prompts"), [(0.101, 95), (0.0301, 23), (0.01, 16), (None, 32)]
)
def test_next_to_streams_with_targets_prompts_have_the_rows_that_keep_them(tpot, rows_of_prompts):
    s = scheduler(max_batched_tokens=512, prefill_chunk=32, max_nodes=0)
    streams = run(s, [(120, 119)])
    s.add(request(s, 9, 2000, text=1000))
    with_targets(s, streams, tpot)
    assert rows(s.plan())[9] == (rows_of_prompts, 0)


def test_next_to_streams_with_targets_the_draft_model_catches_up_in_what_they_leave():
    caught_up = {}
    for tpot in (0.0301, 1.0, None):
        s = scheduler(max_batched_tokens=64, prefill_chunk=64, draft_rows_per_row=10)
        streams = run(s, [(120, 119), (130, 129)])
        with_targets(s, streams, tpot)
        s.plan()
        caught_up[tpot] = s.catch_up_rows
    assert caught_up == {0.0301: 220, 1.0: 640, None: 640}


def test_making_draft_tokens_leaves_prompts_next_to_streams_with_targets_less_time():
    s = scheduler(max_batched_tokens=512, prefill_chunk=32, max_nodes=0)
    streams = run(s, [(120, 119)])
    s.add(request(s, 9, 2000, text=1000))
    with_targets(s, streams, 0.101)
    s.drafted(0.06)
    s.drafted(0.0)  # the slowest steps count
    given, _ = rows(s.plan())[9]
    assert given < 64


def test_a_stream_without_a_target_waits_for_no_more_than_a_chunk():
    s = scheduler(max_batched_tokens=512, prefill_chunk=32, max_nodes=0)
    streams = run(s, [(120, 119), (130, 129)])
    s.add(request(s, 9, 2000, text=1000))
    with_targets(s, streams[:1], 1.0)
    assert rows(s.plan())[9] == (32, 0)


def test_half_of_the_rows_go_to_the_prompt_nearest_to_missing_its_target():
    s = scheduler(max_batched_tokens=64, prefill_chunk=64)
    prompts = run(s, [(400, 0), (300, 0), (200, 0), (350, 0)])
    for _ in range(3):
        s.costs.observe(64, 0, 1, 0.064)
    for r, ttft in zip(prompts, (None, 0.35, 100.0, 0.6), strict=True):
        r.ttft, r.arrived_at = ttft, perf_counter()
    given = rows(s.plan())
    assert {id: n for id, (n, _) in given.items()} == {0: 32, 1: 32}
    prompts[1].ttft = 0.2  # it cannot be met any more
    assert rows(s.plan())[3] == (32, 0)


def test_who_is_due_first_is_admitted_every_other_time():
    s = scheduler(max_running=3)
    for id in range(6):
        s.add(r := request(s, id, 10, text=1000 * id))
        s.waiting.remove(r)
        r.ttft, r.arrived_at = {5: 60.0, 4: 90.0, 3: 0.001}.get(id), perf_counter() - 1
        s.add(r)
    for line in s.waiting.lines[0].values():
        line.num_left = 0
    s.plan()
    assert sorted(ids(s.running)) == [0, 4, 5], "the target of request 3 is missed already"


def test_few_rows_with_a_prompts_among_them_teach_no_costs():
    """Of a prompt's rows no logits are read, so they cost less than draft tokens."""
    s = scheduler(max_batched_tokens=256)
    s.add(request(s, 0, 40))
    s.plan()
    s.timed(40, 1.0)
    assert s.step.prompt_rows == 40 and not s.costs.has_steps
    other = scheduler(max_batched_tokens=256)
    other.add(request(other, 0, 200))
    other.plan()
    other.timed(200, 1.0)
    assert other.costs.has_steps, "rows of a large prompt do"
