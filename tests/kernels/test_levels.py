"""What must hold on every instruction set that the kernels are compiled for."""

import pytest
import torch

from specserve_kernels import SampleParams, cpu
from specserve_kernels.cpu import build
from specserve_kernels.cpu.levels import usable_levels
from tests.kernels.levels import EMULATED, running_on
from tests.kernels.random_steps import RandomStep, Req, queries, random_tensor


def test_the_ops_run_on_the_level_that_a_test_asks_for(every_level):
    best = usable_levels()[-1].name if usable_levels() else build.level()
    assert build.level() == (best if every_level == "native" else every_level)
    assert cpu.arithmetic() == f"cpu {build.level()}"


def test_the_level_is_the_native_one_again_afterwards():
    before = cpu.library()
    with running_on(EMULATED):
        assert cpu.library() is not before
    assert cpu.library() is before


def some_results(dtype):
    x, w = (random_tensor(n, 331, dtype=dtype, seed=n) for n in (9, 500))
    logits = cpu.linear(x, cpu.prepack(w))
    params = SampleParams.greedy(9)._replace(temperature=torch.full((9,), 0.8))
    step = RandomStep([Req(70, parents=[0, 1, 1, 0]), Req(33, 8)], dtype=dtype).filled()
    return [
        logits,
        cpu.rms_norm(x, w[0], 1e-6),
        cpu.sample(logits, torch.arange(9), params),
        *cpu.top_children(logits, params, 4, 0.8),
        step.attend(cpu, queries(step, 13)),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not usable_levels(), reason="no library is built for this CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prebuilt_library_gives_the_bits_of_one_compiled_for_this_cpu(dtype):
    """Both name the same level, and so have the same fingerprint."""
    results = []
    for name in ("native", usable_levels()[-1].name):
        with running_on(name):
            results.append(some_results(dtype))
    assert all(map(torch.equal, *results))
