import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small ops lose to barriers; a test that sets another number need not tidy up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
