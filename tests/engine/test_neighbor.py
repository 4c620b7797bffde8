"""Steps beside another process that keeps a CPU busy."""

import subprocess
import sys
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import pytest
import torch

from specserve_kernels.threads import topology
from specserve_kernels.types import FixedThreads
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small
from tests.engine.test_engine import greedy

# A step of some milliseconds with a hundred barriers: larger ones lose less at each.
SIZES = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
STEPS, ROUNDS = 40, 3


@contextmanager
def busy_process():
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()


def seconds_of_steps(engine, number):
    seconds = []
    for _ in range(number):
        start = perf_counter()
        engine.step()
        seconds.append(perf_counter() - start)
    return seconds


@pytest.mark.slow
@pytest.mark.skipif(topology().cpus < 2, reason="one CPU leaves no choice")
def test_a_busy_process_costs_a_step_no_more_than_its_share_of_the_cpus(tmp_path):
    """The median is at most 4 times as long as alone: the kernel's time slices alone double it."""
    folder = tiny_checkpoint(tmp_path, dtype=torch.bfloat16, **SIZES)
    engine = engine_for(load_small(folder, "bf16"))
    engine.target.threads = FixedThreads(2)
    engine.add([5, 17, 42], greedy(280))
    seconds_of_steps(engine, 10)
    alone, beside = [], []
    for _ in range(ROUNDS):
        alone += seconds_of_steps(engine, STEPS)
        with busy_process():
            beside += seconds_of_steps(engine, STEPS)
    print(f"alone {1e3 * median(alone):.2f} ms, beside {1e3 * median(beside):.2f} ms")
    assert not engine.is_idle, "the request ended early"
    assert median(beside) <= 4 * median(alone)
