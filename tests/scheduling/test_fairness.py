"""How many steps a request waits beside larger ones, and that these still get on.

A step of these simulations has 64 places and 128 rows for prompts, or 192 if no stream runs, where
nothing else is said.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.scheduling.scheduler import Queue, RunningCounts, prefill_rows
from tests.scheduling.simulation import Simulation, ids, request, scheduler


@pytest.mark.parametrize("step", [0, 1, 2, 10, 140, 155])
def test_a_small_request_next_to_128_choices_speaks_in_its_first_step(step):
    s = Simulation()
    large = s.ask(100, max_tokens=150, n=128)
    for _ in range(step):
        s.step()
    [small] = s.ask(20)
    s.finish()
    assert s.waited[small] == 1
    assert s.scheduler.num_preempted <= 1
    assert s.num_steps <= 2 * (1 + 150) + 10, "the small one's 10 steps, at most, are added"
    assert s.waited.keys() == {*large, small}


def test_next_to_128_choices_small_requests_that_come_together_all_speak_within_some_steps():
    s = Simulation()
    s.ask(100, max_tokens=150, n=128)
    for _ in range(10):
        s.step()
    small = [s.ask(20)[0] for _ in range(30)]
    s.finish()
    assert max(s.waited[id] for id in small) <= 30 * 20 // 128 + 1
    assert s.scheduler.num_preempted <= 30


def test_the_place_comes_from_the_last_of_the_largest_call():
    s = Simulation(max_running=6)
    few, many = s.ask(20, n=2), s.ask(20, n=4)
    for _ in range(3):
        s.step()
    assert ids(s.scheduler.running) == few + many
    [small] = s.ask(20)
    s.step()
    assert ids(s.scheduler.running) == [*few, *many[:3], small]


def test_two_calls_of_many_choices_end_up_with_half_of_the_places_each():
    s = Simulation(max_running=8)
    s.ask(20, max_tokens=5, n=50)
    for _ in range(3):
        s.step()
    s.ask(20, max_tokens=5, n=50)
    for _ in range(5):
        s.step()
    s.scheduler.admit()
    assert Counter(r.caller.call for r in s.scheduler.running) == {0: 4, 50: 4}
    assert s.scheduler.num_preempted == 1, "the others came as places were left"


@pytest.mark.parametrize(("known", "bound"), [(1, 1), (20, 1), (64, 1), (65, 2), (640, 10)])
@pytest.mark.parametrize("step", [1, 15, 28])
def test_a_prompt_next_to_one_of_3900_tokens_has_at_least_half_of_the_rows(step, known, bound):
    s = Simulation()
    [long] = s.ask(3900, max_tokens=1)
    for _ in range(step):
        s.step()
    [small] = s.ask(known)
    s.finish()
    assert s.waited[small] <= bound
    assert s.waited[long] <= -(-(3900 + known) // 128), "no row is lost"


def test_under_a_flood_of_small_prompts_a_long_one_takes_at_most_twice_as_long():
    s = Simulation()
    [long] = s.ask(3900, max_tokens=1)
    while long in s.requests:
        for _ in range(10):
            s.ask(20, max_tokens=1)
        s.step()
    assert s.waited[long] <= 2 * -(-3900 // 128)


def test_equal_prompts_are_computed_one_after_the_other():
    """Side by side all of them would be as late as the last one."""
    s = Simulation(max_batched_tokens=128)
    prompts = [s.ask(256, max_tokens=1)[0] for _ in range(4)]
    s.finish()
    assert [s.waited[id] for id in prompts] == [2, 4, 6, 8]


def test_of_a_single_row_each_step_a_short_prompt_has_every_other_one():
    s = Simulation(prefill_chunk=1)
    s.ask(1, max_tokens=30)  # a stream
    s.ask(100, max_tokens=1)
    s.step()
    [small] = s.ask(10)
    s.finish()
    assert 10 <= s.waited[small] <= 2 * 10


def test_many_prompts_of_one_call_leave_half_of_the_rows_to_another():
    s = Simulation()
    call = s.ask(500)[0]
    for _ in range(199):
        s.ask(500, call=call)
    for _ in range(5):
        s.step()
    [small] = s.ask(500)
    s.finish()
    assert s.waited[small] <= -(-500 // 64)


@pytest.mark.parametrize("num_tenants", [1, 2, 3])
def test_many_requests_of_one_key_leave_places_and_rows_to_another(num_tenants):
    """Each tenant has an even share of the rows, and no tenant's request waits for a place."""
    s = Simulation()
    for _ in range(200):
        s.ask(300, max_tokens=50, tenant=0)
    for _ in range(30):
        s.step()
    assert len(s.scheduler.running) == 64
    others = [s.ask(300, tenant=1 + i)[0] for i in range(num_tenants)]
    preempted = s.scheduler.num_preempted
    s.step()
    assert {*others} <= {*ids(s.scheduler.running)}
    assert s.scheduler.num_preempted - preempted == num_tenants
    s.finish()
    assert max(s.waited[id] for id in others) <= -(-300 // (128 // (1 + num_tenants)))


def test_calls_of_one_key_are_as_fair_to_each_other_as_keys_are():
    s = Simulation()
    s.ask(100, max_tokens=150, n=128, tenant=7)
    for _ in range(10):
        s.step()
    [small] = s.ask(20, tenant=7)
    s.finish()
    assert s.waited[small] == 1


def test_a_key_with_many_calls_has_no_more_places_than_one_with_few():
    s = Simulation(max_running=10)
    for _ in range(100):
        s.ask(20, max_tokens=20, tenant=0)
    for _ in range(5):
        s.step()
    for _ in range(100):
        s.ask(20, max_tokens=20, tenant=1)
    s.step()
    assert Counter(r.caller.tenant for r in s.scheduler.running) == {0: 5, 1: 5}


def test_while_every_call_has_one_place_newcomers_wait_in_order_and_nobody_is_preempted():
    s = Simulation(max_running=4)
    first = [s.ask(20)[0] for _ in range(4)]
    s.step()
    second = [s.ask(20)[0] for _ in range(4)]
    s.finish()
    assert s.scheduler.num_preempted == 0
    waited = [s.waited[id] for id in first + second]
    assert waited == [1] * 4 + [10] * 4


def test_the_smaller_priority_has_places_and_rows_before_all_shares():
    s = Simulation()
    s.ask(100, max_tokens=150, n=128, priority=0)
    for _ in range(10):
        s.step()
    [later] = s.ask(20, priority=1)
    [long] = s.ask(1280, priority=-1)
    [equal] = s.ask(20, priority=0)
    for _ in range(10):
        s.step()
    assert s.waited[long] == 10, "all rows are its own"
    assert equal in s.requests and equal not in s.waited, "it has a place, and no rows yet"
    s.finish()
    assert s.waited[equal] <= 11
    assert s.waited[later] > 100, "all of the larger call come first"


def test_under_a_flood_of_single_requests_every_choice_ends():
    s = Simulation(max_running=4)
    large = s.ask(50, max_tokens=8, n=12)
    s.step()
    while any(id in s.requests for id in large) and s.num_steps < 2000:
        s.ask(20, max_tokens=8)  # 4 places serve one in two steps
        s.step()
    assert not any(id in s.requests for id in large)
    assert s.num_steps <= 12 * (8 + 4), "a place of the call is never taken by another"


def test_an_unrelated_request_is_admitted_past_any_number_that_wait_for_a_block():
    """Further behind than there are places."""
    s = Simulation(max_running=8)
    for _ in range(300):
        s.ask(1000, is_alike=True)
    s.step()
    assert len(s.scheduler.running) == 1
    [other] = s.ask(20)
    s.step()
    assert s.waited[other] == 1
    s.finish()


@pytest.mark.parametrize("event", ["preempted", "ended"])
def test_who_waits_for_a_block_is_admitted_when_nobody_computes_it_any_more(event):
    s = Simulation()
    first, second = (s.ask(1000, is_alike=True)[0] for _ in range(2))
    s.step()
    assert ids(s.scheduler.running) == [first]
    if event == "preempted":
        s.scheduler.preempt(s.requests[first])
        s.end(first)
    else:
        s.end(first)
    s.step()
    assert ids(s.scheduler.running) == [second]


def test_who_leaves_while_it_waits_for_a_block_leaves_nothing_behind():
    s = Simulation()
    first, second = (s.ask(1000, is_alike=True)[0] for _ in range(2))
    s.step()
    s.end(second)
    s.finish()
    queue = s.scheduler.waiting
    assert (first in s.waited, len(queue), queue.lines, queue.aside) == (True, 0, {}, {})


class Counting(Counter):
    """Counts how often it is asked."""

    num_asked = 0

    def __getitem__(self, key):
        self.num_asked += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("num_calls", [10, 1000])
@pytest.mark.parametrize("num_running", [0, 8])
def test_whom_to_admit_next_is_found_without_a_look_at_the_queue(num_calls, num_running):
    s, queue = scheduler(), Queue()
    for id in range(num_calls):
        queue.add(request(s, id, 1))
    places = RunningCounts([request(s, 5000 + id, 1, call=id) for id in range(num_running)])
    places.of_call = Counting(places.of_call)
    assert queue.next(places).id == num_running
    assert places.of_call.num_asked <= 2 * num_running + 1


def test_a_step_looks_for_the_blocks_of_one_waiting_request_however_many_there_are():
    s = Simulation()
    for _ in range(600):
        s.ask(200)
    for _ in range(120):
        s.step()
    s.scheduler.admit()
    assert len(s.scheduler.running) == 64
    finds = []
    for r in s.scheduler.waiting:
        r.table.find = lambda token_ids, find=r.table.find: finds.append(1) or find(token_ids)
    s.scheduler.admit()
    assert len(finds) <= 1


def split(prompts, rows=128, step=0):
    """Rows for prompts of (call, tenant, tokens), or of tokens alone."""
    s, asked = scheduler(), []
    for id, prompt in enumerate(prompts):
        call, tenant, known = prompt if isinstance(prompt, tuple) else (id, 0, prompt)
        asked.append(request(s, id, known, call=call, tenant=tenant))
    given = prefill_rows(asked, rows, step)
    return [given[r.id] for r in asked]


ROWS = {  # prompts -> their rows of 128
    "a short one after a long one": ([1000, 20], [108, 20]),
    "half at least for the first": ([1000, 500], [64, 64]),
    "half at least for the shortest": ([1000, 500, 100], [64, 0, 64]),
    "what it leaves goes to the next shortest": ([1000, 500, 50, 50], [64, 0, 50, 14]),
    "two short ones": ([1000, 20, 30], [78, 20, 30]),
    "equal ones by rank": ([200, 200], [128, 0]),
    "the rest of the first": ([90, 200], [90, 38]),
    "a call counts as a whole": ([(0, 0, 60), (0, 0, 60), (2, 0, 100)], [60, 4, 64]),
    "tenants, evenly": ([(0, 0, 500), (1, 0, 500), (2, 1, 500)], [64, 0, 64]),
    "what a tenant leaves": ([(0, 0, 500), (1, 1, 28)], [100, 28]),
    "nobody": ([], []),
}


@pytest.mark.parametrize(("prompts", "want"), ROWS.values(), ids=ROWS)
def test_the_rows_of_prompts(prompts, want):
    assert split(prompts) == want


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(2, 300)), max_size=9
    ),
    rows=st.integers(0, 200),
    step=st.integers(0, 9),
)
def test_rows_of_prompts_are_all_used_and_the_first_of_a_tenant_has_half_of_its_share(
    prompts, rows, step
):
    got = split(prompts, rows, step)
    assert sum(got) == min(rows, sum(known for _, _, known in prompts))
    assert all(some <= known for some, (_, _, known) in zip(got, prompts, strict=True))
    for tenant in {tenant for _, tenant, _ in prompts}:
        own = [(some, p[2]) for some, p in zip(got, prompts, strict=True) if p[1] == tenant]
        first, known = own[0]
        assert first >= min(known, sum(some for some, _ in own) // 2)


AMPLE = 400  # blocks for all that a test may ask

asks = st.tuples(
    st.integers(1, 60),  # known tokens
    st.integers(1, 12),  # tokens to say
    st.integers(1, 4),  # choices
    st.integers(0, 2),  # tenant
    st.integers(0, 1),  # priority
    st.booleans(),  # of the call before
    st.booleans(),  # alike
)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 3), asks), min_size=1, max_size=12),
    events=st.lists(st.sampled_from(["", "", "end", "preempt", "reset"]), max_size=30),
    max_running=st.integers(1, 6),
    chunk=st.integers(1, 40),
    num_blocks=st.sampled_from([6, 12, AMPLE]),
)
def test_places_are_fair_in_every_step_and_everyone_ends(
    asked, events, max_running, chunk, num_blocks
):
    s = Simulation(num_blocks, max_running=max_running, prefill_chunk=chunk)
    call = scope = 0
    events = iter(events)
    for pause, (known, max_tokens, n, tenant, priority, is_more, is_alike) in asked:
        call, scope = (call, scope) if is_more else (s.num_asked, tenant)
        s.ask(known, max_tokens, n, call, scope, priority, is_alike)
        for _ in range(pause):
            disturbed_step(s, next(events, ""))
    while s.requests:
        disturbed_step(s, next(events, ""))
    queue, pool = s.scheduler.waiting, s.scheduler.pool
    assert (len(queue), queue.lines, queue.aside) == (0, {}, {}) and pool.is_whole


def disturbed_step(s, event):
    scheduler = s.scheduler
    if event == "end" and s.requests:
        s.end(min(s.requests))
    if event == "preempt" and scheduler.running:
        scheduler.preempt(scheduler.running[-1])
    if event == "reset":
        scheduler.pool.reset_cache()
    scheduler.admit()
    assert scheduler.running == sorted(scheduler.running, key=lambda r: r.rank)
    assert sorted(ids([*scheduler.running, *scheduler.waiting])) == sorted(s.requests)
    if scheduler.pool.num_blocks == AMPLE:
        check_places(scheduler)
    assert s.step() or not s.requests, "a step with someone waiting serves someone"


def check_places(scheduler):
    """With enough blocks, a request of the smallest waiting priority waits only if all places are
    taken, and none of them is due to its tenant or its call.
    """
    running, lines = scheduler.running, scheduler.waiting.lines
    if not lines:
        return
    assert len(running) == scheduler.budget.max_running
    first = min(lines)
    tenants, calls = (
        Counter(getattr(r.caller, what) for r in running) for what in ("tenant", "call")
    )
    peers = [r.caller for r in running if r.sampling.priority == first]
    assert all(r.sampling.priority <= first for r in running)
    for tenant, line in lines[first].items():
        if any(calls[call] == 0 for call in line.calls):
            assert all(calls[c.call] == 1 for c in peers if c.tenant == tenant)
            assert all(tenants[c.tenant] <= tenants[tenant] + 1 for c in peers)
