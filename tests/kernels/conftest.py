import pytest

from tests.kernels.levels import PARAMS, running_on


@pytest.fixture(params=PARAMS)
def every_level(request):
    """The name of a level whose library the ops run on."""
    with running_on(request.param):
        yield request.param
