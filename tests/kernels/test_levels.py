"""What must hold on every instruction set that the kernels are compiled for."""

import subprocess
import sys

import pytest
import torch

from specserve_kernels import SampleParams, cpu, reference
from specserve_kernels.cpu import build
from specserve_kernels.cpu.arguments import AttentionPlan
from specserve_kernels.cpu.compiler import FLAGS, FOLDER
from specserve_kernels.cpu.levels import usable_levels
from tests.kernels.levels import ARM, EMULATED, EVERY_LEVEL_AND_ARM, running_on
from tests.kernels.random_steps import (
    RandomStep,
    Req,
    only,
    queries,
    random_tensor,
    row_errors,
)


def test_the_ops_run_on_the_level_that_a_test_asks_for(every_level_and_arm):
    best = usable_levels()[-1].name if usable_levels() else build.level()
    want = {"native": best, ARM: "aarch64"}.get(every_level_and_arm, every_level_and_arm)
    assert build.level() == want
    assert cpu.arithmetic() == f"cpu {want}"


def test_the_level_is_the_native_one_again_afterwards():
    before = cpu.library()
    with running_on(EMULATED):
        assert cpu.library() is not before
    assert cpu.library() is before


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
REQS = [Req(70, parents=[0, 1, 1, 0]), Req(33, 8)]


def some_results(ops, dtype, rows):
    """What the ops give for some of 13 rows, a tensor for each op."""
    x, w = (random_tensor(n, 331, dtype=dtype, seed=n) for n in (13, 500))
    logits = ops.lm_head(x[rows], ops.prepack(w))
    temperature = torch.arange(13) % 3 / 2
    params = SampleParams.greedy(13)._replace(temperature=temperature)
    params = params.take(rows)
    step = RandomStep(REQS, dtype=dtype).filled()
    return [
        logits,
        ops.rms_norm(x[rows], w[0].float(), 1e-6),
        ops.sample(logits, torch.arange(len(rows)), params)[:, None],
        *ops.top_children(logits, params, 4, 0.8),
        step.attend(ops, queries(step, 13)[rows], rows=only(step.rows(), rows)),
    ]


@EVERY_LEVEL_AND_ARM
@DTYPES
def test_the_ops_compute_as_the_reference(dtype):
    every = list(range(13))
    got, want = (some_results(ops, dtype, every) for ops in (cpu, reference))
    tolerance = 1e-5 if dtype == torch.float32 else 6e-3
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert (row_errors(one, other) < tolerance).all()


@EVERY_LEVEL_AND_ARM
@DTYPES
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    every = some_results(cpu, dtype, list(range(13)))
    for threads, rows in ((1, [4]), (2, [0, 1, 12]), (3, [6, 7, 8, 9, 10])):
        torch.set_num_threads(threads)
        for some, all_of_them in zip(some_results(cpu, dtype, rows), every, strict=True):
            assert torch.equal(some, all_of_them[rows])


@pytest.mark.slow
@pytest.mark.skipif(not usable_levels(), reason="no library is built for this CPU")
@DTYPES
def test_a_prebuilt_library_gives_the_bits_of_one_compiled_for_this_cpu(dtype):
    """Both name the same level, and so have the same fingerprint."""
    results = []
    for name in ("native", usable_levels()[-1].name):
        with running_on(name):
            results.append(some_results(cpu, dtype, list(range(13))))
    assert all(map(torch.equal, *results))


@pytest.mark.slow
@pytest.mark.parametrize("cpu_name", ["neoverse_n1", "neoverse_v1"])  # dotprod; and i8mm
def test_clang_compiles_kernels_for_arm(cpu_name, tmp_path):
    """Those that include most headers. Clang lacks some of GCC's extensions."""
    pytest.importorskip("ziglang", reason="needs the package ziglang: NOT checked here")
    target = "-target", "aarch64-linux-gnu", f"-mcpu={cpu_name}"
    flags = *(flag for flag in FLAGS if flag != "-fno-gnu-unique"), "-O1"
    for name in ("attention.cpp", "gemm_rounded.cpp", "layers.cpp"):
        files = FOLDER / name, "-o", tmp_path / "object.o"
        command = [sys.executable, "-m", "ziglang", "c++", *target, *flags, "-c", *files]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:2000]


def test_an_attention_plan_is_freed_by_the_library_that_has_made_it(monkeypatch):
    """A search for the library could compile one, at any time that memory is freed."""
    asked, plan = [], AttentionPlan()
    monkeypatch.setattr(build, "kernels", lambda: asked.append("kernels"))
    del plan
    assert not asked
