import pytest


@pytest.fixture(autouse=True)
def alone(one_thread):
    """Small ops lose to barriers; a test that sets another number need not tidy up."""
