import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """For tiny models threads are all barrier, which a busy machine turns into seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
