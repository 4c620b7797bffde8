import pytest
import torch

from specserve_kernels import cpu
from specserve_kernels.cpu import ops
from tests.kernels.levels import (
    ARM,
    ARM_LEVELS,
    ARM_PARAM,
    INTEGER_SOURCES,
    LEVEL_PARAMS,
    arm_server,
    running_on,
)
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


@pytest.fixture(scope="session", params=ARM_LEVELS)
def integers_of_arm(request, tmp_path_factory):
    """A server for the ops of integer products, at one level of ARM."""
    server = arm_server(tmp_path_factory.mktemp("arm"), request.param, INTEGER_SOURCES)
    yield server
    server.close()


@pytest.fixture
def arm_level(integers_of_arm):
    """The ops of integer products run on one level of ARM."""
    with running_through(integers_of_arm):
        yield


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
