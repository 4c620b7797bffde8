import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request):
    """One thread: small ops lose to barriers. `with_threads` parametrizes what needs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)
