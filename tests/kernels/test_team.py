"""The threads that run the ops: barriers, sleep, forks, and a neighbor that needs the CPU too."""

import os

import pytest
import torch

from specserve_kernels import cpu
from tests.kernels.programs import compile_program, output
from tests.kernels.random_steps import random_tensor


def test_what_a_thread_wrote_before_a_barrier_is_seen_after_it_by_all(tmp_path):
    """With teams of any size, threads that come late, and several callers at once."""
    program = compile_program("team", tmp_path, ["team.cpp"])
    assert output(program) == "0 wrong\n"


def test_a_team_that_gets_fewer_threads_does_all_of_the_work(tmp_path):
    program = compile_program("few_threads", tmp_path, ["team.cpp"])
    assert output(program) == "2 of 2: 100\n3 of 8: 100\n3 of 8: 100\n1 of 1: 100\n"


def test_an_op_without_rows_costs_no_barrier(tmp_path):
    program = compile_program("lists", tmp_path, ["team.cpp", "run.cpp"])
    assert output(program) == "3\n1\n2\n"


@pytest.mark.slow
def test_the_threads_race_for_nothing(tmp_path):
    """As ThreadSanitizer sees it, which knows nothing of futexes and thus trusts no wake-up."""
    flags = "-O1", "-g", "-fsanitize=thread"
    program = compile_program("team", tmp_path, ["team.cpp"], flags)
    assert output(program, timeout=300) == "0 wrong\n"


def normalized(x, weight):
    return cpu.rms_norm(x, weight, 1e-6).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    x, weight = random_tensor(256, 512), torch.ones(512)
    torch.set_num_threads(2)
    want = normalized(x, weight)  # the threads are there
    child = os.fork()
    if child == 0:  # without torch's own threads, which a fork does lose
        os._exit(0 if normalized(x, weight) == want else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert normalized(x, weight) == want
