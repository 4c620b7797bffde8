"""Tests write results although the tree that is under development has changes."""

import pytest

from specserve_bench import machine


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    monkeypatch.setattr(machine, "commit", lambda: "0123456789ab")
