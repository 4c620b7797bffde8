"""Jobs of several owners share a few places."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from specserve.exchange.fair_queue import (
    MAX_IDLE,
    FairQueue,
    FairThreads,
    FairTurns,
    has_room,
    owner,
)


class Clock:
    """Seconds that a test sets."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def queue_of(num_places):
    clock = Clock()
    return FairQueue(num_places, clock), clock


def run(queue, clock, seconds):
    """Give a place to the next job, and end it after so many seconds; what it was."""
    job = queue.take()
    clock.seconds += seconds
    queue.end(job)
    return job.item


def test_an_owner_that_comes_later_waits_for_one_job_only():
    queue, clock = queue_of(1)
    for n in range(5):
        queue.add("many", f"many {n}")
    assert run(queue, clock, 1) == "many 0"
    queue.add("few", "few 0")
    assert [run(queue, clock, 1) for _ in range(3)] == ["many 1", "few 0", "many 2"]


def test_owners_get_equal_seconds_and_not_equal_jobs():
    queue, clock = queue_of(1)
    for seconds in [10, 1] * 40:
        queue.add(f"jobs of {seconds} s", seconds)
    done = []
    for _ in range(22):
        job = queue.take()
        clock.seconds += job.item
        queue.end(job)
        done.append(job.item)
    assert done.count(10) in (2, 3)


@pytest.mark.parametrize("num_places", [2, 3])
def test_one_owner_never_has_all_places(num_places):
    queue, _ = queue_of(num_places)
    for _ in range(5):
        queue.add("greedy", "greedy")
    assert [queue.take() is not None for _ in range(num_places)] == [True] * (num_places - 1) + [
        False
    ]
    queue.add("other", "other")
    assert queue.take().item == "other"


def test_owners_that_are_unknown_may_have_all_places():
    queue, _ = queue_of(2)
    for n in range(3):
        queue.add(None, n)
    assert [queue.take().item for _ in range(2)] == [0, 1]
    assert queue.take() is None


def test_one_place_stays_free_of_large_jobs():
    queue, _ = queue_of(2)
    for n in range(3):
        queue.add(n, f"large {n}", is_large=True)
    first = queue.take()
    assert first.item == "large 0" and queue.take() is None
    queue.add(3, "small")
    assert queue.take().item == "small"
    queue.end(first)
    assert queue.take().item == "large 1"


def test_small_jobs_of_an_owner_pass_large_ones_and_starve_none():
    queue, clock = queue_of(1)
    for n in range(3):
        queue.add("one", f"large {n}", is_large=True)
    for n in range(3):
        queue.add("one", f"small {n}")
    done = [run(queue, clock, 1) for _ in range(6)]
    assert done == [f"{kind} {n}" for n in range(3) for kind in ("small", "large")]


def test_an_owner_that_comes_back_has_no_saved_seconds():
    queue, clock = queue_of(1)
    queue.add("a", "a")
    queue.add("b", "b")
    run(queue, clock, 1)
    for _ in range(50):
        queue.add("b", "b")
        run(queue, clock, 1)
    for _ in range(4):
        queue.add("a", "a")
        queue.add("b", "b")
    done = [run(queue, clock, 1) for _ in range(4)]
    assert done.count("a") == 2


def test_a_job_that_is_given_up_leaves_the_queue_and_its_owner_is_not_charged():
    queue, clock = queue_of(1)
    given_up, kept = queue.add("a", "given up"), queue.add("a", "kept")
    clock.seconds = 5.0
    queue.end(given_up)
    assert queue.take() is kept and queue.spent == {"a": 0.0}


def test_owners_that_are_idle_take_bounded_memory():
    queue, clock = queue_of(1)
    for n in range(3 * MAX_IDLE):
        queue.add(n, n)
        run(queue, clock, 1)
    assert len(queue.spent) <= MAX_IDLE + 1 and not queue.waiting and not queue.held


def test_tasks_take_turns_by_their_owner():
    async def run():
        turns, done, go = FairTurns(1), [], asyncio.Event()

        async def task(name):
            owner.set(name[0])
            async with turns.turn():
                await go.wait()
                done.append(name)

        tasks = [asyncio.create_task(task(name)) for name in ("a1", "a2", "a3", "b1")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        go.set()
        await asyncio.wait(tasks)
        assert sorted(done[:2]) == ["a1", "b1"] and done[2] == "a3"
        assert turns.queue.take() is None and not turns.queue.held

    asyncio.run(run())


def test_an_error_within_a_turn_gives_its_place_back():
    async def run():
        turns = FairTurns(1)
        for _ in range(3):
            with pytest.raises(ValueError, match="wrong"):
                async with turns.turn():
                    raise ValueError("wrong")

    asyncio.run(run())


@pytest.fixture
def threads():
    threads = FairThreads(2, "test")
    yield threads
    threads.close()


def test_a_long_job_of_one_owner_holds_up_no_other_owner(threads):
    go = threading.Event()
    stuck = [threads.submit("a", go.wait) for _ in range(3)]
    assert threads.submit("b", lambda: "done").result(10) == "done"
    assert not any(future.done() for future in stuck)
    go.set()
    assert [future.result(10) for future in stuck] == [True] * 3


def test_threads_pass_errors_on_and_skip_what_is_cancelled(threads):
    go = threading.Event()
    stuck = threads.submit("a", go.wait)
    given_up = threads.submit("a", lambda: pytest.fail("it was cancelled"))
    failing = threads.submit("a", lambda: [][0])
    assert given_up.cancel()
    go.set()
    with pytest.raises(IndexError):
        failing.result(10)
    assert stuck.result(10)


def test_closing_cancels_what_waits(threads):
    go = threading.Event()
    threads.submit("a", go.wait)
    waiting = threads.submit("a", lambda: None)
    threads.close()
    with pytest.raises(CancelledError):
        waiting.result()
    go.set()


@pytest.mark.parametrize(
    ("who", "asked", "own", "held", "is_accepted"),
    [
        (1, 4, 60, 76, True),  # below the limit
        (1, 4, 7, 80, False),  # beyond it, and beyond the key's share
        (1, 4, 6, 80, True),
        (1, 4, 0, 156, True),
        (1, 4, 0, 157, False),  # all keys hold twice the limit
        (("::1", 9), 1, 0, 80, False),  # without keys there are no shares
        (None, 1, 0, 80, False),
    ],
)
def test_a_key_below_its_share_has_room_in_what_others_have_filled(
    who, asked, own, held, is_accepted
):
    owner.set(who)
    assert has_room(asked, own, held, most=80) == is_accepted
