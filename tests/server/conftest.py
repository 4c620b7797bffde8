import pytest

from tests.checkpoints import tiny_checkpoint
from tests.server.house import ServerProcess


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("served"), seed=1)


@pytest.fixture(scope="session")
def server(folder):
    """One for all tests that leave it as they found it. It drafts with n-grams."""
    with ServerProcess(folder, "--served-model-name=tiny") as server:
        yield server
        assert server.process.poll() is None, "a test has ended the server"
