"""What must hold on every instruction set that the kernels are compiled for."""

import pytest

from specserve_kernels import cpu
from specserve_kernels.cpu import build
from specserve_kernels.cpu.levels import usable_levels
from tests.kernels.levels import EMULATED, FLAGS, running_on


def test_the_ops_run_on_the_level_that_a_test_asks_for(every_level):
    best = usable_levels()[-1].name if usable_levels() else build.level()
    assert build.level() == (best if every_level == "native" else every_level)
    assert cpu.arithmetic() == f"cpu {build.level()}"


@pytest.mark.parametrize("name", FLAGS)
def test_the_level_is_the_native_one_again_afterwards(name):
    before = cpu.library()
    with running_on(EMULATED):
        assert cpu.library() is not before
    assert cpu.library() is before
