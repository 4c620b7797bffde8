import pytest
import torch

from specserve_kernels import cpu
from specserve_kernels.cpu import ops
from tests.kernels.levels import ARM, ARM_PARAM, LEVEL_PARAMS, arm_server, running_on
from tests.kernels.remote import running_through


@pytest.fixture(params=LEVEL_PARAMS)
def every_level(request):
    """The name of a level whose library the ops run on."""
    with running_on(request.param):
        yield request.param


@pytest.fixture(scope="session")
def arm(tmp_path_factory):
    server = arm_server(tmp_path_factory.mktemp("arm"))
    yield server
    server.close()


@pytest.fixture(params=[*LEVEL_PARAMS, ARM_PARAM])
def every_level_and_arm(request):
    name = request.param
    with running_through(request.getfixturevalue("arm")) if name == ARM else running_on(name):
        yield name


@pytest.fixture
def gemm(every_level, monkeypatch):
    """The CPU's ops on one level, with all threads however little there is to do; memory that an op
    has not written is NaN.
    """
    monkeypatch.setattr(ops, "SHORT", 0)
    torch.use_deterministic_algorithms(True)
    yield cpu
    torch.use_deterministic_algorithms(False)
