"""Tests write results although the tree that is under development has changes."""

import pytest

from specserve_bench import machine


@pytest.fixture(scope="session", autouse=True)
def committed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "commit", lambda: "0123456789ab")
        yield
