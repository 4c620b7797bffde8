import pytest


@pytest.fixture(autouse=True)
def alone(one_thread):
    pass
