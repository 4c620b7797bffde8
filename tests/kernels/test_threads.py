"""How many threads a step is given, and what that is learnt from."""

import json
import os
import random
import threading

import pytest
import torch

from specserve_kernels import cpu, reference
from specserve_kernels.cpu.threads import HOPELESS_STEPS, RARELY, SOON, STEPS, MeasuredThreads
from specserve_kernels.threads import Topology, allowed_threads, topology

HOST_BUILDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specserve"


def untimed(rows):
    raise AssertionError("no step is run at load")


def run(threads, seconds, rows=4, steps=200):
    """Steps that take seconds(number of threads); the numbers that were used."""
    used = []
    while len(used) < steps and not threads.is_settled(rows):
        threads.use(rows)
        used.append(torch.get_num_threads())
        threads.observe(rows, seconds(used[-1]))
    return used


def chosen(threads, rows):
    threads.use(rows)
    return torch.get_num_threads()


def measured(cores, cpus=None, file=None):
    return MeasuredThreads(Topology(cpus or cores, cores), file)


COSTS = {  # cores, CPUs, seconds of a step by number of threads -> the best number
    "all are best": (8, 8, {8: 1.0, 7: 1.1, 4: 1.5, 2: 3.0, 1: 6.0}, 8),
    "half are best": (8, 8, {8: 1.2, 4: 1.0, 2: 1.1, 1: 2.0}, 4),
    "one is best": (8, 8, {8: 4.0, 4: 3.0, 2: 2.0, 1: 1.0}, 1),
    "two, and all are best": (2, 2, {2: 1.0, 1: 1.9}, 2),
    "two, and one is best": (2, 2, {2: 1.0, 1: 0.9}, 1),
    "an odd number": (3, 3, {3: 1.0, 2: 0.9, 1: 1.2}, 2),
    "one core is another's": (8, 8, {8: 2.0, 7: 1.1, 4: 2.1}, 7),
    "two CPUs a core help": (4, 8, {8: 0.9, 4: 1.0, 2: 1.9}, 8),
    "two CPUs a core harm": (4, 8, {8: 1.3, 4: 1.0, 3: 1.2, 2: 1.9}, 4),
    "one core of two CPUs": (1, 2, {2: 0.9, 1: 1.0}, 2),
    "six cores": (6, 12, {12: 9.0, 6: 3.0, 4: 2.0, 2: 2.5}, 4),
}


@pytest.mark.parametrize(("cores", "cpus", "cost", "best"), COSTS.values(), ids=COSTS)
def test_the_fastest_number_of_threads_is_found(cores, cpus, cost, best):
    threads = measured(cores, cpus)
    assert run(threads, cost.__getitem__)[0] == cores
    assert threads.is_settled(4) and chosen(threads, 4) == best


# What a step costs by its threads, relative to one: work divided, and what does not shrink.
MACHINES = {
    "work that scales": lambda n, m: 1 / n,
    "memory that four threads exhaust": lambda n, m: max(1 / n, 1 / 4) + 0.002 * n,
    "barriers as long as the work": lambda n, m: 1 / n + 0.05 * n,
    "nothing to divide": lambda n, m: 1 + 0.05 * n,
    "two CPUs of a core in each other's way": lambda n, m: 1 / min(n, m) + 0.01 * max(0, n - m),
    "a core that another process keeps busy": lambda n, m: 2 / n if n >= m else 1 / n,
}


@pytest.mark.parametrize(("cores", "cpus"), [(3, 3), (4, 8), (6, 6), (8, 16), (32, 32), (64, 128)])
@pytest.mark.parametrize("cost", MACHINES.values(), ids=MACHINES)
def test_many_cores_are_soon_no_slower_than_two(cost, cores, cpus):
    """On machines that are simulated: none with more than two cores has been measured."""
    threads = measured(cores, cpus)
    seconds = lambda number: cost(number, cores)  # noqa: E731
    used = run(threads, seconds)
    assert len(used) <= 2 * STEPS * 7
    assert seconds(chosen(threads, 4)) <= min(seconds(1), seconds(2))
    best = min(map(seconds, range(1, cpus + 1)))
    assert seconds(chosen(threads, 4)) <= 1.5 * best


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("best", [1, 2])
def test_a_busy_neighbour_does_not_decide(best, seed):
    """One step in four takes up to ten times as long, whatever their threads."""
    noise = random.Random(seed)

    def seconds(number):
        slowed = noise.uniform(1, 10) if noise.random() < 0.25 else 1.0
        return (1.0 if number == best else 1.4) * noise.uniform(1.0, 1.05) * slowed

    threads = measured(2)
    run(threads, seconds)
    assert chosen(threads, 4) == best


def test_both_numbers_are_tried_in_turns():
    used = run(measured(2), {2: 1.0, 1: 1.1}.__getitem__)
    assert used == [2, 1] * STEPS


def test_what_is_far_slower_is_given_up_at_once_and_worse_is_never_tried():
    cost = {64: 1.0, 63: 1.6, 32: 1.7, 16: 3.4, 8: 7.0, 4: 14.0, 2: 28.0, 1: 56.0}
    assert run(measured(64), cost.__getitem__) == [64, 32] * 4 + [64, 63] * 4
    cost = {64: 9.0, 32: 5.0, 16: 3.0, 8: 1.0, 4: 2.0}
    tried = [[64, 32], [32, 16], [16, 8], [8, 4]]
    assert run(measured(64), cost.__getitem__) == [
        n for pair in tried for n in pair * HOPELESS_STEPS
    ]


def test_each_size_of_a_step_has_a_number_of_its_own():
    threads = measured(2)
    run(threads, {2: 2.0, 1: 1.0}.__getitem__, rows=1)
    run(threads, {2: 1.0, 1: 2.0}.__getitem__, rows=64)
    assert [chosen(threads, rows) for rows in (1, 64, 33)] == [1, 2, 2]
    assert threads.is_settled(33) and not threads.is_settled(65) and not threads.is_settled(2)


@pytest.mark.skipif(allowed_threads() == 1, reason="one CPU leaves no choice")
def test_what_is_settled_is_known_at_the_next_start(cache):
    first, words = cpu.tune(untimed, 512, None, "model")
    assert words == f"{topology().cores} until the first steps are measured"
    run(first, lambda number: float(number))
    again, words = cpu.tune(untimed, 512, None, "model")
    assert again.is_settled(4) and chosen(again, 4) == 1
    assert words.startswith("1 for up to 4 rows, ") and words.endswith(
        " for more, measured at an earlier start"
    )
    other, _ = cpu.tune(untimed, 512, None, "another model")
    assert not other.is_settled(4)


RISING = {  # settled, by size -> used, on four cores
    "nothing": ({}, {}),
    "as settled": ({0: 1, 3: 2, 5: 4}, {0: 1, 3: 2, 5: 4}),
    "one that is less than those of smaller steps": (
        {0: 2, 1: 2, 2: 1, 4: 2},
        dict.fromkeys((0, 1, 2, 4), 2),
    ),
    "one that is more than those of larger steps": (
        {0: 1, 1: 4, 2: 1, 4: 1},
        dict.fromkeys((0, 1, 2, 4), 1),
    ),
    "as many of each": ({0: 4, 1: 1, 2: 4, 4: 1}, dict.fromkeys((0, 1, 2, 4), 4)),
    "as many of each, beyond the cores": ({0: 8, 1: 4}, {0: 4, 1: 4}),
}


@pytest.mark.parametrize(("settled", "used"), RISING.values(), ids=RISING)
def test_a_step_of_more_rows_has_no_fewer_threads(settled, used, tmp_path):
    """What one noisy timing settled is outvoted by the other sizes, at once and from the file."""
    first = measured(4, 8, tmp_path / "threads.json")
    for size, number in settled.items():
        first.settle(size, number)
    for threads in first, measured(4, 8, tmp_path / "threads.json"):
        assert {size: chosen(threads, 1 << size) for size in settled} == used
        assert threads.settled == settled, "each size is compared again from its own number"


WORDS = {  # settled, by size -> the words, on eight cores
    "until the first steps are measured": ({}, "8 until the first steps are measured"),
    "one number": ({0: 8, 3: 8}, "8, measured at an earlier start"),
    "two": ({0: 1, 3: 1, 5: 8}, "1 for up to 8 rows, 8 for more, measured at an earlier start"),
    "three": (
        {5: 4, 0: 1, 3: 2, 2: 2},
        "1 for up to 1 row, 2 for up to 8 rows, 4 for up to 32 rows, 8 for more, "
        "measured at an earlier start",
    ),
}


@pytest.mark.parametrize(("settled", "words"), WORDS.values(), ids=WORDS)
def test_what_was_timed_before_is_reported_by_size_and_equal_neighbours_once(settled, words):
    threads = measured(8)
    for size, number in settled.items():
        threads.settle(size, number)
    assert threads.words() == words


SPOILT = {
    "cut short": '{"2":',
    "no table": "[1]",
    "a number alone": "7",
    "no bytes": "",
    "no number": '{"2": "1"}',
    "a truth": '{"2": true}',
    "more than there are": '{"2": 9}',
    "none at all": '{"2": 0}',
    "no size": '{"rows": 1}',
    "an absurd size": '{"-1": 1}',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_file_in_the_cache_is_ignored_and_replaced(tmp_path, text):
    file = tmp_path / "threads.json"
    file.write_text(text)
    threads = measured(2, file=file)
    assert threads.settled == {}
    run(threads, lambda number: float(number))
    assert json.loads(file.read_text()) == {"2": 1}


def test_a_file_that_is_read_is_in_use(tmp_path):
    """Files that no process has used for a month are removed."""
    file = tmp_path / "threads.json"
    file.write_text('{"2": 1}')
    os.utime(file, (0, 0))
    assert measured(2, file=file).settled == {2: 1}
    assert file.stat().st_mtime > 0


@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/1/x"])
def test_without_a_place_for_the_cache_threads_are_settled_all_the_same(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    threads, _ = cpu.tune(untimed, 512, None, "model")
    run(threads, lambda number: float(number))
    assert threads.is_settled(4)


def test_a_cache_that_has_become_full_stops_no_step(tmp_path):
    threads = measured(2, file=tmp_path / "gone" / "threads.json")
    run(threads, lambda number: float(number))
    assert chosen(threads, 4) == 1


@HOST_BUILDS
def test_threads_are_as_configured(ops):
    allowed = allowed_threads()
    threads, words = ops.tune(untimed, 512, allowed, "model")
    assert threads.is_settled(1)
    assert [chosen(threads, rows) for rows in (1, 512)] == [allowed, allowed]
    assert words.startswith(f"{allowed}, ")


@HOST_BUILDS
def test_more_threads_than_the_process_may_use_are_refused(ops):
    allowed, before = allowed_threads(), torch.get_num_threads()
    with pytest.raises(ValueError, match=rf"^{allowed + 1} threads.* {allowed} CPUs.*Set at most"):
        ops.tune(untimed, 512, allowed + 1, "model")
    assert torch.get_num_threads() == before


def steps_of(threads, seconds, number, rows=4):
    for _ in range(number):
        threads.use(rows)
        threads.observe(rows, seconds(torch.get_num_threads()))


@pytest.mark.parametrize(("wrong", "best"), [(1, 4), (1, 2), (4, 1), (2, 4), (2, 1), (2, 2)])
def test_what_an_earlier_process_settled_wrongly_is_soon_put_right(tmp_path, wrong, best):
    """A busy machine may have decided there."""
    file = tmp_path / "threads.json"
    file.write_text(json.dumps({"2": wrong}))
    threads = measured(4, file=file)
    assert chosen(threads, 4) == wrong
    steps_of(threads, lambda number: 1.0 + abs(number - best), SOON + 6 * STEPS)
    assert threads.is_settled(4) and chosen(threads, 4) == best
    assert measured(4, file=file).settled == {2: best}


def test_what_is_settled_first_is_soon_compared_again():
    """So no neighbor that was busy for a second decides for long."""
    threads = measured(2)
    run(threads, {2: 1.0, 1: 0.5}.__getitem__)
    assert chosen(threads, 4) == 1
    steps_of(threads, {2: 1.0, 1: 3.0}.__getitem__, SOON + 2 * STEPS)
    assert threads.is_settled(4) and chosen(threads, 4) == 2


def test_what_two_searches_agree_on_is_compared_again_when_much_later_steps_have_run():
    threads = measured(2)
    steps_of(threads, {2: 1.0, 1: 0.5}.__getitem__, SOON + 4 * STEPS)
    steps_of(threads, {2: 1.0, 1: 3.0}.__getitem__, RARELY // 2)
    assert threads.is_settled(4) and chosen(threads, 4) == 1
    steps_of(threads, {2: 1.0, 1: 3.0}.__getitem__, RARELY // 2)
    assert threads.is_settled(4) and chosen(threads, 4) == 2


def test_engines_that_share_a_model_may_step_at_once():
    """Each step is charged to the number that it had, unless that duel is over."""
    shared = MeasuredThreads(Topology(8, 8))
    shared.use(4)
    other = threading.Thread(target=lambda: run(shared, lambda number: 1 / number))
    other.start()
    other.join()
    assert shared.is_settled(4)
    shared.observe(4, 1e9)
    begun = MeasuredThreads(Topology(8, 8))
    begun.use(4)
    del begun.duels[2].seconds[8]
    begun.observe(4, 1.0)
